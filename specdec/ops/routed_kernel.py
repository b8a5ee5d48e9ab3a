"""A mixture of SwiGLU experts in half precision as Triton kernels: pairs grouped by expert, gate, up and activation in
one launch, down in another. Imported on CUDA only, and by tests under the interpreter.

A (token, expert) pair is written to its own row, so a token's experts can be summed in a fixed order, whatever the
grouping; a row's sums do not depend on its place in a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention.kernels.launch import CompiledAtOnce


@dataclass(frozen=True)
class Tiling:
    """Sizes of a program's tiles: pairs, rows of an expert's matrix, columns; warps, and stages of its pipeline.

    by_rows: a tile of weights is the left factor of the product, and pairs are its columns.
    """

    pairs: int
    rows: int
    columns: int
    warps: int
    stages: int
    by_rows: bool = True


@dataclass(frozen=True)
class Groups:
    """Pairs by expert. order: [P] int32 pairs, those of one expert after one another. offsets: [E+1] int32 where each
    expert's begin. active: [min(P, E)] int32 experts that have pairs, -1 after them."""

    order: torch.Tensor
    offsets: torch.Tensor
    active: torch.Tensor


@triton.jit
def _group_kernel(  # type: ignore[no-untyped-def]
    index_ptr,  # [P] int64, the expert of every pair
    count_ptr,  # [E], written
    order_ptr, offset_ptr, active_ptr,  # see `Groups`; written
    num_pairs, num_experts, num_active,
    PAIRS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, EXPERTS)
    there = expert < num_experts
    pair = tl.arange(0, PAIRS)
    real = pair < num_pairs
    tl.store(count_ptr + expert, 0, mask=there)
    tl.store(active_ptr + expert, -1, mask=expert < num_active)
    tl.debug_barrier()
    chosen = tl.load(index_ptr + pair, mask=real, other=0).to(tl.int32)
    real = real & (chosen >= 0) & (chosen < num_experts)  # a rehearsal may have anything there
    rank = tl.atomic_add(count_ptr + chosen, 1, mask=real, sem="relaxed")
    tl.debug_barrier()
    count = tl.load(count_ptr + expert, mask=there, other=0)
    end = tl.cumsum(count, 0)
    tl.store(offset_ptr + expert, end - count, mask=expert <= num_experts)
    place = tl.cumsum((count > 0).to(tl.int32), 0) - 1
    tl.store(active_ptr + place, expert, mask=there & (count > 0))
    tl.debug_barrier()
    start = tl.load(offset_ptr + chosen, mask=real, other=0)
    tl.store(order_ptr + start + rank, pair, mask=real)


