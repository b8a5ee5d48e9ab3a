"""GEMMs with the matrices of chosen experts as Triton kernels, half precision and FP8. Imported on CUDA only.

A program takes one expert and some of its rows, collects the (token, expert) pairs that chose it, and multiplies them
sixteen at a time: the expert's weights come from memory once, nothing is sorted, and no shape depends on the routing.
In FP8 each block of 128 columns is multiplied by its scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE_PAIRS = 16
TILE_ROWS = 64
_TILE_WIDTH = 64
WARPS = 4
STAGES = 5
"""Of ten choices for DeepSeek-V2-Lite's experts on an H200 the best over 1 … 128 tokens of 6 experts."""
LAUNCH_PAIRS = 1024
"""Most pairs in one launch: each program looks through all of them."""


@triton.jit
def pairs_of_expert(index_ptr, num_pairs, PAIRS: tl.constexpr, BY_PAIR: tl.constexpr):  # type: ignore[no-untyped-def]
    """The pairs [P], a program's expert, which of them chose it [P], and the program that does its work.

    BY_PAIR: a program for every pair: the first pair that chose an expert does the work of all that did.
    """
    pair = tl.arange(0, PAIRS)  # [P]
    expert_of = tl.load(index_ptr + pair, mask=pair < num_pairs, other=-1).to(tl.int32)  # [P]
    expert = tl.program_id(0)
    worker = expert
    if BY_PAIR:
        expert = tl.load(index_ptr + worker).to(tl.int32)
        worker = tl.min(tl.where(expert_of == expert, pair, PAIRS), 0)
    return pair, expert, expert_of == expert, worker


@triton.jit
def tile_of_pairs(pair, chosen, rank, start, count, TILE_PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """An expert's pairs from number `start` on [M], and whether each place holds one; rank: [P] its pairs' numbers."""
    place = start + tl.arange(0, TILE_PAIRS)  # [M]
    found = chosen[None, :] & (rank[None, :] == place[:, None])  # [M, P]
    return tl.sum(tl.where(found, pair[None, :], 0), 1), place < count


@triton.jit
def _expert_matmul_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, 1 or k, I]
    stack_ptr,  # [E, O, I]: see the strides
    index_ptr,  # [T·k] int64, the expert of every (token, expert) pair
    out_ptr,  # [T, k, O] contiguous
    num_pairs, x_pairs, rows, width, x_stride, expert_stride, row_stride, column_stride,
    PAIRS: tl.constexpr, BY_PAIR: tl.constexpr, TILE_PAIRS: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
):  # fmt: skip
    pair, expert, chosen, worker = pairs_of_expert(index_ptr, num_pairs, PAIRS, BY_PAIR)
    if worker != tl.program_id(0):
        return
    count = tl.sum(chosen.to(tl.int32), 0)
    if count == 0:
        return
    rank = tl.cumsum(chosen.to(tl.int32), 0) - 1  # [P] which of the expert's pairs each is
    row = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)  # [N] rows of the expert's matrix
    column = tl.arange(0, TILE_WIDTH)  # [K]
    matrix = stack_ptr + expert.to(tl.int64) * expert_stride
    weights = matrix + row[:, None] * row_stride + column[None, :] * column_stride  # [N, K]
    for start in range(0, count, TILE_PAIRS):
        taken, real = tile_of_pairs(pair, chosen, rank, start, count, TILE_PAIRS)  # [M], [M]
        x_row = x_ptr + (taken // x_pairs).to(tl.int64)[:, None] * x_stride + column[None, :]
        acc = tl.zeros((TILE_PAIRS, TILE_ROWS), tl.float32)  # [M, N]
        for k in range(0, width, TILE_WIDTH):
            inside = column + k < width
            w = tl.load(weights + k * column_stride, mask=(row < rows)[:, None] & inside[None, :], other=0.0)  # [N, K]
            x = tl.load(x_row + k, mask=real[:, None] & inside[None, :], other=0.0)  # [M, K]
            acc = tl.dot(x, tl.trans(w), acc)
        to = out_ptr + taken.to(tl.int64)[:, None] * rows + row[None, :]
        tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=real[:, None] & (row < rows)[None, :])


