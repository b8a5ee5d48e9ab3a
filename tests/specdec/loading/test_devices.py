"""device= and dtype= on a machine without a GPU, and on one that says it has two."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec.errors import InvalidInputError
from specdec.loading.targets import resolve_device, resolve_dtype

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
    assert resolve_dtype("auto", CPU) is torch.float32
    assert resolve_dtype("auto", CUDA) == "auto"
    assert resolve_dtype("bfloat16", CPU) is resolve_dtype(torch.bfloat16, CUDA) is torch.bfloat16
    for dtype in ("int8", torch.int8, "half", None, 16, torch.float8_e4m3fn, torch.complex64):
        with pytest.raises(InvalidInputError, match=r"(?m)allowed are auto, float32, bfloat16, float16, float64$"):
            resolve_dtype(dtype, CPU)
