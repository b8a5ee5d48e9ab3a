"""The self-test of logits compares attentions: FP8 layers do not round their activations in it, nowhere else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.backends.reference import TorchBackend
from attention.cache.kv_cache import CacheGroup
from attention.runner import GroupRunner
from specdec.errors import UnsupportedModelError
from specdec.ops import fp8 as operators
from specdec.ops.fp8 import FP8, dequantised
from specdec.ops.mixtures import routed
from specdec.selftest import eager_reference
from specdec.selftest.selftest import self_test
from specdec.selftest.twin import _build
from specdec.wrapped.probing import probe_target
from specdec.wrapped.quantised_layers import Fp8Layers, unrounded_activations
from specdec.wrapped.target import Target
from tests.fakes import load_target
from tests.fp8 import LLAMA, QWEN, multiplied_out, quantised, write
from tests.specdec.ops.test_fp8 import Block

pytestmark = pytest.mark.filterwarnings("ignore:.*runs on a CPU")
CPU = torch.device("cpu")
SMALL = {**LLAMA, "hidden_size": 128, "intermediate_size": 128, "head_dim": 16}


def target(folder: Path, sizes: dict[str, Any], dtype: torch.dtype) -> Target:
    """Without the other tests of loading."""
    probed = probe_target(load_target(write(folder, sizes), dtype, CPU))
    group = CacheGroup("target", tuple(call.attention_spec for call in probed.calls), 40, 4)
    return Target(probed, GroupRunner(TorchBackend(CPU), group, dtype, CPU), (), 0)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_deep_model_passes_though_a_last_bit_moves_many_roundings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 layers in bfloat16, as the 8B shape on an H200: 0.37 there, with rounding."""
    deep = target(tmp_path / "target", {**SMALL, "num_hidden_layers": 32}, torch.bfloat16)
    assert self_test(deep) < 0.12
    monkeypatch.setattr("specdec.wrapped.quantised_layers.are_rounded", lambda: True)
    with pytest.raises(UnsupportedModelError, match=r"error 0\.[23].* \(allowed for torch.bfloat16: 0.2\)"):
        self_test(deep)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "dtype", "defect"),
    [
        pytest.param(sizes, dtype, defect, id=f"{name}-{dtype}-{defect}", marks=[pytest.mark.long] * ((i + j + k) % 2))
        for i, (name, sizes) in enumerate((("linear", SMALL), ("experts", QWEN)))
        for j, dtype in enumerate((torch.bfloat16, torch.float32))
        for k, defect in enumerate(("slot", "position"))
    ],
)
@pytest.mark.cases(1)
def test_a_wrong_slot_or_position_is_refused_by_the_ordinary_limit(
    tmp_path: Path, sizes: dict[str, Any], dtype: torch.dtype, defect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values each in the next token's slot; positions that are two further after a row's third token."""
    whole = target(tmp_path / "target", sizes, dtype)
    assert self_test(whole) < (1e-5 if dtype == torch.float32 else 0.1)
    right = eager_reference.stage

    def wrong(*batch: Any) -> Any:
        metadata = right(*batch)
        if defect == "slot":
            return replace(metadata, slot_mapping=metadata.slot_mapping.roll(1))
        return replace(metadata, positions=metadata.positions + 2 * (metadata.positions > 3))

    monkeypatch.setattr(eager_reference, "stage", wrong)
    limit = "0.001" if dtype == torch.float32 else "0.2"
    found = rf"\(allowed for {dtype}: {limit}\)|of the experts that mixture 2 of 2 is given, \d\d% are others"
    with pytest.raises(UnsupportedModelError, match=f"comes out wrong .*({found})"):
        self_test(whole)


def test_a_layer_of_every_kind_is_multiplied_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers with a bias, cut blocks and one scale a weight, experts: nothing is quantised inside."""
    torch.manual_seed(0)
    block, x = Block().requires_grad_(False).eval(), torch.randn(5, 256)
    linear = target(tmp_path / "linear", SMALL, torch.float32)
    mixture = target(tmp_path / "experts", QWEN, torch.float32)
    layers = Fp8Layers(block)

    def refuse(x: torch.Tensor) -> None:
        raise AssertionError("activations are quantised")

    monkeypatch.setattr(operators, "fp8_quantise", refuse)
    monkeypatch.setattr(routed, "fp8_quantise", refuse)
    layer: Any = block.v
    with unrounded_activations():
        ours = layer(x)
    right = x.double() @ multiplied_out(layer.weight, layer.weight_scale_inv).t() + layer.bias.double()
    torch.testing.assert_close(ours.double(), right, rtol=1e-5, atol=1e-4)  # sums of 256 terms in float32
    static: Any = linear.hf_model.get_submodule("model.layers.0.mlp.up_proj")
    one = torch.nn.Parameter(torch.tensor(0.5), requires_grad=False)
    static.weight_scale_inv, wide = one, static.weight.float()
    hidden = torch.randn(1, 3, 128)
    with unrounded_activations():
        torch.testing.assert_close(static(hidden), hidden @ (wide * 0.5).t())
    experts: Any = mixture.hf_model.get_submodule("model.layers.0.mlp.experts")
    index, weights = torch.tensor([[0, 2], [2, 3], [1, 0]]), torch.rand(3, 2)
    tokens = torch.randn(3, 128)
    with unrounded_activations():
        mixed = experts(tokens, index, weights)
    for token in range(3):
        alone = torch.zeros(128, dtype=torch.float64)
        for place, expert in enumerate(index[token].tolist()):
            up = multiplied_out(experts.gate_up_proj[expert], experts.gate_up_proj_scale_inv[expert])
            gate, up = (up @ tokens[token].double()).chunk(2)
            down = multiplied_out(experts.down_proj[expert], experts.down_proj_scale_inv[expert])
            alone += weights[token, place] * (down @ (torch.nn.functional.silu(gate) * up))
        torch.testing.assert_close(mixed[token].double(), alone, rtol=1e-4, atol=1e-5)
    layers.release()


@pytest.mark.slow
def test_compiled_code_rounds_always_and_so_does_what_comes_after() -> None:
    """Code that is compiled inside, or run inside, is the code of the rounds; an error leaves nothing behind."""
    from tests.specdec.compiler.test_passes import rewritten

    block, x = Block().requires_grad_(False).eval(), torch.randn(5, 256)
    layers = Fp8Layers(block)
    rounded = block(x)
    with unrounded_activations():
        plain = block(x)
        compiled, _ = rewritten(block, x)
    assert torch.equal(compiled, rounded) and not torch.allclose(plain, rounded, rtol=1e-3)
    with pytest.raises(RuntimeError, match="broken"), unrounded_activations():
        raise RuntimeError("broken")
    assert torch.equal(block(x), rounded)
    layers.release()


@pytest.mark.parametrize(("rows", "columns"), [(256, 256), (200, 300), (100, 60)])
def test_weights_are_multiplied_out_in_their_blocks(rows: int, columns: int) -> None:
    weight, scale = quantised(torch.randn(rows, columns))
    assert weight.dtype == FP8
    right = multiplied_out(weight, scale)
    assert torch.equal(dequantised(weight, scale, torch.float64), right)
    stack, scales = torch.stack([weight.view(torch.uint8)] * 2).view(FP8), torch.stack([scale, 2 * scale])
    assert torch.equal(dequantised(stack, scales, torch.float64), torch.stack([right, 2 * right]))


def test_a_twin_has_no_fp8_layers(tmp_path: Path) -> None:
    """It is built from the configuration and its weights are random: nothing in it rounds."""
    probed = probe_target(load_target(write(tmp_path / "target", SMALL), torch.float32, CPU))
    assert probed.fp8 is not None and _build(probed, [], 0).fp8 is None
    probed.fp8.release()