def launch_expert_matmul(x: torch.Tensor, stack: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """out [T, k, O] = stack[index] · x for x [T, 1 or k, I], stack [E, O, I] (any strides), index [T, k] int64.

    x, index and out are contiguous; T·k is at most LAUNCH_PAIRS.
    """
    experts, rows, width = stack.shape
    num_pairs = index.numel()
    by_pair = num_pairs < experts
    grid = (num_pairs if by_pair else experts, triton.cdiv(rows, TILE_ROWS))
    _expert_matmul_kernel[grid](
        x, stack, index, out, num_pairs, index.shape[1] // x.shape[1], rows, width, x.stride(1), *stack.stride(),
        PAIRS=max(triton.next_power_of_2(num_pairs), 16), BY_PAIR=by_pair, TILE_PAIRS=TILE_PAIRS, TILE_ROWS=TILE_ROWS,
        TILE_WIDTH=_TILE_WIDTH, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip


_GROUP = tl.constexpr(128)


@triton.jit
def _fp8_expert_matmul_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, 1 or k, I] contiguous, e4m3
    x_scale_ptr,  # [T, 1 or k, G] contiguous, float32
    stack_ptr,  # [E, O, I] contiguous, e4m3
    stack_scale_ptr,  # [E, O / 128, G] contiguous, float32
    index_ptr,  # [T·k] int64, the expert of every (token, expert) pair
    out_ptr,  # [T, k, O] contiguous
    num_pairs, x_pairs, rows, width, row_blocks, groups,
    PAIRS: tl.constexpr, BY_PAIR: tl.constexpr, TILE_PAIRS: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    pair, expert, chosen, worker = pairs_of_expert(index_ptr, num_pairs, PAIRS, BY_PAIR)
    if worker != tl.program_id(0):
        return
    count = tl.sum(chosen.to(tl.int32), 0)
    if count == 0:
        return
    rank = tl.cumsum(chosen.to(tl.int32), 0) - 1  # [P] which of the expert's pairs each is
    first_row = tl.program_id(1) * TILE_ROWS
    row = first_row + tl.arange(0, TILE_ROWS)  # [N] rows of the expert's matrix
    column = tl.arange(0, _GROUP)  # [K]
    matrix = stack_ptr + expert.to(tl.int64) * rows * width
    weights = matrix + row[:, None].to(tl.int64) * width + column[None, :]  # [N, K]
    stack_scale = stack_scale_ptr + (expert.to(tl.int64) * row_blocks + first_row // _GROUP) * groups
    for start in range(0, count, TILE_PAIRS):
        taken, real = tile_of_pairs(pair, chosen, rank, start, count, TILE_PAIRS)  # [M], [M]
        source = (taken // x_pairs).to(tl.int64)  # [M] rows of x
        x_row = x_ptr + source[:, None] * width + column[None, :]
        acc = tl.zeros((TILE_PAIRS, TILE_ROWS), tl.float32)  # [M, N]
        for k in range(0, width, _GROUP):
            inside = column + k < width
            w = tl.load(weights + k, mask=(row < rows)[:, None] & inside[None, :], other=0.0)  # [N, K]
            x = tl.load(x_row + k, mask=real[:, None] & inside[None, :], other=0.0)  # [M, K]
            group = k // _GROUP
            scale = tl.load(x_scale_ptr + source * groups + group) * tl.load(stack_scale + group)  # [M]
            acc += tl.dot(x, tl.trans(w)) * scale[:, None]
        to = out_ptr + taken.to(tl.int64)[:, None] * rows + row[None, :]
        tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=real[:, None] & (row < rows)[None, :])


def launch_fp8_expert_matmul(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    stack: torch.Tensor,
    stack_scale: torch.Tensor,
    index: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write out [T, k, O], contiguous; see `specdec.ops.experts.fp8_expert_matmul`."""
    tokens = LAUNCH_PAIRS // index.shape[1]
    stack, stack_scale = stack.contiguous(), stack_scale.contiguous()
    for start in range(0, len(index), tokens):
        part = slice(start, start + tokens)
        _launch(x[part].contiguous(), x_scale[part].contiguous(), stack, stack_scale, index[part], out[part])


def _launch(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    stack: torch.Tensor,
    stack_scale: torch.Tensor,
    index: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Launch the kernel for at most LAUNCH_PAIRS pairs."""
    experts, rows, width = stack.shape
    num_pairs = index.numel()
    by_pair = num_pairs < experts
    grid = (num_pairs if by_pair else experts, triton.cdiv(rows, TILE_ROWS))
    _fp8_expert_matmul_kernel[grid](
        x, x_scale, stack, stack_scale, index.contiguous(), out, num_pairs, index.shape[1] // x.shape[1], rows, width,
        *stack_scale.shape[1:], PAIRS=max(triton.next_power_of_2(num_pairs), 16), BY_PAIR=by_pair,
        TILE_PAIRS=TILE_PAIRS, TILE_ROWS=TILE_ROWS, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
