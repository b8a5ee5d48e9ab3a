"""SwiGLU experts in half precision for prompts: tiles of matrices come through Hopper's tensor memory accelerator.

A program has one tile of pairs and one of rows: tiles that run at the same time belong to few experts, whose weights
are read from memory once and then from the L2 cache. The numbers are described in `specdec.ops.mixtures.routed`.
Imported on CUDA only, and by tests under the interpreter.

Source: CUDA programming guide, "Tensor Memory Access"; triton-lang/triton, python/tutorials/09-persistent-matmul.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.hf.padding import Padding
from attention.kernels.launch import dependent_launch, wait_for_predecessor
from specdec.ops.mixtures import Gating
from specdec.ops.mixtures.grouping_kernel import TILE, group_pairs
from specdec.ops.mixtures.mxfp4_kernel import activated, launch_dequantise


@triton.jit
def _gated_tile(  # type: ignore[no-untyped-def]
    x_ptr, stack, bias_ptr, order_ptr, out_ptr, expert, first, end, first_row, top_k, rows, width, alpha, limit,
    CLAMPED: constexpr, EVEN: constexpr, PAIRS: constexpr, ROWS: constexpr, COLUMNS: constexpr,
):  # fmt: skip
    """Gate and up of one tile, and their activation."""
    place = first + tl.arange(0, PAIRS)
    real = place < end
    column = tl.arange(0, COLUMNS)
    token = (tl.load(order_ptr + place, mask=real, other=0) // top_k).to(tl.int64)
    x_row = x_ptr + token[:, None] * width + column[None, :]
    gate = tl.zeros((PAIRS, ROWS), tl.float32)
    up = tl.zeros((PAIRS, ROWS), tl.float32)
    top = expert * 2 * rows + first_row
    for k in range(0, width, COLUMNS):
        if EVEN:
            x = tl.load(x_row + k, mask=real[:, None], other=0.0)
        else:
            x = tl.load(x_row + k, mask=real[:, None] & (k + column < width)[None, :], other=0.0)
        gate = tl.dot(x, stack.load([top, k]).T, gate)
        up = tl.dot(x, stack.load([top + rows, k]).T, up)
    row = first_row + tl.arange(0, ROWS)
    if bias_ptr is not None:
        own = bias_ptr + expert.to(tl.int64) * 2 * rows + row
        gate += tl.load(own, mask=row < rows, other=0.0).to(tl.float32)[None, :]
        up += tl.load(own + rows, mask=row < rows, other=0.0).to(tl.float32)[None, :]
    kind = out_ptr.dtype.element_ty
    found = activated(gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32), alpha, limit, CLAMPED)
    to = out_ptr + place.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(to, found.to(kind), mask=real[:, None] & (row < rows)[None, :])


@triton.jit(do_not_specialize=["most_tiles"])  # so that no number of tokens compiles it once more
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, I]
    stack,  # [E * 2 * rows, I] by tiles of rows and columns; of every expert gate's rows before up's
    bias_ptr,  # [E, 2 * rows], or None
    order_ptr, offset_ptr, tile_ptr, num_tiles_ptr,  # see `specdec.ops.mixtures.grouping_kernel.Groups`
    out_ptr,  # [P, rows] in the order of the groups, written
    most_tiles, top_k, rows, width, alpha, limit,
    CLAMPED: constexpr, EVEN: constexpr, PAIRS: constexpr, ROWS: constexpr, COLUMNS: constexpr,
    DEPENDENT: constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    row_tiles = tl.cdiv(rows, ROWS)
    tile = tl.program_id(0) // row_tiles
    if tile >= tl.load(num_tiles_ptr):
        return
    expert = tl.load(tile_ptr + tile)
    first = tl.load(tile_ptr + most_tiles + tile)
    end = tl.load(offset_ptr + expert + 1)
    first_row = tl.program_id(0) % row_tiles * ROWS
    if end - first > PAIRS // 2:
        _gated_tile(
            x_ptr, stack, bias_ptr, order_ptr, out_ptr, expert, first, end, first_row, top_k, rows, width, alpha,
            limit, CLAMPED, EVEN, PAIRS, ROWS, COLUMNS,
        )  # fmt: skip
    else:
        _gated_tile(
            x_ptr, stack, bias_ptr, order_ptr, out_ptr, expert, first, end, first_row, top_k, rows, width, alpha,
            limit, CLAMPED, EVEN, PAIRS // 2, ROWS, COLUMNS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["most_tiles"])
def _down_kernel(  # type: ignore[no-untyped-def]
    x,  # [P, I] in the order of the groups, by tiles of pairs and columns
    stack,  # [E * rows, I] by tiles of rows and columns
    bias_ptr,  # [E, rows], or None
    order_ptr, offset_ptr, tile_ptr, num_tiles_ptr,  # see `specdec.ops.mixtures.grouping_kernel.Groups`
    out_ptr,  # [P, rows] by pair, written
    most_tiles, rows, width,
    PAIRS: constexpr, ROWS: constexpr, COLUMNS: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    """A program goes on to another tile, whose first columns are read before the results of this one are stored."""
    wait_for_predecessor(DEPENDENT)
    row_tiles = tl.cdiv(rows, ROWS)
    for i in tl.range(tl.program_id(0), tl.load(num_tiles_ptr) * row_tiles, tl.num_programs(0), flatten=True):
        expert = tl.load(tile_ptr + i // row_tiles)
        first = tl.load(tile_ptr + most_tiles + i // row_tiles)
        first_row = i % row_tiles * ROWS
        acc = tl.zeros((PAIRS, ROWS), tl.float32)
        for k in range(0, width, COLUMNS):
            acc = tl.dot(x.load([first, k]), stack.load([expert * rows + first_row, k]).T, acc)
        row = first_row + tl.arange(0, ROWS)
        if bias_ptr is not None:
            own = bias_ptr + expert.to(tl.int64) * rows + row
            acc += tl.load(own, mask=row < rows, other=0.0).to(tl.float32)[None, :]
        place = first + tl.arange(0, PAIRS)
        real = place < tl.load(offset_ptr + expert + 1)
        pair = tl.load(order_ptr + place, mask=real, other=0).to(tl.int64)
        to = out_ptr + pair[:, None] * rows + row[None, :]
        tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=real[:, None] & (row < rows)[None, :])


_ROWS, _DOWN_ROWS, _COLUMNS = 128, 256, 64
_FROM, _FROM_MXFP4 = 48, 160
"""Pairs an expert above which this form is the faster one."""
_MOST_MULTIPLIED_OUT = 5 << 28
"""Bytes, counted twice: a launch before capture leaves them in the allocator, capture in the graphs' private memory."""


