"""What other libraries round to 8 bits is not rounded in the self-test of logits, and everywhere else it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import TINY, enlarge
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from attention.backends.reference import TorchBackend
from attention.cache.kv_cache import CacheGroup
from attention.runner import GroupRunner
from specdec.errors import UnsupportedModelError
from specdec.selftest import eager_reference
from specdec.selftest.selftest import self_test
from specdec.wrapped.probing import probe_target
from specdec.wrapped.quantised_layers import unrounded_activations
from specdec.wrapped.target import Target
from tests.fakes import load_target
from tests.quantised import compressed_tensors, need

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
CPU = torch.device("cpu")


def plain(layers: int) -> Any:
    """bfloat16, 128 wide."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 8, "head_dim": 16}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**TINY, **sizes, "num_hidden_layers": layers})).eval()
    enlarge(model.requires_grad_(False), 0)
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.mul_(0.1)
    return model.to(torch.bfloat16)


def of_compressed_tensors(preset: str) -> Callable[[int, Path], Any]:
    def made(layers: int, folder: Path) -> Any:
        need("compressed-tensors")
        compressed_tensors(preset, folder, model=plain(layers))
        return load_target(str(folder), torch.bfloat16, CPU)

    return made


def of_torchao(layers: int, _: Path) -> Any:
    """8-bit integers: torchao's float8 with dynamic scales is made on GPUs alone, by the same attribute of a weight."""
    need("torchao")
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = plain(layers)
    quantize_(model.model, Int8DynamicActivationInt8WeightConfig())
    return model


MAKERS: dict[str, Callable[[int, Path], Any]] = {
    "FP8 by token": of_compressed_tensors("FP8_DYNAMIC"),
    "FP8 by tensor, static": of_compressed_tensors("FP8"),
    "int8 by token": of_compressed_tensors("W8A8"),
    "torchao": of_torchao,
}


def target(model: Any) -> Target:
    """Without the other tests of loading."""
    probed = probe_target(model)
    group = CacheGroup("target", tuple(call.attention_spec for call in probed.calls), 40, 4)
    return Target(probed, GroupRunner(TorchBackend(CPU), group, model.dtype, CPU), (), 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["FP8 by token", *(pytest.param(n, marks=pytest.mark.long) for n in ("FP8 by tensor, static", "torchao"))]
)
@pytest.mark.thorough
def test_a_deep_model_passes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 layers: as near as the model that is not quantised (0.12); with rounding 0.42, 0.41 and 0.24."""
    deep = target(MAKERS[name](32, tmp_path))
    assert self_test(deep) < 0.16
    monkeypatch.setattr("specdec.wrapped.quantised_layers.unrounded_activations", lambda _: nullcontext())
    with pytest.raises(UnsupportedModelError, match=r"error 0\.[2345].* \(allowed for torch.bfloat16: 0.2\)"):
        self_test(deep)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "defect"),
    [
        *(("FP8 by token", "slot"), ("torchao", "position")),
        *(pytest.param(*own, marks=pytest.mark.long) for own in (("FP8 by token", "position"), ("torchao", "slot"))),
    ],
)
@pytest.mark.cases(1)
def test_a_wrong_slot_or_position_is_refused(
    name: str, defect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = target(MAKERS[name](3, tmp_path))
    assert self_test(whole) < 0.1
    right = eager_reference.stage

    def wrong(*batch: Any) -> Any:
        metadata = right(*batch)
        if defect == "slot":
            return replace(metadata, slot_mapping=metadata.slot_mapping.roll(1))
        return replace(metadata, positions=metadata.positions + 2 * (metadata.positions > 3))

    monkeypatch.setattr(eager_reference, "stage", wrong)
    with pytest.raises(UnsupportedModelError, match=r"comes out wrong .*\(allowed for torch.bfloat16: 0.2\)"):
        self_test(whole)


@pytest.mark.parametrize("name", MAKERS)
def test_only_this_thread_and_only_inside(name: str, tmp_path: Path) -> None:
    """Inside a layer is the matmul of its weight, which does not round; on another thread, and after an error, it is
    what it was."""
    model = MAKERS[name](1, tmp_path)
    layer, forwards = model.model.layers[0].mlp.up_proj, [vars(m).get("forward") for m in model.modules()]
    x = torch.randn(5, 128, dtype=torch.bfloat16)
    weight = layer.weight.dequantize() if name == "torchao" else layer.weight
    unrounded = nn.functional.linear(x, weight)
    rounded, elsewhere = layer(x), []
    assert not torch.allclose(rounded, unrounded, rtol=1e-3)
    with unrounded_activations(model):
        assert torch.equal(layer(x), unrounded)
        thread = threading.Thread(target=lambda: elsewhere.append(layer(x)))
        thread.start()
        thread.join()
    with pytest.raises(RuntimeError, match="broken"), unrounded_activations(model):
        raise RuntimeError("broken")
    assert torch.equal(elsewhere[0], rounded) and torch.equal(layer(x), rounded)
    assert [vars(m).get("forward") for m in model.modules()] == forwards


def test_a_weight_of_torchaos_float8() -> None:
    """With dynamic scales it runs on GPUs alone; the matmul without rounding runs anywhere."""
    need("torchao")
    from torchao.quantization import Float8Tensor, PerRow
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import QuantizeTensorToFloat8Kwargs

    rows, layer = PerRow(), nn.Linear(64, 48, dtype=torch.bfloat16)
    how = QuantizeTensorToFloat8Kwargs(granularity=rows)
    weight = Float8Tensor.from_hp(layer.weight.detach(), granularity=rows, act_quant_kwargs=how)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    with torch.no_grad(), unrounded_activations(nn.Sequential(layer)):
        assert torch.equal(layer(x), nn.functional.linear(x, weight.dequantize(), layer.bias))
