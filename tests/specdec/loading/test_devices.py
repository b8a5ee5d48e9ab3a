"""device= and dtype= on a machine without a GPU, and on one that says it has two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import tiny_llama, wrap
from transformers import AutoModelForCausalLM, LlamaConfig

from specdec.errors import InvalidInputError
from specdec.loading.targets import dtype_on, resolve_device, resolve_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("gpus", "device", "found"),
    [
        (0, None, "cpu"),
        (2, None, "cuda"),
        (2, "cpu", "cpu"),
        (2, "cpu:3", "cpu"),
        (2, "cuda:1", "cuda:1"),
        (2, 1, "cuda:1"),
        (2, torch.device("cuda", 0), "cuda:0"),
    ],
    indirect=["gpus"],
)
def test_devices(device: Any, found: str) -> None:
    assert resolve_device(device) == torch.device(found)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("gpus", "device", "words"),
    [
        (0, "cuda", r"torch finds no CUDA device.*allowed are cpu \(there is no CUDA device here\)"),
        (2, "cuda:2", "this machine has no such GPU; allowed are cpu, cuda, cuda:0, cuda:1"),
        (2, 7, "this machine has no such GPU"),
        (2, -1, "device=-1"),
        (0, "meta", "CPU and CUDA are supported"),
        (0, "gpu", "device='gpu' is not a torch device"),
        (0, True, r"device=True \(bool\)"),
        (0, 1.0, r"device=1.0 \(float\)"),
    ],
    indirect=["gpus"],
)
def test_devices_that_are_refused(device: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        resolve_device(device)


def test_dtypes() -> None:
    assert resolve_dtype("auto") == "auto"
    assert resolve_dtype("bfloat16") is resolve_dtype(torch.bfloat16) is torch.bfloat16
    for dtype in ("int8", torch.int8, "half", None, 16, torch.float8_e4m3fn, torch.complex64):
        with pytest.raises(InvalidInputError, match=r"(?m)allowed are auto, float32, bfloat16, float16, float64$"):
            resolve_dtype(dtype)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", None])
def test_auto_is_the_checkpoints_dtype_where_the_device_computes_in_it(
    stored: str | None, native: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    config = LlamaConfig(dtype=stored)
    own = stored == "bfloat16" and native
    with caplog.at_level("INFO", "specdec"):
        assert dtype_on(CPU, config, True) is (torch.bfloat16 if own else torch.float32)
    assert ("computed in float32" in caplog.text) == (stored in ("bfloat16", "float16") and not own)
    assert dtype_on(CPU, config, False) is torch.float32
    assert dtype_on(CUDA, config, True) == "auto"


@pytest.mark.skipif(
    "avx512_bf16" not in Path("/proc/cpuinfo").read_text("utf-8"), reason="the processor has no bfloat16"
)
def test_a_bfloat16_folder_says_what_transformers_says_of_it(tmp_path: Path) -> None:
    tiny_llama().bfloat16().save_pretrained(tmp_path)
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[5, 9, 2, 40, 7, 1, 33, 8]])
    right = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)[0, 8:]
    model = wrap(str(tmp_path), device="cpu")
    assert model.dtype is theirs.dtype is torch.bfloat16
    assert list(model.generate(ids, max_new_tokens=24, temperature=0)[0].token_ids) == right.tolist()