def better_by_many(x: Tensor, gate_up: Tensor, down: Tensor, pairs: int, gating: Gating) -> bool:
    """Whether `launch_many` supports these matrices, and is faster for this many pairs.

    µs of Qwen3-30B-A3B's experts on an H200 at 1,024, 2,048 and 8,192 tokens: 354, 437 and 1,167; by tiles of
    `routed_kernel` 410, 614 and 1,800; each read once 284, all multiplied 99, 198 and 793. MXFP4 weights are
    dequantised into memory first, one matrix of all experts at a time: gpt-oss-20b's 1.0 GiB. So at 2,048 and 8,192
    tokens 1,326 and 3,077 µs; by tiles 1,690 and 5,967; gpt-oss-120b's would take 4 GiB, and are not.
    """
    packed, stacks = down.dtype == torch.uint8, (gate_up, down)
    if pairs <= (_FROM_MXFP4 if packed else _FROM) * len(down) or not all(stack.is_contiguous() for stack in stacks):
        return False
    if not x.is_cuda or torch.version.hip is not None or torch.cuda.get_device_capability(x.device)[0] != 9:
        return False
    if packed:
        return 4 * gate_up.numel() <= _MOST_MULTIPLIED_OUT
    # The tensor memory accelerator needs addresses and rows of a multiple of 16 bytes, eight half-precision numbers.
    aligned = all(s.dtype == x.dtype and s.shape[-1] % 8 == 0 and s.data_ptr() % 16 == 0 for s in stacks)
    return aligned and not gating.interleaved


OfBoth = tuple[Tensor | None, Tensor | None]
"""What the projections before and after the gate have, each."""


def launch_many(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    index: Tensor,
    scales: OfBoth,
    biases: OfBoth,
    gating: Gating,
    padding: Padding | None = None,
) -> Tensor:
    """See `specdec.ops.mixtures.routed.routed_experts`; padding: see `group_pairs`."""
    (tokens, width), rows, top_k = x.shape, gate_up.shape[1] // 2, index.shape[1]
    groups, dependent = group_pairs(index, len(down), padding, tiled=True), dependent_launch(x.device)
    assert groups.tiles is not None
    most_tiles, sent = groups.tiles.shape[1], (groups.order, groups.offsets, groups.tiles, groups.num_tiles)
    inner, out = x.new_empty(tokens * top_k, rows), x.new_empty(tokens, top_k, width)
    bias = biases[0]
    if bias is not None and gating.interleaved:
        bias = bias.unflatten(1, (rows, 2)).transpose(1, 2).contiguous()
    stack = gate_up if scales[0] is None else launch_dequantise(gate_up, scales[0], x.dtype, gating.interleaved)
    _gate_up_kernel[(most_tiles * triton.cdiv(rows, _ROWS),)](
        x, _by_tiles(stack, _ROWS), bias, *sent, inner, most_tiles, top_k, rows, width, gating.alpha,
        gating.limit or 0.0, CLAMPED=gating.limit is not None, EVEN=width % _COLUMNS == 0, PAIRS=TILE, ROWS=_ROWS,
        COLUMNS=_COLUMNS, num_warps=8, num_stages=4, **dependent,
    )  # fmt: skip
    del stack  # its memory may be reused for the next stack
    stack = down if scales[1] is None else launch_dequantise(down, scales[1], x.dtype)
    _down_kernel[(_programs(x.device),)](
        _by_tiles(inner, TILE), _by_tiles(stack, _DOWN_ROWS), biases[1], *sent, out, most_tiles, width, rows,
        PAIRS=TILE, ROWS=_DOWN_ROWS, COLUMNS=_COLUMNS, num_warps=8, num_stages=4, **dependent,
    )  # fmt: skip
    return out


def _by_tiles(matrices: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrices.flatten(0, -2), [rows, _COLUMNS])


def _programs(device: torch.device) -> int:
    """One for each multiprocessor; some, in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
