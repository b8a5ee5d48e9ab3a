"""Linear layers as Triton kernels: for up to 16 tokens, and batch-invariant for any number. Imported on CUDA only.

A program takes some rows of the weight and walks along them; tensor cores multiply them with all tokens, padded to
sixteen. K is not split: no reduction follows, and the order of summation depends only on the shape.

Tiles differ in size with the number of tokens, but every output element is summed in one register along the row of the
weight, sixteen multiplications per step, by the same tensor-core instruction: the same bits for any number of tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from attention.kernels.launch import dependent_launch, wait_for_predecessor
from attention.kernels.tiles import at_most_last, block_of, load_float, load_where

_TILE_TOKENS = 16
_TILE_ROWS = 64
_TILE_WIDTH = 128
_WARPS = 4
_STAGES = 6
_STAGES_OF_MANY_ROWS = 4
_MANY_ROWS = 16384
"""Of fifteen choices for Llama-3.1-8B's layers on an H200 the best with 2 and 6 tokens. µs per matmul, this kernel and
cuBLAS: 6,144 x 4,096 14.7 and 15.3, 4,096 x 4,096 10.5 and 12.5, 28,672 x 4,096 57.2 and 57.4, 4,096 x 14,336 31.1 and
31.3, 128,256 x 4,096 236 and 249."""


@triton.jit
def _linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T <= 16, I]
    weight_ptr,  # [O, I]
    out_ptr,  # [T, O] contiguous
    tokens, rows, width, x_stride, weight_stride,
    TILE_TOKENS: constexpr, TILE_ROWS: constexpr, TILE_WIDTH: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    row = block_of(tl.program_id(0), TILE_ROWS)  # [M] of the weight
    token = tl.arange(0, TILE_TOKENS)  # [N]
    column = tl.arange(0, TILE_WIDTH)  # [K]
    inside = row < rows  # [M]
    # int64: a large weight, such as an lm_head of 256k rows of 16k, has more elements than int32 counts.
    weight_row = weight_ptr + at_most_last(row, rows) * weight_stride
    wait_for_predecessor(DEPENDENT)
    weights = weight_row[:, None] + column[None, :]
    x_columns = x_ptr + token[None, :] * x_stride + column[:, None]
    acc = tl.zeros((TILE_ROWS, TILE_TOKENS), tl.float32)  # [M, N]
    for start in range(0, width, TILE_WIDTH):
        # evict_first: weights are read once, and should not displace x, which every program reads, from L2.
        w = tl.load(weights + start, mask=inside[:, None], other=0.0, eviction_policy="evict_first")  # [M, K]
        x = load_where(x_columns + start, token[None, :] < tokens)  # [K, N]
        acc = tl.dot(w, x, acc)
    to = out_ptr + token[None, :].to(tl.int64) * rows + row[:, None]  # [M, N]
    tl.store(to, acc, mask=(token[None, :] < tokens) & inside[:, None])


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel serves these shapes: whole tiles along the rows, rows without gaps."""
    return weight.shape[1] % _TILE_WIDTH == 0 and weight.stride(1) == 1 and x.stride(1) == 1


