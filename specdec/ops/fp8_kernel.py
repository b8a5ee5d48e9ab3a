"""Quantised activations, and matmuls with weights in blocks of FP8, as Triton kernels. Imported on CUDA only.

A program of the matmul takes some rows of the weight and some tokens, and walks along both a block of 128 columns at
a time: tensor cores multiply in 8 bits, and the sum of each block is added to float32 sums after it was multiplied by
the two scales. So no more than 128 products are summed by the tensor cores alone, whose own sums of 8-bit products
have fewer bits than float32.

No split-K. Narrow weights are cut into more pieces by fewer rows a program instead, which needs no reduction
afterwards, and the order of summation depends on nothing but the width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention.kernels.pdl import dependent_launch, wait_for_predecessor

_GROUP = tl.constexpr(128)
_MAX = tl.constexpr(448.0)
_LEAST_SCALE = tl.constexpr(1e-12)
_GROUPS_A_PROGRAM = 8


@dataclass(frozen=True)
class Tiling:
    """How a matmul is cut.

    Attributes:
        tokens, rows: of a program; rows is at most 128, so that they have one scale a block of columns.
        weight_first: the weight is the left operand of the tensor cores: these take 64 rows at a time, which few
            tokens do not fill.
        warps, stages: of a program; stages are blocks of columns that are on their way at once.
    """

    tokens: int
    rows: int
    weight_first: bool
    warps: int
    stages: int


_FEW_ROWS = 10_240
"""Up to so many rows of a weight, programs of 64 rows would leave part of a GPU of 132 multiprocessors without work."""


def tiling_of(tokens: int, rows: int) -> Tiling:
    """The tiling of a matmul of so many tokens with a weight of so many rows.

    >>> tiling_of(1, 4096)
    Tiling(tokens=16, rows=32, weight_first=False, warps=4, stages=10)
    >>> tiling_of(48, 28672)
    Tiling(tokens=64, rows=128, weight_first=True, warps=8, stages=6)
    """
    if tokens <= 16:
        return Tiling(16, 32, False, 4, 10) if rows <= _FEW_ROWS else Tiling(16, 64, True, 4, 8)
    if tokens <= 32:
        return Tiling(32, 64, True, 4, 8)
    if tokens <= 64:
        return Tiling(64, 64, True, 4, 8) if rows <= _FEW_ROWS else Tiling(64, 128, True, 8, 6)
    if tokens <= 256:
        return Tiling(128, 64, False, 4, 6) if rows <= _FEW_ROWS else Tiling(128, 128, False, 8, 4)
    return Tiling(128, 128, False, 8, 4)


@triton.jit
def quantised(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """x [G, 128] float32 -> the same in 8 bits, and the scale of each group [G]."""
    scale = tl.max(tl.abs(x), 1) / _MAX  # [G]
    return (x / tl.maximum(scale, _LEAST_SCALE)[:, None]).to(dtype), scale


@triton.jit
def _quantise_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, I]
    out_ptr,  # [T, I] contiguous, e4m3
    scale_ptr,  # [T, G] contiguous, float32
    width,
    groups,
    x_stride,
    GROUPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_predecessor(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)  # [G]
    column = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]  # [G, 128]
    x = tl.load(x_ptr + token * x_stride + column, mask=column < width, other=0.0).to(tl.float32)
    rounded, scale = quantised(x, out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * width + column, rounded, mask=column < width)
    tl.store(scale_ptr + token * groups + group, scale, mask=group < groups)


def launch_quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, I] -> e4m3 [T, I], scales [T, ⌈I/128⌉] float32."""
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens, width = x.shape
    groups = triton.cdiv(width, 128)
    out = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(tokens, groups, dtype=torch.float32)
    if tokens:
        _quantise_kernel[(tokens, triton.cdiv(groups, _GROUPS_A_PROGRAM))](
            x,
            out,
            scales,
            width,
            groups,
            x.stride(0),
            GROUPS=_GROUPS_A_PROGRAM,
            num_warps=4,
            **dependent_launch(x.device),
        )
    return out, scales


