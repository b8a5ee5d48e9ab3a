"""The arg max over a vocabulary as two Triton kernels: over chunks of a row, then over chunks. Imported on CUDA only.

torch's own keeps only few multiprocessors busy with few rows: 37 µs for 6 rows of 128,256 in bfloat16 on an H200.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.kernels.pdl import dependent_launch, wait_for_predecessor

_PART = 4096


@triton.jit
def _parts_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [T, V]
    best_ptr,  # [T, chunks] float32
    place_ptr,  # [T, chunks] int32
    vocab,
    row_stride,
    PART: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_predecessor(DEPENDENT)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * PART + tl.arange(0, PART)  # [PART]
    inside = column < vocab
    x = tl.load(logits_ptr + row * row_stride + column, mask=inside, other=float("-inf")).to(tl.float32)  # [PART]
    x = tl.where(x != x, float("inf"), x)  # torch's arg max takes a NaN for the largest
    best, place = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    to = row * tl.num_programs(1) + part
    tl.store(best_ptr + to, best)
    tl.store(place_ptr + to, part * PART + place)


@triton.jit
def _best_kernel(  # type: ignore[no-untyped-def]
    best_ptr,  # [T, chunks] float32
    place_ptr,  # [T, chunks] int32
    out_ptr,  # [T] int64
    mapped_ptr,  # [T] int64 or None
    map_ptr,  # [V] int64 or None
    parts,
    mapped_stride,
    MOST_PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_predecessor(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, MOST_PARTS)
    best = tl.load(best_ptr + row * parts + part, mask=part < parts, other=float("-inf"))  # [MOST_PARTS]
    _, first = tl.max(best, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(place_ptr + row * parts + first).to(tl.int64)
    tl.store(out_ptr + row, token)
    if mapped_ptr is not None:
        if map_ptr is not None:
            token = tl.load(map_ptr + token)
        tl.store(mapped_ptr + row * mapped_stride, token)


def launch_greedy(
    logits: torch.Tensor, target_ids: torch.Tensor | None = None, mapped: torch.Tensor | None = None
) -> torch.Tensor:
    """logits [T >= 1, V], columns side by side -> [T] int64.

    mapped: [T] int64 of any stride, gets the same ids, or target_ids [V] of them.
    """
    rows, vocab = logits.shape
    parts, options = triton.cdiv(vocab, _PART), dependent_launch(logits.device)
    best = logits.new_empty(rows, parts, dtype=torch.float32)
    place = logits.new_empty(rows, parts, dtype=torch.int32)
    out = logits.new_empty(rows, dtype=torch.int64)
    _parts_kernel[(rows, parts)](logits, best, place, vocab, logits.stride(0), PART=_PART, num_warps=8, **options)
    _best_kernel[(rows,)](
        best, place, out, mapped, target_ids, parts, 0 if mapped is None else mapped.stride(0),
        MOST_PARTS=triton.next_power_of_2(parts), num_warps=1, **options,
    )  # fmt: skip
    return out
