"""Quantised activations, and matmuls with weights in blocks of FP8, as Triton kernels. Imported on CUDA only.

A program of the matmul walks along blocks of 128 columns: tensor cores multiply in 8 bits, and each block's sum is
multiplied by the two scales and added in float32. So tensor cores, whose own sums have fewer bits, add 128 products.

Split-K: where a weight has too few rows to keep a GPU busy, several programs share the blocks of the same rows, each
writes its sums in float32, and a second launch adds them in order (1.0 µs on an H200). The program that comes last, by
a counter as in `packed_kernel`, cannot: counters of the whole process are wrong when two graphs run at once. The order
of summation depends on the tiling alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from attention.kernels.launch import dependent_launch, wait_for_predecessor
from attention.kernels.tiles import at_most_last, block_of, load_float, load_where, long_program_id
from specdec.ops.linear import without_gaps

_GROUP = constexpr(128)
_MAX = constexpr(448.0)
_LEAST_SCALE = constexpr(1e-12)
_GROUPS_A_PROGRAM = 8
_BLOCK = 128
_SUM_SIZE, _SUM_WARPS = 256, 2


@dataclass(frozen=True)
class Fp8Tiling:
    """How a matmul is cut.

    Attributes:
        tokens, rows: tile of a program; rows is at most 128, so that a block of columns has one scale.
        weight_first: the weight is the left operand of the tensor cores: these take 64 rows at a time, which few
            tokens do not fill.
        warps, stages: per program; stages are loop steps in flight at once. splits: programs that share the columns of
            a row, see `share`.
        at_once: blocks of columns of a step. Their scales are loaded a step ahead: one is read from memory as slowly as
            a tile of the weight, and Triton pipelines only the tensor cores' operands.
    """

    tokens: int
    rows: int
    weight_first: bool
    warps: int
    stages: int
    at_once: int = 1
    splits: int = 1

    def share(self, blocks: int) -> int:
        """A program's share of this many blocks of columns, in whole steps, so that fewer programs may suffice."""
        return _ceil(_ceil(blocks, self.splits), self.at_once) * self.at_once


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


_PROGRAMS = 264
"""Programs that keep a GPU of 132 multiprocessors busy: two each."""
_MOST_SPLITS, _LEAST_BLOCKS = 8, 4
_FEW_ROWS = 10_240
"""Up to this many rows of a weight, programs of 128 rows would leave part of a GPU idle."""


def tiling_of(tokens: int, rows: int, width: int) -> Fp8Tiling:
    """The tiling of a matmul of `tokens` tokens with a weight of this many rows and columns.

    From a sweep on an H200 with 1, 8 and 48 tokens (benchmarks/results/fp8-h200-2026-11-22.jsonl), without splits and
    with steps of one block: wide weights take its fastest. Narrow ones took 0.3 µs a step in 64 programs, whatever was
    in flight. Splits, steps of two blocks and stages that leave room for three programs a multiprocessor follow from
    that; they were not measured, and neither was 17 to 32 tokens.

    >>> tiling_of(1, 4096, 4096)
    Fp8Tiling(tokens=16, rows=64, weight_first=True, warps=4, stages=3, at_once=2, splits=5)
    >>> tiling_of(48, 28672, 4096)
    Fp8Tiling(tokens=64, rows=128, weight_first=False, warps=4, stages=4, at_once=1, splits=1)
    """
    if tokens > 64:
        return _many_tokens(tokens, rows, width)
    tile, first = max(16, 1 << (tokens - 1).bit_length()), tokens <= 32
    if rows > _FEW_ROWS:
        return Fp8Tiling(tile, 128, first, 4, 4)
    most = min(_MOST_SPLITS, _ceil(width, _BLOCK * _LEAST_BLOCKS))
    splits = max(1, min(_ceil(_PROGRAMS, _ceil(rows, 64)), most))
    return Fp8Tiling(tile, 64, True, 4, 3, 2, splits) if first else Fp8Tiling(tile, 64, False, 4, 4, 1, splits)


_THREE_EACH = 396
"""Programs of which three run on each of 132 multiprocessors: 64 x 128, four warps, three stages. With four, two do."""
_LEAST_OF_MANY = 24
"""Blocks of columns of a program, from 65 tokens on: the sums of shorter parts take longer than they gain."""