@triton.jit(do_not_specialize=["tokens"])
def _fp8_matmul_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, I] e4m3
    x_scale_ptr,  # [T, G] float32
    weight_ptr,  # [O, I] e4m3
    weight_scale_ptr,  # [O / 128, G] float32
    out_ptr,  # [T, O] contiguous
    tokens,
    rows,
    width,
    x_stride,
    x_scale_token,
    x_scale_group,
    weight_stride,
    weight_scale_row,
    weight_scale_group,
    TILE_TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    WHOLE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    token = tl.program_id(0) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)  # [M]
    first_row = tl.program_id(1) * TILE_ROWS
    row = first_row + tl.arange(0, TILE_ROWS)  # [N]
    column = tl.arange(0, _GROUP)  # [K]
    real_token, real_row = token < tokens, row < rows
    weight_rows = weight_ptr + tl.minimum(row, rows - 1).to(tl.int64) * weight_stride
    weights = weight_rows[:, None] + column[None, :]  # [N, K]
    weight_scale = weight_scale_ptr + (first_row // _GROUP).to(tl.int64) * weight_scale_row  # of all rows: see Tiling
    x_rows = x_ptr + tl.minimum(token, tokens - 1).to(tl.int64) * x_stride
    xs = x_rows[:, None] + column[None, :]  # [M, K]
    x_scale = x_scale_ptr + tl.minimum(token, tokens - 1).to(tl.int64) * x_scale_token  # [M]
    wait_for_predecessor(DEPENDENT)
    if WEIGHT_FIRST:
        acc = tl.zeros((TILE_ROWS, TILE_TOKENS), tl.float32)  # [N, M]
    else:
        acc = tl.zeros((TILE_TOKENS, TILE_ROWS), tl.float32)  # [M, N]
    for start in range(0, width, _GROUP):
        if WHOLE:  # rows and tokens past the end repeat the last: their sums are not stored
            w = tl.load(weights + start, eviction_policy="evict_first")  # [N, K]
            x = tl.load(xs + start)  # [M, K]
        else:
            inside = column[None, :] < width - start
            w = tl.load(weights + start, mask=inside, other=0.0)
            x = tl.load(xs + start, mask=inside, other=0.0)
        group = start // _GROUP
        scale = tl.load(x_scale + group * x_scale_group) * tl.load(weight_scale + group * weight_scale_group)  # [M]
        if WEIGHT_FIRST:
            acc += tl.dot(w, tl.trans(x)) * scale[None, :]
        else:
            acc += tl.dot(x, tl.trans(w)) * scale[:, None]
    if WEIGHT_FIRST:
        to = out_ptr + token[None, :].to(tl.int64) * rows + row[:, None]  # [N, M]
        tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=real_token[None, :] & real_row[:, None])
    else:
        to = out_ptr + token[:, None].to(tl.int64) * rows + row[None, :]  # [M, N]
        tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=real_token[:, None] & real_row[None, :])


def launch_fp8_matmul(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    dtype: torch.dtype,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """See `specdec.ops.fp8.fp8_matmul`; scales may have strides of 0. tiling: default by `tiling_of`."""
    (tokens, width), rows = x.shape, len(weight)
    out = x.new_empty(tokens, rows, dtype=dtype)
    if not tokens:
        return out
    tile = tiling or tiling_of(tokens, rows)
    _fp8_matmul_kernel[(triton.cdiv(tokens, tile.tokens), triton.cdiv(rows, tile.rows))](
        x if x.stride(1) == 1 else x.contiguous(),
        x_scale,
        weight,
        weight_scale,
        out,
        tokens,
        rows,
        width,
        x.stride(0) if x.stride(1) == 1 else width,
        *x_scale.stride(),
        weight.stride(0),
        *weight_scale.stride(),
        TILE_TOKENS=tile.tokens,
        TILE_ROWS=tile.rows,
        WEIGHT_FIRST=tile.weight_first,
        WHOLE=width % 128 == 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent_launch(x.device),
    )
    return out