def group_pairs(index: torch.Tensor, num_experts: int) -> Groups:
    """index: [T, k] int64. One program groups them: at most some thousands."""
    pairs, most = index.numel(), min(index.numel(), num_experts)
    sizes = (pairs, num_experts + 1, most, num_experts)
    *made, counts = (torch.empty(n, dtype=torch.int32, device=index.device) for n in sizes)
    groups = Groups(*made)
    size = max(triton.next_power_of_2(pairs), 16)
    _group_kernel[(1,)](
        index, counts, groups.order, groups.offsets, groups.active, pairs, num_experts, most, PAIRS=size,
        EXPERTS=triton.next_power_of_2(num_experts + 1), num_warps=min(max(size // 256, 4), 16),
    )  # fmt: skip
    return groups


@triton.jit
def _expert_of(index_ptr, offset_ptr, active_ptr, GROUPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The expert of a program, and its first place and the one after its last in the order; -1 where it has none."""
    place = tl.program_id(1)
    if GROUPED:
        expert = tl.load(active_ptr + place)
        start = tl.load(offset_ptr + expert, mask=expert >= 0, other=0)
        end = tl.load(offset_ptr + expert + 1, mask=expert >= 0, other=0)
    else:  # the experts of one token
        expert = tl.load(index_ptr + place).to(tl.int32)
        start, end = place, place + 1
    return expert, start, end


@triton.jit
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, H] contiguous
    stack_ptr,  # [E, 2·F, H], gate first: see the strides
    index_ptr, order_ptr, offset_ptr, active_ptr,
    inner_ptr,  # [P, F] contiguous, in the order of the groups; written
    top_k, rows, width, expert_stride, row_stride, column_stride,
    GROUPED: tl.constexpr, EVEN: tl.constexpr, TILE_PAIRS: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_WIDTH: tl.constexpr, BY_ROWS: tl.constexpr,
):  # fmt: skip
    expert, start, end = _expert_of(index_ptr, offset_ptr, active_ptr, GROUPED)
    if expert < 0:
        return
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)  # [N] of gate; those of up are `rows` further
    column = tl.arange(0, TILE_WIDTH)  # [K]
    matrix = stack_ptr + expert.to(tl.int64) * expert_stride
    gate_ptr = matrix + row[:, None] * row_stride + column[None, :] * column_stride  # [N, K]
    up_ptr = gate_ptr + rows.to(tl.int64) * row_stride
    for first in range(start, end, TILE_PAIRS):
        place = first + tl.arange(0, TILE_PAIRS)  # [M]
        real = place < end
        pair = tl.load(order_ptr + place, mask=real, other=0) if GROUPED else place
        x_row = x_ptr + (pair // top_k).to(tl.int64)[:, None] * width + column[None, :]
        shape_n: tl.constexpr = TILE_ROWS if BY_ROWS else TILE_PAIRS
        shape_m: tl.constexpr = TILE_PAIRS if BY_ROWS else TILE_ROWS
        gate = tl.zeros((shape_n, shape_m), tl.float32)
        up = tl.zeros((shape_n, shape_m), tl.float32)
        for k in range(0, width, TILE_WIDTH):
            if EVEN:
                g = tl.load(gate_ptr + k * column_stride)
                u = tl.load(up_ptr + k * column_stride)
                x = tl.load(x_row + k, mask=real[:, None], other=0.0)
            else:
                inside = column + k < width
                there = (row < rows)[:, None] & inside[None, :]
                g = tl.load(gate_ptr + k * column_stride, mask=there, other=0.0)
                u = tl.load(up_ptr + k * column_stride, mask=there, other=0.0)
                x = tl.load(x_row + k, mask=real[:, None] & inside[None, :], other=0.0)
            if BY_ROWS:
                gate = tl.dot(g, tl.trans(x), gate)
                up = tl.dot(u, tl.trans(x), up)
            else:
                gate = tl.dot(x, tl.trans(g), gate)
                up = tl.dot(x, tl.trans(u), up)
        kind = inner_ptr.dtype.element_ty
        gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)  # as the model's own layers round
        found = gate / (1.0 + tl.exp(-gate)) * up
        found = tl.trans(found) if BY_ROWS else found
        to = inner_ptr + place.to(tl.int64)[:, None] * rows + row[None, :]
        tl.store(to, found.to(kind), mask=real[:, None] & (row < rows)[None, :])


@triton.jit
def _down_kernel(  # type: ignore[no-untyped-def]
    inner_ptr,  # [P, F] contiguous, in the order of the groups
    stack_ptr,  # [E, H, F]: see the strides
    index_ptr, order_ptr, offset_ptr, active_ptr,
    out_ptr,  # [P, H] contiguous, by pair; written
    rows, width, expert_stride, row_stride, column_stride,
    GROUPED: tl.constexpr, EVEN: tl.constexpr, TILE_PAIRS: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_WIDTH: tl.constexpr, BY_ROWS: tl.constexpr,
):  # fmt: skip
    expert, start, end = _expert_of(index_ptr, offset_ptr, active_ptr, GROUPED)
    if expert < 0:
        return
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)  # [N]
    column = tl.arange(0, TILE_WIDTH)  # [K]
    matrix = stack_ptr + expert.to(tl.int64) * expert_stride
    weights = matrix + row[:, None] * row_stride + column[None, :] * column_stride  # [N, K]
    for first in range(start, end, TILE_PAIRS):
        place = first + tl.arange(0, TILE_PAIRS)  # [M]
        real = place < end
        x_row = inner_ptr + place.to(tl.int64)[:, None] * width + column[None, :]
        shape_n: tl.constexpr = TILE_ROWS if BY_ROWS else TILE_PAIRS
        shape_m: tl.constexpr = TILE_PAIRS if BY_ROWS else TILE_ROWS
        acc = tl.zeros((shape_n, shape_m), tl.float32)
        for k in range(0, width, TILE_WIDTH):
            if EVEN:
                w = tl.load(weights + k * column_stride)
                x = tl.load(x_row + k, mask=real[:, None], other=0.0)
            else:
                inside = column + k < width
                w = tl.load(weights + k * column_stride, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
                x = tl.load(x_row + k, mask=real[:, None] & inside[None, :], other=0.0)
            acc = tl.dot(w, tl.trans(x), acc) if BY_ROWS else tl.dot(x, tl.trans(w), acc)
        acc = tl.trans(acc) if BY_ROWS else acc
        pair = tl.load(order_ptr + place, mask=real, other=0) if GROUPED else place
        to = out_ptr + pair.to(tl.int64)[:, None] * rows + row[None, :]
        tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=real[:, None] & (row < rows)[None, :])


def tilings_of(pairs: int, experts: int) -> tuple[Tiling, Tiling]:
    """For gate and up, and for down: tiles for twice as many pairs as an expert has on average.

    Of 94 tilings on an H200 within some percent of the best for the experts of Qwen3-30B-A3B, Qwen3-Next-80B and
    DeepSeek-V2-Lite at 1 to 1,024 tokens.
    """
    mean = pairs / experts
    if mean <= 8:
        return Tiling(16, 64, 128, 4, 3), Tiling(16, 64 if pairs < 512 else 128, 128, 4, 3)
    if mean <= 24:
        return Tiling(32, 128, 128, 8, 3), Tiling(32, 64, 128, 4, 3)
    if mean <= 48:
        return Tiling(64, 64, 64, 4, 3), Tiling(64, 128, 64, 4, 3)
    return Tiling(128, 64, 64, 8, 3), Tiling(128, 128, 64, 8, 3)


def launch_routed(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    index: torch.Tensor,
    tilings: tuple[Tiling, Tiling] | None = None,
) -> torch.Tensor:
    """SwiGLU of the chosen experts, not yet weighted: [T, k, H].

    x: [T, H] contiguous. gate_up: [E, 2·F, H], gate first, and down: [E, H, F], of any strides. index: [T, k] int64,
    see `group_pairs`. tilings: default `tilings_of`.
    """
    experts, rows, width = len(down), down.shape[2], down.shape[1]
    tokens, top_k = index.shape
    index, grouped = index.contiguous(), tokens > 1
    if grouped:
        with CompiledAtOnce():  # places in memory
            groups = group_pairs(index, experts)
    else:
        groups = Groups(index, index, index)
    gate_tiling, down_tiling = tilings or tilings_of(tokens * top_k, experts)
    sent = index, groups.order, groups.offsets, groups.active
    inner, out = x.new_empty(tokens * top_k, rows), x.new_empty(tokens, top_k, width)
    for tiling, kernel, given, stack, result, sizes, k in (
        (gate_tiling, _gate_up_kernel, x, gate_up, inner, (top_k, rows, width), width),
        (down_tiling, _down_kernel, inner, down, out, (width, rows), rows),
    ):
        n = rows if kernel is _gate_up_kernel else width
        grid = (triton.cdiv(n, tiling.rows), len(groups.active) if grouped else top_k)
        kernel[grid](
            given, stack, *sent, result, *sizes, *stack.stride(),
            GROUPED=grouped, EVEN=n % tiling.rows == 0 and k % tiling.columns == 0, TILE_PAIRS=tiling.pairs,
            TILE_ROWS=tiling.rows, TILE_WIDTH=tiling.columns, BY_ROWS=tiling.by_rows, num_warps=tiling.warps,
            num_stages=tiling.stages,
        )  # fmt: skip
    return out
