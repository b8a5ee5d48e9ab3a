"""gpt-oss in MXFP4 as it is published: the same tokens and logits as multiplied out, in a quarter of the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import wrap
from transformers import AutoModelForCausalLM, Mxfp4Config

from attention.hf.weights import model_bytes
from specdec.requests.sampling import SamplingParams
from specdec.wrapped.quantised_layers import Mxfp4Experts, Mxfp4Quantizer, loaded_by, own_quantizer
from tests.quantised import mxfp4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("mxfp4")
    mxfp4(place)
    return place


def dense(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    loaded: Any = AutoModelForCausalLM
    return (
        loaded.from_pretrained(
            folder, dtype=dtype, quantization_config=Mxfp4Config(dequantize=True), attn_implementation="eager"
        )
        .float()
        .eval()
    )  # transformers 5.17 leaves the experts in bfloat16, whatever is asked for


def kept(folder: Path) -> Any:
    loaded: Any = AutoModelForCausalLM
    with loaded_by("mxfp4", Mxfp4Quantizer):
        return loaded.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def test_the_same_logits_in_a_quarter_of_the_memory(folder: Path) -> None:
    ids = torch.arange(3, 20)[None]
    packed, plain = kept(folder), dense(folder)
    found, right = packed(ids).logits, plain(ids).logits
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    experts = packed.model.layers[0].mlp.experts
    assert isinstance(experts, Mxfp4Experts) and experts.gate_up_proj_blocks.dtype == torch.uint8
    assert model_bytes(experts) < 0.2 * model_bytes(plain.model.layers[0].mlp.experts)
    experts.gate_up_proj_scales.data += 1
    assert float((packed(ids).logits - right).abs().max()) > 1e-2, "the comparison can fail"


def test_it_is_saved_as_it_was_read(folder: Path, tmp_path: Path) -> None:
    packed = kept(folder)
    packed.save_pretrained(tmp_path)
    again = kept(tmp_path)
    for (name, own), (_, read) in zip(packed.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(own, read), name


def test_generates_the_tokens_of_the_dense_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the reference runs: 4 bits stay on a GPU only, where kernels read them."""
    monkeypatch.setattr("specdec.wrapped.quantised_layers.own_quantizer", lambda *_: Mxfp4Quantizer)
    prompt, params = list(range(3, 12)), SamplingParams(max_new_tokens=12, ignore_eos=True)
    with wrap(folder, num_speculative_tokens=0) as model:
        found = model.generate([prompt], params)[0].token_ids
        facts = model.describe()
    right = dense(folder).generate(torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
    assert list(found) == right[0, len(prompt) :].tolist()
    assert facts["quantisation"]["runs"] == "as stored"
    assert facts["quantisation"]["layers"] == "2 Mxfp4Experts"
    assert list(facts["experts"]) == [
        "grouped; MXFP4 unpacked to 16 bits in registers, and in memory for long prompts on Hopper"
    ]


@pytest.mark.parametrize(
    ("method", "dtype", "device", "alone", "stays"),
    [
        ("mxfp4", "auto", "cuda", True, True),
        ("mxfp4", torch.float16, "cuda", True, True),
        ("mxfp4", torch.float32, "cuda", True, False),
        ("mxfp4", "auto", "cpu", True, False),
        ("mxfp4", "auto", "cuda", False, False),
        ("fp8", "auto", "cuda", True, False),
    ],
)
def test_where_four_bits_stay(method: str, dtype: Any, device: str, alone: bool, stays: bool, folder: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    config.dtype = torch.bfloat16
    stored = {"quant_method": method}
    found = own_quantizer(config, stored, dtype, torch.device(device), "gpt-oss", alone)
    assert (found is Mxfp4Quantizer) is stays