def _many_tokens(tokens: int, rows: int, width: int) -> Fp8Tiling:
    """The tiling for more than 64 tokens: 64 of them and 128 rows a program, so that several run on a multiprocessor.

    A program multiplies, then adds to its float32 sums, in turn: several keep the tensor cores busy, where one of 128 x
    128 with eight warps does not. That one is taken for many tokens and long sums alone. From a sweep of up to 94
    tilings on an H200, with a bfloat16 matmul for comparison (benchmarks/results/fp8-tilings-h200-2026-11-22.jsonl).

    >>> tiling_of(192, 4096, 14336)
    Fp8Tiling(tokens=64, rows=128, weight_first=False, warps=4, stages=3, at_once=1, splits=4)
    """
    tiles, blocks = _ceil(tokens, 64), _ceil(width, _BLOCK)
    if tokens > 1024 and blocks > 64:
        return Fp8Tiling(128, 128, False, 8, 4)
    programs = tiles * _ceil(rows, 128)
    splits = max(1, min(4, _THREE_EACH // programs, blocks // _LEAST_OF_MANY))
    if splits == 1 and 2 * programs < _PROGRAMS:
        return Fp8Tiling(64, 64, False, 4, 8 if 4 * programs <= _PROGRAMS else 4)
    programs *= splits
    as_many_turns = _ceil(programs, _PROGRAMS) == _ceil(programs, _THREE_EACH)
    return Fp8Tiling(64, 128, False, 4, 4 if as_many_turns else 3, 1, splits)


@triton.jit
def quantised(x, dtype: constexpr):  # type: ignore[no-untyped-def]
    """x [G, 128] float32 -> the same in 8 bits, and the scale of each group [G]."""
    scale = tl.max(tl.abs(x), 1) / _MAX  # [G]
    return (x / tl.maximum(scale, _LEAST_SCALE)[:, None]).to(dtype), scale


@triton.jit
def _quantise_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, I]
    out_ptr,  # [T, I] contiguous, e4m3
    scale_ptr,  # [T, G] contiguous, float32
    width, groups, x_stride,
    GROUPS: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    token = long_program_id(0)
    group = block_of(tl.program_id(1), GROUPS)  # [G]
    column = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]  # [G, 128]
    x = load_float(x_ptr + token * x_stride + column, column < width)
    rounded, scale = quantised(x, out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * width + column, rounded, mask=column < width)
    tl.store(scale_ptr + token * groups + group, scale, mask=group < groups)


def eight_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """Results in 8 bits of the shape of x [1, T, F] or [T, F]: e4m3 [T, F], scales [T, ⌈F/128⌉] float32."""
    tokens, width = x.shape[-2:]
    scales = x.new_empty(tokens, triton.cdiv(width, 128), dtype=torch.float32)
    return x.new_empty(tokens, width, dtype=torch.float8_e4m3fn), scales