def launch_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T <= 16, I], weight [O, I] -> [T, O]."""
    (tokens, width), rows = x.shape, len(weight)
    out = x.new_empty(tokens, rows)
    _linear_kernel[(triton.cdiv(rows, _TILE_ROWS),)](
        x, weight, out, tokens, rows, width, x.stride(0), weight.stride(0), TILE_TOKENS=_TILE_TOKENS,
        TILE_ROWS=_TILE_ROWS, TILE_WIDTH=_TILE_WIDTH, num_warps=_WARPS,
        num_stages=_STAGES_OF_MANY_ROWS if rows > _MANY_ROWS else _STAGES, **dependent_launch(x.device),
    )  # fmt: skip
    return out


_GROUP = 8
"""Tiles of weight rows that run one after the other, so that the part of x that they read stays in the L2 cache."""
_TILE_OF_FLOAT32 = (16, 32, 64, 4, 2)
_TILES = ((16, (16, 64, 128, 4, 6)), (32, (32, 64, 128, 4, 5)), (64, (64, 64, 128, 4, 4)), (512, (64, 128, 64, 8, 4)))
_TILE_OF_MANY = (256, 128, 64, 8, 3)
"""Tokens up to, and: tokens per tile, weight rows per tile, columns per step, warps, stages. Of twelve choices for
Llama-3.1-8B's layers on an H200 the best. µs of a layer's four matmuls, this kernel and cuBLAS: 6 tokens 121 and 116,
32 tokens 123 and 120, 48 tokens 167 and 123, 192 tokens 245 and 160, 768 tokens 654 and 444, 2,048 tokens 1,495 and
1,124."""


@triton.jit
def _invariant_linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, I]
    weight_ptr,  # [O, I]
    bias_ptr,  # [O]
    out_ptr,  # [T, O] contiguous
    tokens, rows, width, x_stride, weight_stride,
    HAS_BIAS: constexpr, WHOLE: constexpr, TILE_TOKENS: constexpr, TILE_ROWS: constexpr,
    TILE_WIDTH: constexpr, GROUP: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    row_tiles, token_tiles = tl.cdiv(rows, TILE_ROWS), tl.cdiv(tokens, TILE_TOKENS)
    group = tl.program_id(0) // (GROUP * token_tiles)
    size = tl.minimum(row_tiles - group * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * token_tiles)
    row = (group * GROUP + within % size) * TILE_ROWS + tl.arange(0, TILE_ROWS)  # [M] of the weight
    token = (within // size) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)  # [N]
    column = tl.arange(0, TILE_WIDTH)  # [K]
    weights = weight_ptr + at_most_last(row, rows)[:, None] * weight_stride + column[None, :]
    xs = x_ptr + at_most_last(token, tokens)[None, :] * x_stride + column[:, None]
    wait_for_predecessor(DEPENDENT)
    acc = tl.zeros((TILE_ROWS, TILE_TOKENS), tl.float32)  # [M, N]
    for start in range(0, width, TILE_WIDTH):
        if WHOLE:
            w = tl.load(weights + start)  # [M, K]
            x = tl.load(xs + start)  # [K, N]
        else:
            w = load_where(weights + start, (start + column < width)[None, :])
            x = load_where(xs + start, (start + column < width)[:, None])
        acc = tl.dot(w, x, acc, input_precision="ieee")  # of float32; other numbers are multiplied exactly
    if HAS_BIAS:
        acc += load_float(bias_ptr + row, row < rows)[:, None]
    to = out_ptr + token[None, :].to(tl.int64) * rows + row[:, None]  # [M, N]
    tl.store(to, acc, mask=(token[None, :] < tokens) & (row[:, None] < rows))


def launch_invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, I], weight [O, I], bias [O] or None -> [T, O]; the rows of x and weight without gaps."""
    (tokens, width), rows = x.shape, len(weight)
    out = x.new_empty(tokens, rows)
    tile = next((tile for most, tile in _TILES if tokens <= most), _TILE_OF_MANY)
    if x.dtype == torch.float32:  # routers': few rows, in one tile for any number of tokens
        tile = _TILE_OF_FLOAT32
    tile_tokens, tile_rows, tile_width, warps, stages = tile
    _invariant_linear_kernel[(triton.cdiv(rows, tile_rows) * triton.cdiv(tokens, tile_tokens),)](
        x, weight, weight if bias is None else bias, out, tokens, rows, width, x.stride(0), weight.stride(0),
        HAS_BIAS=bias is not None, WHOLE=width % tile_width == 0, TILE_TOKENS=tile_tokens, TILE_ROWS=tile_rows,
        TILE_WIDTH=tile_width, GROUP=_GROUP, num_warps=warps, num_stages=stages, **dependent_launch(x.device),
    )  # fmt: skip
    return out
