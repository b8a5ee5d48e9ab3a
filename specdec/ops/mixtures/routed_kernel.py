"""A mixture of experts as Triton kernels: the router's choice; SwiGLU experts, pairs grouped by expert, gate, up and
activation in one launch, down in another; one projection of other experts. Imported on CUDA only, and by tests under
the interpreter.

A (token, expert) pair is written to its own row, so a token's experts can be summed in a fixed order, whatever the
grouping; a row's sums do not depend on its place in a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from attention.hf.padding import Padding
from attention.kernels.launch import CompiledAtOnce, dependent_launch, wait_for_predecessor
from specdec.ops.fp8_kernel import launch_quantise
from specdec.ops.mixtures import PLAIN, Gating
from specdec.ops.mixtures.grouping_kernel import Groups, group_pairs
from specdec.ops.mixtures.many_kernel import OfBoth, better_by_many, launch_many
from specdec.ops.mixtures.mxfp4_kernel import activated, few_mxfp4, launch_few, unpacked


@dataclass(frozen=True)
class RoutedTiling:
    """Sizes of a program's tiles: pairs, rows of a result (of gate and of up each), columns; warps, and stages of its
    pipeline. A tile of weights is the left factor of the product, and pairs are its columns."""

    pairs: int
    rows: int
    columns: int
    warps: int
    stages: int


@triton.jit
def _expert_of(index_ptr, offset_ptr, active_ptr, GROUPED: constexpr):  # type: ignore[no-untyped-def]
    """A program's expert (-1: none), its first place in the order, and the place after its last."""
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
def _mxfp4_tile(  # type: ignore[no-untyped-def]
    packed_ptr, exponent_ptr, k, there, width, EVEN: constexpr, ROWS: constexpr, WIDTH: constexpr
):  # fmt: skip
    """Columns k to k + WIDTH of a tile of rows, [N, WIDTH] float32, by pointers [N, 1] to the rows."""
    byte, block = tl.arange(0, WIDTH // 2), tl.arange(0, WIDTH // 32)
    if EVEN:
        packed = tl.load(packed_ptr + k // 2 + byte[None, :]).to(tl.int32)
        exponent = tl.load(exponent_ptr + k // 32 + block[None, :]).to(tl.int32)
    else:
        packed = tl.load(
            packed_ptr + k // 2 + byte[None, :], mask=there & (k + 2 * byte < width)[None, :], other=0
        ).to(tl.int32)  # fmt: skip
        exponent = tl.load(
            exponent_ptr + k // 32 + block[None, :], mask=there & (k + 32 * block < width)[None, :], other=0
        ).to(tl.int32)  # fmt: skip
    values = tl.interleave(unpacked(packed), unpacked(packed >> 4))
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    return tl.reshape(tl.reshape(values, (ROWS, WIDTH // 32, 32)) * scale[:, :, None], (ROWS, WIDTH))


@triton.jit
def _routed_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [P / share, I] by pair, or, ORDERED, [P, I] in the order of the groups; contiguous
    x_scale_ptr,  # FP8: [rows of x, ⌈I/128⌉] float32
    stack_ptr,  # [E, O, I]: see the strides; MXFP4: [E, O, I/2]
    scale_ptr,  # FP8: [E, ⌈O/128⌉, ⌈I/128⌉] float32; MXFP4: [E, O, I/32]; contiguous
    bias_ptr,  # [E, O] contiguous
    index_ptr, order_ptr, offset_ptr, active_ptr,
    out_ptr,  # GATED: [P, rows] in the order of the groups; else [P, rows] by pair; written
    share, rows, width, expert_stride, row_stride, column_stride, scale_expert, scale_row, alpha, limit,
    GATED: constexpr, ORDERED: constexpr, INTERLEAVED: constexpr, CLAMPED: constexpr, FORM: constexpr,
    BIASED: constexpr, GROUPED: constexpr, EVEN: constexpr, TILE_PAIRS: constexpr, TILE_ROWS: constexpr,
    TILE_WIDTH: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    """GATED: O is twice `rows`, of gate and of up, and each gets the product of both; else O is `rows`."""
    wait_for_predecessor(DEPENDENT)
    expert, start, end = _expert_of(index_ptr, offset_ptr, active_ptr, GROUPED)
    if expert < 0:
        return
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)  # [N] of the result
    READ: constexpr = 2 * TILE_ROWS if GATED else TILE_ROWS
    place_in_tile = tl.arange(0, READ)
    read = tl.program_id(0) * READ + place_in_tile  # rows of the matrix: gate's and up's take turns
    inside_rows = read < rows
    if GATED:
        inside_rows = read < 2 * rows
        if not INTERLEAVED:
            read = read // 2 + (read % 2) * rows
    column = tl.arange(0, TILE_WIDTH)  # [K]
    matrix = stack_ptr + expert.to(tl.int64) * expert_stride
    weights = matrix + read.to(tl.int64)[:, None] * row_stride  # [N, 1]
    there = inside_rows[:, None]
    for first in range(start, end, TILE_PAIRS):
        place = first + tl.arange(0, TILE_PAIRS)  # [M]
        real = place < end
        pair = tl.load(order_ptr + place, mask=real, other=0) if GROUPED else place
        source = (place if ORDERED else pair // share).to(tl.int64)
        x_row = x_ptr + source[:, None] * width + column[None, :]
        acc = tl.zeros((READ, TILE_PAIRS), tl.float32)
        for k in range(0, width, TILE_WIDTH):
            inside = column + k < width
            if EVEN:
                x = tl.load(x_row + k, mask=real[:, None], other=0.0)
            else:
                x = tl.load(x_row + k, mask=real[:, None] & inside[None, :], other=0.0)
            if FORM == "mxfp4":
                scales = scale_ptr + expert.to(tl.int64) * scale_expert + read.to(tl.int64)[:, None] * scale_row
                w = _mxfp4_tile(weights, scales, k, there, width, EVEN, READ, TILE_WIDTH).to(x.dtype)
            elif EVEN:
                w = tl.load(weights + (k + column)[None, :] * column_stride)
            else:
                w = tl.load(weights + (k + column)[None, :] * column_stride, mask=there & inside[None, :], other=0.0)
            if FORM == "fp8":
                group = k // 128
                of_x = tl.load(x_scale_ptr + source * tl.cdiv(width, 128) + group, mask=real, other=0.0)
                blocks = scale_ptr + expert.to(tl.int64) * scale_expert + (read // 128) * scale_row + group
                of_w = tl.load(blocks, mask=inside_rows, other=0.0)
                acc += tl.dot(w, tl.trans(x)) * (of_w[:, None] * of_x[None, :])
            else:
                acc = tl.dot(w, tl.trans(x), acc)
        if BIASED:
            own_bias = bias_ptr + expert.to(tl.int64) * (2 * rows if GATED else rows)
            acc += tl.load(own_bias + read, mask=inside_rows, other=0.0).to(tl.float32)[:, None]
        kind = out_ptr.dtype.element_ty
        to = place
        if GATED:
            pairs = tl.trans(tl.reshape(acc.to(kind).to(tl.float32), (TILE_ROWS, 2, TILE_PAIRS)), 0, 2, 1)
            gate, up = tl.split(pairs)  # [N, M]
            acc = activated(gate, up, alpha, limit, CLAMPED)
        else:
            to = pair
        found = out_ptr + to.to(tl.int64)[:, None] * rows + row[None, :]
        tl.store(found, tl.trans(acc).to(kind), mask=real[:, None] & (row < rows)[None, :])


_FP8 = (
    (RoutedTiling(16, 32, 128, 4, 4), RoutedTiling(16, 64, 128, 4, 3)),
    (RoutedTiling(32, 64, 128, 4, 4), RoutedTiling(32, 64, 128, 4, 4)),
    (RoutedTiling(64, 64, 128, 4, 4), RoutedTiling(64, 128, 128, 4, 4)),
)
_MXFP4 = (
    (RoutedTiling(16, 32, 64, 4, 4), RoutedTiling(16, 64, 64, 4, 4)),
    (RoutedTiling(32, 64, 64, 4, 3), RoutedTiling(32, 64, 64, 4, 3)),
    (RoutedTiling(64, 64, 64, 4, 3), RoutedTiling(64, 64, 64, 4, 3)),
    (RoutedTiling(128, 64, 64, 4, 3), RoutedTiling(128, 64, 64, 4, 3)),
)


def tilings_of(pairs: int, experts: int, form: str = "half") -> tuple[RoutedTiling, RoutedTiling]:
    """For gate and up, and for down: tiles for twice as many pairs as an expert has on average.

    Of 94 tilings on an H200 within some percent of the best for the experts of Qwen3-30B-A3B, Qwen3-Next-80B and
    DeepSeek-V2-Lite at 1 to 1,024 tokens; in FP8 of 36 for the first two, in MXFP4 of 108 for gpt-oss-20b, at 1 to 512.
    """
    mean = pairs / experts
    if form == "fp8":
        return _FP8[0] if mean <= 8 else _FP8[1] if mean <= 24 else _FP8[2]
    if form == "mxfp4":
        return _MXFP4[0 if mean <= 8 else 1 if mean <= 24 else 2 if mean <= 48 else 3]
    if mean <= 8:
        return RoutedTiling(16, 64, 128, 4, 3), RoutedTiling(16, 64 if pairs < 512 else 128, 128, 4, 3)
    if mean <= 24:
        return RoutedTiling(32, 128, 128, 8, 3), RoutedTiling(32, 64, 128, 4, 3)
    if mean <= 48:
        return RoutedTiling(64, 64, 64, 4, 3), RoutedTiling(64, 128, 64, 4, 3)
    return RoutedTiling(128, 64, 64, 8, 3), RoutedTiling(128, 128, 64, 8, 3)


def launch_routed(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    index: Tensor,
    scales: OfBoth = (None, None),
    biases: OfBoth = (None, None),
    gating: Gating = PLAIN,
    tilings: tuple[RoutedTiling, RoutedTiling] | None = None,
    padding: Padding | None = None,
) -> Tensor:
    """See `specdec.ops.mixtures.routed.routed_experts`; x is contiguous. tilings: default `tilings_of`, or
    `launch_many` where that is faster. padding: see `group_pairs`."""
    experts, width, rows = len(down), down.shape[1], gate_up.shape[1] // 2
    (tokens, top_k), index = index.shape, index.contiguous()
    if tilings is None and better_by_many(x, gate_up, down, index.numel(), gating):
        return launch_many(x, gate_up, down, index, scales, biases, gating, padding)
    grouped = tokens > 1
    # One token needs no grouping: its pairs have distinct experts. Launches need pointers, so `index` fills unread
    # fields.
    groups = group_pairs(index, experts, padding) if grouped else Groups(index, index, index)
    form, sent = _form_of(down), (index, groups.order, groups.offsets, groups.active)
    inner, out = x.new_empty(tokens * top_k, rows), x.new_empty(tokens, top_k, width)
    few = form == "mxfp4" and tilings is None and few_mxfp4(tokens * top_k, experts, x)
    tilings = tilings or tilings_of(tokens * top_k, experts, form)
    for gated, tiling, given, stack, scale, bias, result in zip(
        (True, False), tilings, (x, inner), (gate_up, down), scales, biases, (inner, out), strict=True
    ):
        if few and scale is not None:
            launch_few(given, stack, scale, bias, sent, result, gating, gated, grouped)
        else:
            _launch(given, stack, scale, bias, sent, result, tiling, gating if gated else None, not gated, grouped)
    return out


def _form_of(stack: Tensor) -> str:
    return {torch.uint8: "mxfp4", torch.float8_e4m3fn: "fp8"}.get(stack.dtype, "half")


def _launch(
    x: Tensor,
    stack: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    sent: tuple[Tensor, Tensor, Tensor, Tensor],
    out: Tensor,
    tiling: RoutedTiling,
    gating: Gating | None,
    ordered: bool,
    grouped: bool,
) -> None:
    """One projection of x [rows, I] into out [..., O]; see `_routed_kernel`. sent: index, order, offsets, active."""
    (tokens, top_k), form, gated, gating = sent[0].shape, _form_of(stack), gating is not None, gating or PLAIN
    n, k = out.shape[-1], x.shape[-1]
    values, x_scale = launch_quantise(x) if form == "fp8" else (x, x)
    strides = (0, 0) if scale is None else scale.stride()[:2]
    grid = (triton.cdiv(n, tiling.rows), len(sent[3]) if grouped else tokens * top_k)
    _routed_kernel[grid](
        values, x_scale, stack, x if scale is None else scale, x if bias is None else bias, *sent, out,
        tokens * top_k // len(x), n, k, *stack.stride(), *strides, gating.alpha, gating.limit or 0.0, GATED=gated,
        ORDERED=ordered, INTERLEAVED=gating.interleaved, CLAMPED=gating.limit is not None, FORM=form,
        BIASED=bias is not None, GROUPED=grouped, EVEN=n % tiling.rows == 0 and k % tiling.columns == 0,
        TILE_PAIRS=tiling.pairs, TILE_ROWS=tiling.rows, TILE_WIDTH=tiling.columns,
        num_warps=tiling.warps, num_stages=tiling.stages, **dependent_launch(x.device),
    )  # fmt: skip


_OTHER = RoutedTiling(16, 64, 64, 4, 5)
"""Of ten choices for DeepSeek-V2-Lite's experts on an H200 the best over 1 … 128 tokens of 6 experts."""


def launch_expert_matmul(x: Tensor, stack: Tensor, scale: Tensor | None, index: Tensor) -> Tensor:
    """See `specdec.ops.mixtures.paired.expert_matmul`."""
    out, index = x.new_empty(*index.shape, stack.shape[1]), index.contiguous()
    grouped = len(index) > 1
    groups = group_pairs(index, len(stack)) if grouped else Groups(index, index, index)
    sent = index, groups.order, groups.offsets, groups.active
    tiling = _OTHER if scale is None else _FP8[0][1]
    _launch(x.flatten(0, 1).contiguous(), stack, scale, None, sent, out, tiling, None, False, grouped)
    return out


_FLIP, _LEAST = constexpr(0x7FFFFFFF), constexpr(-(2**63))
_ONE_WARP = 512


@triton.jit
def _best_experts_kernel(  # type: ignore[no-untyped-def]
    scores_ptr,  # [T, E], columns side by side
    weight_ptr,  # [T, k], written
    place_ptr,  # [T, k] int64, written
    experts, row_stride,
    CHOSEN: constexpr, SOFTMAX: constexpr, NORMALISE: constexpr, EXPERTS: constexpr, PADDED: constexpr,
    DEPENDENT: constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    there = expert < experts
    score = tl.load(scores_ptr + token * row_stride + expert, mask=there, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        score = tl.exp(score - tl.max(score, 0))
        score = score / tl.sum(score, 0)
    bits = score.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & _FLIP)  # integers in the order of the floats, NaN above all
    key = (order.to(tl.int64) << 32) | (EXPERTS - expert)  # of equal scores the first
    key = tl.where(there, key, _LEAST)
    slot = tl.arange(0, PADDED)
    best = tl.full((PADDED,), float("-inf"), tl.float32)
    place = tl.zeros((PADDED,), tl.int64)
    for i in tl.static_range(CHOSEN):
        top = tl.max(key, 0)
        key = tl.where(key == top, _LEAST, key)
        found = (top >> 32).to(tl.int32)
        found = (found ^ ((found >> 31) & _FLIP)).to(tl.float32, bitcast=True)
        best = tl.where(slot == i, found, best)
        place = tl.where(slot == i, EXPERTS - (top & 0xFFFFFFFF), place)
    real = slot < CHOSEN
    if NORMALISE == "softmax":
        best = tl.exp(best - tl.max(best, 0))
    if NORMALISE != "":
        best = best / tl.sum(tl.where(real, best, 0.0), 0)
    to = token * CHOSEN + slot
    tl.store(weight_ptr + to, best.to(weight_ptr.dtype.element_ty), mask=real)
    tl.store(place_ptr + to, place, mask=real)


def launch_best_experts(
    scores: Tensor, chosen: int, softmax: bool, normalise: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `specdec.ops.mixtures.routed.best_experts`."""
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    tokens, experts = scores.shape
    weights = scores.new_empty(tokens, chosen, dtype=dtype)
    places = scores.new_empty(tokens, chosen, dtype=torch.int64)
    if tokens:
        with CompiledAtOnce():  # places in memory
            _best_experts_kernel[(tokens,)](
                scores, weights, places, experts, scores.stride(0), CHOSEN=chosen, SOFTMAX=softmax,
                NORMALISE=normalise, EXPERTS=triton.next_power_of_2(experts),
                PADDED=triton.next_power_of_2(chosen), num_warps=1 if experts <= _ONE_WARP else 4,
                **dependent_launch(scores.device),
            )  # fmt: skip
    return weights, places