def launch_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, I] -> e4m3 [T, I], scales [T, ⌈I/128⌉] float32."""
    x = without_gaps(x)
    (tokens, width), (out, scales) = x.shape, eight_bits(x)
    groups = scales.shape[1]
    if tokens:
        _quantise_kernel[(tokens, triton.cdiv(groups, _GROUPS_A_PROGRAM))](
            x, out, scales, width, groups, x.stride(0), GROUPS=_GROUPS_A_PROGRAM, num_warps=4,
            **dependent_launch(x.device),
        )  # fmt: skip
    return out, scales


@triton.jit
def _scales(  # type: ignore[no-untyped-def]
    x_scale, x_scale_group, weight_scale, weight_scale_group, real_token, first, last, AT_ONCE: constexpr
):
    """The scales of tokens [M] and of the weight, in turn, for blocks first … first + AT_ONCE of columns.

    Blocks from `last` on, which are zeros or unused, get the scales of the block before. The caller multiplies the
    scales where it uses them, because multiplying here would wait for the loads.
    """
    found = ()
    for i in tl.static_range(AT_ONCE):
        group = tl.minimum(first + i, last - 1)
        of_x = load_where(x_scale + group * x_scale_group, real_token)
        found = found + (of_x, tl.load(weight_scale + group * weight_scale_group))  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit(do_not_specialize=["tokens", "share"])
def _fp8_matmul_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, I] e4m3
    x_scale_ptr,  # [T, G] float32
    weight_ptr,  # [O, I] e4m3
    weight_scale_ptr,  # [O / 128, G] float32
    out_ptr,  # [S, T, O] contiguous
    tokens, rows, width, share, x_stride, x_scale_token, x_scale_group, weight_stride, weight_scale_row,
    weight_scale_group,
    TILE_TOKENS: constexpr, TILE_ROWS: constexpr, WEIGHT_FIRST: constexpr, AT_ONCE: constexpr,
    WHOLE: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    token = block_of(tl.program_id(0), TILE_TOKENS)  # [M]
    first_row = tl.program_id(1) * TILE_ROWS
    row = first_row + tl.arange(0, TILE_ROWS)  # [N]
    column = tl.arange(0, _GROUP)  # [K]
    real_token, real_row = token < tokens, row < rows
    begin = tl.program_id(2) * share
    last = tl.minimum(begin + share, tl.cdiv(width, _GROUP))  # the first block that is not this program's
    weight_rows = weight_ptr + at_most_last(row, rows) * weight_stride  # rows past the end: not stored
    weights = weight_rows[:, None] + column[None, :]  # [N, K]
    weight_scale = weight_scale_ptr + (first_row // _GROUP).to(tl.int64) * weight_scale_row  # see Fp8Tiling
    xs = x_ptr + token[:, None].to(tl.int64) * x_stride + column[None, :]  # [M, K]
    x_scale = x_scale_ptr + token.to(tl.int64) * x_scale_token  # [M]
    wait_for_predecessor(DEPENDENT)
    if WEIGHT_FIRST:
        acc = tl.zeros((TILE_ROWS, TILE_TOKENS), tl.float32)  # [N, M]
    else:
        acc = tl.zeros((TILE_TOKENS, TILE_ROWS), tl.float32)  # [M, N]
    scales = _scales(x_scale, x_scale_group, weight_scale, weight_scale_group, real_token, begin, last, AT_ONCE)
    for step in range(begin, last, AT_ONCE):
        ahead = _scales(
            x_scale, x_scale_group, weight_scale, weight_scale_group, real_token, step + AT_ONCE, last, AT_ONCE
        )
        for i in tl.static_range(AT_ONCE):
            start = (step + i) * _GROUP
            # Tokens past the end are zeros, not the last one again: all programs would read it from one place in L2.
            if WHOLE:
                # evict_first: weights are read once, and should not displace x, which every program reads, from L2.
                w = tl.load(weights + start, eviction_policy="evict_first")  # [N, K]
                x = load_where(xs + start, real_token[:, None])  # [M, K]
            else:
                inside = column[None, :] < width - start
                w = load_where(weights + start, inside)
                x = load_where(xs + start, real_token[:, None] & inside)
            scale = scales[2 * i] * scales[2 * i + 1]  # [M]
            if WEIGHT_FIRST:
                acc += tl.dot(w, tl.trans(x)) * scale[None, :]
            else:
                acc += tl.dot(x, tl.trans(w)) * scale[:, None]
        scales = ahead
    out = out_ptr + long_program_id(2) * tokens * rows
    if WEIGHT_FIRST:
        to = out + token[None, :].to(tl.int64) * rows + row[:, None]  # [N, M]
        tl.store(to, acc, mask=real_token[None, :] & real_row[:, None])
    else:
        to = out + token[:, None].to(tl.int64) * rows + row[None, :]  # [M, N]
        tl.store(to, acc, mask=real_token[:, None] & real_row[None, :])


@triton.jit(do_not_specialize=["count"])
def sum_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,  # [S, count] float32, contiguous
    out_ptr,  # [count] contiguous
    count,
    SPLITS: constexpr, SIZE: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    place = block_of(tl.program_id(0), SIZE)  # [SIZE]
    inside = place < count
    wait_for_predecessor(DEPENDENT)
    total = load_where(parts_ptr + place, inside)
    for part in tl.static_range(1, SPLITS):
        total += load_where(parts_ptr + part * count.to(tl.int64) + place, inside)
    tl.store(out_ptr + place, total, mask=inside)


def launch_fp8_matmul(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype,
    tiling: Fp8Tiling | None = None,
) -> Tensor:
    """See `specdec.ops.fp8.fp8_matmul`; scales may have strides of 0. tiling: default by `tiling_of`."""
    x = without_gaps(x)
    (tokens, width), rows = x.shape, len(weight)
    out = x.new_empty(tokens, rows, dtype=dtype)
    if not tokens:
        return out
    tile = tiling or tiling_of(tokens, rows, width)
    blocks = _ceil(width, _BLOCK)
    share = tile.share(blocks)
    splits = _ceil(blocks, share)
    parts = out if splits == 1 else x.new_empty(splits, tokens, rows, dtype=torch.float32)
    dependent = dependent_launch(x.device)
    _fp8_matmul_kernel[(_ceil(tokens, tile.tokens), _ceil(rows, tile.rows), splits)](
        x, x_scale, weight, weight_scale, parts, tokens, rows, width, share,
        x.stride(0), *x_scale.stride(), weight.stride(0), *weight_scale.stride(),
        TILE_TOKENS=tile.tokens, TILE_ROWS=tile.rows, WEIGHT_FIRST=tile.weight_first, AT_ONCE=tile.at_once,
        WHOLE=width % (_BLOCK * tile.at_once) == 0, num_warps=tile.warps, num_stages=tile.stages, **dependent,
    )  # fmt: skip
    if splits > 1:
        sum_kernel[(_ceil(out.numel(), _SUM_SIZE),)](
            parts, out, out.numel(), SPLITS=splits, SIZE=_SUM_SIZE, num_warps=_SUM_WARPS, **dependent
        )
    return out
