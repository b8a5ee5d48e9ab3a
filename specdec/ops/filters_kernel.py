"""Filters of sampled rows as Triton kernels. Imported on CUDA only.

A filter is a search for the lowest kept logit: top-k for the one at which the count of tokens reaches k, top-p for the
one at which the mass reaches p of the total. Two launches over parts of every row narrow it down by its distance from
the largest: the first has edges that grow with the distance, the second divides the interval found. A third lists the
logits in what remains, and the last, one program a row, searches the list bit by bit of the ordered logit. A list that
is too long for its place is not used: that program then reads the whole row.

With few rows the launches' time is that of their dependent loads. So all but the first load parameters and logits,
which earlier launches do not write, before they wait for these.

A row with top-k is narrowed by top-k alone, and everything above is listed too: top-p's search is then in the list.
min-p needs no search: it keeps an upper set, too, and the result is the smaller of the two upper sets.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from attention.kernels.launch import dependent_launch, wait_for_predecessor
from attention.kernels.tiles import block_of, load_where, long_program_id, sum_where
from specdec.ops.logits_kernel import (
    ALL,
    COLUMNS,
    EDGES,
    FLOOR,
    LOG2E,
    STATE,
    counts_tokens,
    distance_from,
    load_logits,
    load_row,
    mass_target,
    search_state,
    settle_kernel,
    store_columns,
    weight,
)

_PART = 2048
_SUMS_TILE = 128  # tokens of a part that are summed at once: one a thread, or Triton moves them between threads
_SUMS_WARPS = 4
_LIST_WARPS = 4
_LISTED = 4  # a part's list has room for one in this many tokens
_SHARE = 256  # tokens of one part in a tile of the last search
_TILE = 8192  # at most
_PROGRAMS = 2048  # from this many on, a program has several parts
_SECOND = 8  # edges of the second sums: with 16 all took a tenth longer, with 4 the last search twice as long
_REACH = constexpr(128.0)  # top-k's first edges lie within this distance
_SHIFT = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


@triton.jit
def _narrowed(  # type: ignore[no-untyped-def]
    sums_ptr,  # [parts, WIDTH]
    edges_ptr,  # [WIDTH]
    state_ptr,  # [STATE], of the level before
    parts, counting, top_k, top_p,
    LEVEL: constexpr, WIDTH: constexpr, PARTS: constexpr,
):  # fmt: skip
    """The interval [low, high) of distances with the lowest kept logit, after level LEVEL, and the sum below it.

    With it the target of the search and, of top-p's, the total mass and that above the floor of min-p.
    """
    column = tl.arange(0, WIDTH)
    is_edge = column < (EDGES if LEVEL == 0 else WIDTH)
    edges = load_where(edges_ptr + column, is_edge)
    if LEVEL > 0:
        low, high, below, target, total, above_floor = search_state(state_ptr)
    part = tl.arange(0, PARTS)[:, None]
    sums = tl.sum(load_where(sums_ptr + part * WIDTH + column[None, :], part < parts), 0)  # [WIDTH]
    if LEVEL == 0:
        low, high, below = 0.0, float("inf"), 0.0
        total = sum_where(sums, column == ALL)
        above_floor = sum_where(sums, column == FLOOR)
        target = tl.where(counting, top_k.to(tl.float32), mass_target(total, top_p))
    short = is_edge & (sums < target)
    low = tl.maximum(low, tl.max(tl.where(short, edges, 0.0), 0))
    below = tl.maximum(below, tl.max(tl.where(short, sums, 0.0), 0))
    high = tl.minimum(high, tl.min(tl.where(is_edge & (sums >= target), edges, float("inf")), 0))
    return low, high, below, target, total, above_floor


@triton.jit(do_not_specialize=["repeat", "per"])
def _sums_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [T, V]
    peaks_ptr,  # [T] int64
    index_ptr,  # [R] int64 or None
    temperature_ptr,  # [J] float32
    top_k_ptr,  # [J] int32
    top_p_ptr,  # [J] float32
    min_p_ptr,  # [J] float32
    copy_ptr,  # [R, V] as the logits, or None
    found_sums_ptr,  # [R, parts, COLUMNS] float32, of level 0; None there
    found_edges_ptr,  # [R, COLUMNS] float32, likewise
    sums_ptr,  # [R, parts, WIDTH] float32
    edges_ptr,  # [R, WIDTH] float32
    state_ptr,  # [2, R, STATE] float32
    vocab, parts,
    repeat,  # parts of one program
    row_stride, peak_stride, copy_stride, per,
    LEVEL: constexpr, WIDTH: constexpr, PART: constexpr, PARTS: constexpr, TILE: constexpr,
    DEPENDENT: constexpr,
):  # fmt: skip
    row, start = long_program_id(0), tl.program_id(1) * repeat
    rows = tl.num_programs(0).to(tl.int64)
    if LEVEL == 0:
        wait_for_predecessor(DEPENDENT)
    logits_ptr, peak, temperature, top_k, top_p, floor = load_row(
        logits_ptr, peaks_ptr, index_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, per, row_stride,
        peak_stride,
    )  # fmt: skip
    if LEVEL > 0:
        wait_for_predecessor(DEPENDENT)
    counting = counts_tokens(top_k, vocab)
    if (temperature == 0) | ((LEVEL > 0) & (top_p >= 1) & (counting == 0)):
        return
    scale = LOG2E / temperature
    column = tl.arange(0, WIDTH)
    if LEVEL == 0:
        # logits farther away have, all together, less than 1 - p of the mass: each has less than (1 - p) / V of the
        # peak's
        reach = tl.where(counting, _REACH, temperature * tl.log(vocab / tl.maximum(1 - top_p, 1e-8)))
        fraction = (column + 1) / EDGES
        edges = tl.where(column < EDGES, reach * fraction * fraction * fraction, float("inf"))
    else:
        low, high, below, target, total, above_floor = _narrowed(
            found_sums_ptr + row * parts * COLUMNS, found_edges_ptr + row * COLUMNS, state_ptr, parts, counting, top_k,
            top_p, 0, COLUMNS, PARTS,
        )  # fmt: skip
        if start == 0:
            store_columns(state_ptr + (rows + row) * STATE, (low, high, below, target, total, above_floor))
        doubled, divided = low * tl.exp2(column + 1.0), low + (high - low) * ((column + 1) / (WIDTH + 1))
        edges = tl.where(high == float("inf"), doubled, divided)
    if start == 0:
        tl.store(edges_ptr + row * WIDTH + column, edges)
    for part in range(start, tl.minimum(start + repeat, parts)):
        if copy_ptr is not None:  # at once: a load after a store would wait for the store
            index = block_of(part, PART)
            whole = load_logits(logits_ptr + index, index < vocab)  # [PART]
            tl.store(copy_ptr + row * copy_stride + index, whole, mask=index < vocab)
        sums, above = tl.zeros((WIDTH, TILE), tl.float32), tl.zeros((TILE,), tl.float32)
        for tile in tl.static_range(PART // TILE):
            index = part * PART + block_of(tile, TILE)
            x = load_logits(logits_ptr + index, index < vocab)  # [TILE]
            w = tl.where(index < vocab, tl.where(counting, 1.0, weight(x, peak, scale)), 0.0)
            nearer = (distance_from(x, peak)[None, :] < edges[:, None]).to(tl.float32)
            sums += nearer * w[None, :]
            if LEVEL == 0:
                above += tl.where(w >= floor, w, 0.0)
        of_part = tl.sum(sums, 1)
        if LEVEL == 0:
            of_part = tl.where(column == FLOOR, tl.sum(above, 0), of_part)
        tl.store(sums_ptr + (row * parts + part) * WIDTH + column, of_part)


@triton.jit(do_not_specialize=["repeat", "per"])
def _list_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [T, V]
    peaks_ptr,  # [T] int64
    index_ptr,  # [R] int64 or None
    temperature_ptr,  # [J] float32
    top_k_ptr,  # [J] int32
    top_p_ptr,  # [J] float32
    min_p_ptr,  # [J] float32
    sums_ptr,  # [R, parts, WIDTH] float32, the second ones
    edges_ptr,  # [R, WIDTH] float32
    state_ptr,  # [2, R, STATE] float32
    counts_ptr,  # [R, parts] int32
    listed_ptr,  # [R, parts, CAPACITY] as the logits
    vocab, parts,
    repeat,  # parts of one program
    row_stride, peak_stride, per,
    WIDTH: constexpr, PART: constexpr, PARTS: constexpr, CAPACITY: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    row, start = long_program_id(0), tl.program_id(1) * repeat
    rows = tl.num_programs(0).to(tl.int64)
    logits_ptr, peak, temperature, top_k, top_p, _floor = load_row(
        logits_ptr, peaks_ptr, index_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, per, row_stride,
        peak_stride,
    )  # fmt: skip
    counting = counts_tokens(top_k, vocab)
    place = tl.arange(0, PART)
    column = start * PART + place
    x = load_logits(logits_ptr + column, column < tl.where(temperature != 0, vocab, 0))  # [PART]
    wait_for_predecessor(DEPENDENT)
    if (temperature == 0) | ((top_p >= 1) & (counting == 0)):
        return
    low, high, below, target, total, above_floor = _narrowed(
        sums_ptr + row * parts * WIDTH, edges_ptr + row * WIDTH, state_ptr + (rows + row) * STATE, parts, counting,
        top_k, top_p, 1, WIDTH, PARTS,
    )  # fmt: skip
    low, below = tl.where(counting, 0.0, low), tl.where(counting, 0.0, below)
    if start == 0:
        store_columns(state_ptr + row * STATE, (low, high, below, target, total, above_floor))
    for part in range(start, tl.minimum(start + repeat, parts)):
        column = part * PART + place
        distance = distance_from(x, peak)
        inside = ((column < vocab) & (distance >= low) & (distance < high)).to(tl.int32)
        to, list_ = tl.cumsum(inside, 0) - 1, row * parts + part
        tl.store(listed_ptr + list_ * CAPACITY + to, x, mask=(inside > 0) & (to < CAPACITY))
        tl.store(counts_ptr + list_, tl.sum(inside, 0))
        x = load_logits(logits_ptr + column + PART, column + PART < tl.minimum((start + repeat) * PART, vocab))


def launch_filters(
    logits: Tensor, peaks: Tensor, parameters: tuple[Tensor, ...], stats: Tensor,
    index: Tensor | None, copy: Tensor | None = None, zeros: Tensor | None = None,
) -> None:  # fmt: skip
    """See `filter_rows`; parameters: temperature, top_k, top_p, min_p [J]; stats [R, 4].

    copy: [R, V] of any row stride, gets the logits of the rows with temperature > 0, a NaN as -infinity. zeros: [R]
        int32, set to 0 for these rows, for the kernel after it.
    """
    rows, vocab = len(stats), logits.shape[1]
    per, options = rows // len(parameters[0]), dependent_launch(logits.device)
    parts = triton.cdiv(vocab, _PART)
    inputs = (logits, peaks, index, *parameters)
    sizes = {
        "vocab": vocab,
        "parts": parts,
        "row_stride": logits.stride(0),
        "peak_stride": peaks.stride(0),
        "per": per,
        "PART": _PART,
        "PARTS": triton.next_power_of_2(parts),
    }
    state = stats.new_empty(2, rows, STATE.value)
    first, second = (
        (stats.new_empty(rows, parts, width), stats.new_empty(rows, width)) for width in (COLUMNS.value, _SECOND)
    )
    counts = stats.new_empty(rows, parts, dtype=torch.int32)
    listed = logits.new_empty(rows, parts, _PART // _LISTED)
    repeat = max(1, rows * parts // _PROGRAMS)  # what a program computes of a part does not depend on it
    grid = (rows, triton.cdiv(parts, repeat))
    for level, also, found, made in ((0, copy, (None, None), first), (1, None, first, second)):
        _sums_kernel[grid](
            *inputs, also, *found, *made, state, repeat=repeat, **sizes, LEVEL=level, WIDTH=made[1].shape[1],
            TILE=_SUMS_TILE, copy_stride=0 if also is None else also.stride(0), num_warps=_SUMS_WARPS, **options,
        )  # fmt: skip
    _list_kernel[grid](
        *inputs, *second, state, counts, listed, repeat=repeat, **sizes, WIDTH=_SECOND, CAPACITY=listed.shape[2],
        num_warps=_LIST_WARPS, **options,
    )  # fmt: skip
    tile = max(min(_SHARE * sizes["PARTS"], _TILE), sizes["PARTS"])
    settle_kernel[(rows,)](
        *inputs, first[0], state, counts, listed, stats, zeros, **sizes, stats_stride=stats.stride(0),
        SHIFT=_SHIFT[logits.dtype], CAPACITY=listed.shape[2], TILE=tile,
        num_warps=min(max(tile // 512, 4), 16), **options,
    )  # fmt: skip
