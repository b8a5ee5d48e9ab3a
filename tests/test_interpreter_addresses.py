"""What tests of kernels rest on: that the interpreter, as they run it, sees an address that is no argument's."""

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
