"""What tests of kernels rest on: that the interpreter, as they run it, sees what tests/interpreter_memory.py says."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU is here: nothing is interpreted", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from attention.kernels.launch import wait_for_predecessor


@triton.jit
def _copy_kernel(to_ptr: Any, from_ptr: Any, count_ptr: Any, start: Any, SIZE: tl.constexpr) -> None:
    at = start + tl.arange(0, SIZE)
    tl.store(to_ptr + at, tl.load(from_ptr + at))
    tl.atomic_add(count_ptr + start, 1)


@pytest.mark.parametrize(
    ("short", "start", "outside"),
    [(None, 0, 0), (None, 4, 4), (None, -1, 1), ("from", 0, 3), ("to", 0, 3), ("count", 0, 1)],
)
def test_an_address_beyond_a_tensor_is_seen(short: str | None, start: int, outside: int) -> None:
    sizes = {"to": 8, "from": 8, "count": 8} | ({} if short is None else {short: 5 if short != "count" else 0})
    tensors = [torch.zeros(size, dtype=torch.int32) for size in sizes.values()]
    if not outside:
        _copy_kernel[(1,)](*tensors, start, SIZE=8)
        return
    with pytest.raises(Exception, match=f"_copy_kernel touches {outside} of . addresses of no argument's memory"):
        _copy_kernel[(1,)](*tensors, start, SIZE=8)


@triton.jit
def _early_kernel(to_ptr: Any, from_ptr: Any, LOADS: tl.constexpr, STORES: tl.constexpr, LEAVES: tl.constexpr) -> None:
    program = tl.program_id(0)
    value = 0
    if LOADS:
        value = tl.load(from_ptr + program)
    if STORES:
        tl.store(to_ptr + program, value)
    if program < LEAVES:
        return
    wait_for_predecessor(False)
    tl.store(to_ptr + program, value)


def launch(to: torch.Tensor, from_: torch.Tensor, **does: int) -> None:
    _early_kernel[(2,)](to, from_, **{"LOADS": False, "STORES": False, "LEAVES": 0} | does)


def test_what_is_early_is_seen() -> None:
    a, b, c = (torch.zeros(2, dtype=torch.int16) for _ in range(3))
    launch(b, a)
    launch(c, a, LOADS=True)
    launch(b, a, LOADS=True)  # stored two launches before
    with pytest.raises(Exception, match="_early_kernel loads 1 words of the launch before it, and only then waits"):
        launch(c, b, LOADS=True)
    with pytest.raises(Exception, match="_early_kernel stores 1 times before it waits"):
        launch(c, a, STORES=True)
    with pytest.raises(Exception, match="1 of 2 programs of _early_kernel do not wait"):
        launch(c, a, LEAVES=1)


@triton.jit
def _careless_kernel(to_ptr: Any, DEPENDENT: tl.constexpr) -> None:
    tl.store(to_ptr, 1)


def test_a_dependent_kernel_that_never_waits_is_seen() -> None:
    with pytest.raises(Exception, match="1 of 1 programs of _careless_kernel do not wait"):
        _careless_kernel[(1,)](torch.zeros(1), DEPENDENT=False)
