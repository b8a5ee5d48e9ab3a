"""Attention of short queries over pages as one Triton kernel. Imported on CUDA only.

A program serves one KV head of one row: all query heads of it, of all the row's tokens, in one tile, which reads every
key once. Where that would leave multiprocessors idle, or one long row would keep the others waiting, the keys of a row
are split among several programs (split-KV): each leaves its part of the sum in float32, and the last one of a row adds
the parts up. Nothing is planned: every program finds its row and its part from the pages of all rows.

Queries see the keys up to their own. Those of layers that are not causal see all of their row's, or, with a window,
those less than `window` positions from their own on either side.

Where rows share their leading pages, these may have been attended before (`attention.cascade.kernel`): then a row's
keys are those after them, and its first part begins with the sums that are there already.

Letters in the kernel: M query rows of the tile (TILE_QUERIES: tokens times the query heads of one KV head), N keys of a
tile (TILE_KEYS), D head dimension (DIM).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from attention.cache.kv_cache import LayerKV
from attention.checking import CHECKS, require
from attention.kernels.launch import dependent_launch, wait_for_predecessor
from attention.kernels.tiles import (
    attend_tile,
    counts_of,
    ended,
    key_places,
    load_where,
    no_keys,
    row_keys,
    rows_at,
    sum_where,
)
from attention.spec import AttentionSpec

_FAR_AHEAD_BYTES = 150_000
"""Shared memory for two tiles of 128 keys and values with 128 numbers each, and 32 queries."""
_MOST_EACH, _MOST_HEADS, _FEWEST_ROWS = 4, 256, 16


@dataclass(frozen=True)
class Tiling:
    """How the keys of a batch are gone through.

    Attributes:
        keys: keys of a tile; warps: per program; stages: pipeline stages of the loop over tiles.
        each: programs per multiprocessor that a long enough batch is split into; least_keys: fewest keys of a part.
    """

    keys: int
    warps: int
    stages: int
    each: int
    least_keys: int


def tiling(units: int, width: int, dim: int, multiprocessors: int, shared_bytes: int) -> Tiling:
    """The tiling for `units` (rows times KV heads), with tiles of `width` queries and heads of `dim` numbers.

    Few units: one program a multiprocessor, which reads far ahead where it has the memory: the best of a hundred
    choices on an H200 or near it (32 query heads over 8, one row of 640 keys and 4 tokens: 7.1 µs, FlashInfer 10.4).

    More units, tiles of 16 queries: at most 96 KiB of keys and values in flight in a program, so that two run on a
    multiprocessor (with 128 KiB one ran alone), and up to four shares each, so that none is left with a long one. A
    decode of 32 rows of 2,048 keys, 4 query heads a KV head: 70.4 µs, with 128 keys and two shares 86.7, FlashInfer's
    fa2 68.9. As fa2 is at most 4 % faster and has to be planned, a decode takes this kernel wherever it serves the
    layer.

    >>> tiling(32 * 8, 16, 128, 132, 232_448)
    Tiling(keys=64, warps=2, stages=4, each=4, least_keys=256)
    """
    if width > 32:  # blocks of drafts; compiled without spilling registers, and not measured
        return Tiling(64, 8, 5, 1 if units <= multiprocessors else 2, 128)
    if units <= multiprocessors:
        return Tiling(128, 4, 5 if shared_bytes >= _FAR_AHEAD_BYTES else 3, 1, 128)
    if width <= 16 and dim > 64:
        return Tiling(64, 2, 4, _MOST_EACH, 256)
    if units < 4 * multiprocessors:
        return Tiling(128, 4, 3, _MOST_EACH, 256) if width <= 16 else Tiling(64, 4, 5, 2, 256)
    return Tiling(32, 2, 5, _MOST_EACH, 256)


@dataclass(frozen=True)
class PrefixTiling:
    """How the keys that rows share are gone through, before the rows' own.

    Attributes:
        queries, keys: size of a tile; warps: per program.
        stages: pipeline stages of the loop over tiles of keys. Up to 4 nothing is loaded while a tile is computed,
            because the page numbers must be there first: the compiler loads the next tile after it. 5 load one tile
            ahead, 7 two.
        each: programs that a multiprocessor runs concurrently; key_ns: time in which each computes one key.
        parts: number of parts that enough shared keys are split into; least_keys: fewest keys of one, in whole tiles.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    each: int
    key_ns: float
    parts: int
    least_keys: int


@dataclass(frozen=True)
class SharedKeys:
    """The pages that the rows of a batch share, on the device, and the buffers for the sums over them.

    Attributes:
        pages: [B] int32, the leading pages that a row shares with others: the same number n for all rows that share
            any, 0 for the others; n is taken from the first of these. Every query of these rows sees all of them.
        sums: [parts, T, Hq, D] float32, and stats: [parts, T, Hq, 2] float32, maximum and sum of weights; any content.
        tiling: how they are gone through.
    """

    pages: Tensor
    sums: Tensor
    stats: Tensor
    tiling: PrefixTiling


@triton.jit
def prefix_share(keys, parts, TILE_KEYS: constexpr, LEAST_KEYS: constexpr):  # type: ignore[no-untyped-def]
    """Shared keys of each part, in whole tiles."""
    return tl.maximum(tl.cdiv(tl.cdiv(keys, parts), TILE_KEYS) * TILE_KEYS, LEAST_KEYS)


@dataclass(frozen=True)
class Scratch:
    """Buffers for partial sums of a row's programs, on one device. One launch at a time may use them.

    Attributes:
        sums, stats: float32, of any content. arrived: int32, zeros between launches.
        multiprocessors, shared_bytes: see `tiling`.
    """

    sums: Tensor
    stats: Tensor
    arrived: Tensor
    multiprocessors: int
    shared_bytes: int

    @classmethod
    def on(cls, device: torch.device, most_queries: int, most_dim: int) -> Scratch:
        """Buffers for `most_queries` queries (a row's tokens times query heads per KV head) of width `most_dim`."""
        multiprocessors, shared_bytes = _facts(device)
        places = _MOST_HEADS + 2 * _MOST_EACH * multiprocessors
        new, width = partial(torch.empty, dtype=torch.float32, device=device), _width(most_queries)
        sums, stats = (new(places * width * each) for each in (most_dim, 2))
        return cls(sums, stats, torch.zeros(places, dtype=torch.int32, device=device), multiprocessors, shared_bytes)


def _facts(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory of a program at most."""
    if device.type != "cuda":
        return 1, 0
    index = torch.cuda.current_device() if device.index is None else device.index
    facts = triton.runtime.driver.active.utils.get_device_properties(index)
    return facts["multiprocessor_count"], facts["max_shared_mem"]


def _width(queries: int) -> int:
    return max(16, 1 << (queries - 1).bit_length())


@triton.jit
def _place_of(  # type: ignore[no-untyped-def]
    page_indptr_ptr, shared_ptr,
    rows, program, wanted,
    LEAST_PAGES: constexpr, ROWS: constexpr, CASCADE: constexpr,
):  # fmt: skip
    """page_indptr [B+1], shared [B] -> the row of a program, its number of parts, which of them is the program's, and
    how many parts the rows before have that are in several parts; B for a program too many.

    A share is the number of pages per program if all pages were divided evenly among `wanted` programs; a row has one
    part for every share of its pages, rounded. So at most B + wanted parts exist, and at most 2 · wanted in rows that
    have several.
    """
    index = tl.arange(0, ROWS)  # [ROWS]
    pages = counts_of(page_indptr_ptr, index, rows)  # [ROWS]
    if CASCADE:
        pages -= load_where(shared_ptr + index, index < rows)
    share = tl.maximum(tl.cdiv(tl.sum(pages, 0), wanted), LEAST_PAGES)
    parts = tl.where(index < rows, tl.maximum((2 * pages + share) // (2 * share), 1), 0)  # [ROWS]
    row = ended(parts, program)
    before, own = index < row, index == row  # [ROWS]
    part = program - sum_where(parts, before)
    row = tl.where(row < ROWS, row, rows)
    return row, sum_where(parts, own), part, sum_where(parts, before & (parts > 1))


@triton.jit
def _added(m, l, acc, m_of, l_of, sums):  # type: ignore[no-untyped-def]  # noqa: E741
    """Two parts of a sum as one: maxima and sums of weights [M], weighted sums of values [M, D]."""
    m_new = tl.maximum(m, m_of)
    kept, added = tl.exp2(m - m_new), tl.exp2(m_of - m_new)  # [M]; 0 for keys that no query sees
    return m_new, l * kept + l_of * added, acc * kept[:, None] + sums * added[:, None]


# Not specialised: Triton would compile variants for 1 and for multiples of 16, in the middle of serving.
@triton.jit(do_not_specialize=["rows", "wanted", "window"])
def _packed_kernel(  # type: ignore[no-untyped-def]
    query_ptr,  # [B·query_len, Hq, D]
    keys_ptr,  # [pages, page_size, Hkv, D], or [pages, Hkv, page_size, D]: see the strides
    values_ptr,  # as keys
    out_ptr,  # [B·query_len, Hq, D] contiguous
    page_indices_ptr,  # [sum of the rows' pages] int32
    page_indptr_ptr,  # [B+1] int32
    last_page_len_ptr,  # [B] int32
    shared_ptr,  # [B] int32, see `SharedKeys`, as the next two
    prefix_sums_ptr, prefix_stats_ptr,
    sums_ptr,  # [places, M, D] float32: parts of the weighted sum of values
    stats_ptr,  # [places, 2, M] float32: their maxima and sums of weights
    arrived_ptr,  # [places] int32: parts that are done, at the first one's place; zeros between launches
    scale_log2, query_len, query_token, query_head, page_stride, slot_stride, head_stride, rows, wanted,
    window,
    QUERY_HEADS: constexpr, KV_HEADS: constexpr, DIM: constexpr, PAGE_SIZE: constexpr,
    TILE_QUERIES: constexpr, TILE_KEYS: constexpr, LEAST_PAGES: constexpr, ROWS: constexpr,
    STAGES: constexpr, CASCADE: constexpr, PREFIX_PARTS: constexpr, PREFIX_TILE: constexpr,
    PREFIX_LEAST: constexpr, CAUSAL: constexpr, WINDOWED: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    GROUP: constexpr = QUERY_HEADS // KV_HEADS
    kv_head = tl.program_id(0)
    row, parts, part, places = _place_of(
        page_indptr_ptr, shared_ptr, rows, tl.program_id(1), wanted, LEAST_PAGES, ROWS, CASCADE
    )
    if row >= rows:
        return
    packed, column, key_at = tl.arange(0, TILE_QUERIES), tl.arange(0, DIM), tl.arange(0, TILE_KEYS)
    token, head = packed // GROUP, kv_head * GROUP + packed % GROUP  # [M], [M]
    own = (token < query_len)[:, None]  # [M, 1]
    place = row.to(tl.int64) * query_len + token  # [M] row of query and out
    to = out_ptr + (place * QUERY_HEADS + head)[:, None] * DIM + column[None, :]  # [M, D]
    first_page, length = row_keys(page_indptr_ptr, last_page_len_ptr, row, PAGE_SIZE)
    before = 0  # keys that were attended before
    if CASCADE:
        shared = tl.load(shared_ptr + row)
        first_page += shared
        before = shared * PAGE_SIZE
        length -= before
    unseen = 0  # keys in front of all windows, in whole tiles
    if WINDOWED:
        unseen = tl.maximum(length - query_len + 1 - window, 0) // TILE_KEYS * TILE_KEYS
    share = tl.cdiv(tl.cdiv(length - unseen, parts), TILE_KEYS) * TILE_KEYS
    begin, parts = unseen + part * share, tl.cdiv(length - unseen, share)  # in whole tiles there may be fewer parts
    if part >= parts:
        return
    query_at = place * query_token + head * query_head  # [M]
    q = rows_at(query_ptr, query_at, column, own)  # [M, D]
    own_key = length - query_len + token  # [M] the position of each query
    last_key = own_key if CAUSAL else tl.zeros_like(own_key) + length  # [M] the last one that it sees
    if WINDOWED:
        last_key = own_key + (window - 1)
    m, l, acc = no_keys(TILE_QUERIES, DIM)  # noqa: E741
    if CASCADE:  # noqa: SIM102  # one is known to the compiler
        if (part == 0) & (before > 0):
            share_before = prefix_share(before, PREFIX_PARTS, PREFIX_TILE, PREFIX_LEAST)
            left_keys = tl.where(token < query_len, before, 0)  # [M]
            for other in tl.static_range(PREFIX_PARTS):  # unrolled, so that one load does not wait for the other
                left_at = (other * rows * query_len + place) * QUERY_HEADS + head  # [M] int64
                stats = prefix_stats_ptr + left_at * 2  # [M]
                is_left = left_keys > other * share_before  # [M]
                m_of = tl.load(stats, mask=is_left, other=-1e30, cache_modifier=".cg")  # [M]
                l_of = tl.load(stats + 1, mask=is_left, other=0.0, cache_modifier=".cg")  # [M]
                left = prefix_sums_ptr + left_at[:, None] * DIM + column[None, :]  # [M, D]
                sums = tl.load(left, mask=is_left[:, None], other=0.0, cache_modifier=".cg")  # [M, D]
                m, l, acc = _added(m, l, acc, m_of, l_of, sums)  # noqa: E741
    for start in tl.range(begin, tl.minimum(begin + share, length), TILE_KEYS, num_stages=STAGES):
        position = start + key_at  # [N]
        inside = position < length  # [N]
        at = key_places(page_indices_ptr, first_page, position, inside, page_stride, slot_stride, PAGE_SIZE)
        at += kv_head * head_stride  # [N]
        k = rows_at(keys_ptr, at, column, inside[:, None])  # [N, D]
        v = rows_at(values_ptr, at, column, inside[:, None])  # [N, D]
        s = tl.dot(q, k.T) * scale_log2  # [M, N]
        visible = position[None, :] <= last_key[:, None]  # [M, N]
        if WINDOWED:
            visible &= position[None, :] > (own_key - window)[:, None]
        if not CAUSAL:
            visible &= inside[None, :]
        s = tl.where(visible, s, -1e30)
        m, l, acc = attend_tile(s, v, m, l, acc)  # noqa: E741
    arrived = parts - 1
    if parts > 1:
        first_place = (places * KV_HEADS + kv_head).to(tl.int64)  # a part's places lie KV_HEADS apart
        sums_at = sums_ptr + packed[:, None] * DIM + column[None, :]  # [M, D]
        stats_at = stats_ptr + packed  # [M]
        own_place = first_place + part * KV_HEADS
        tl.store(sums_at + own_place * TILE_QUERIES * DIM, acc)
        tl.store(stats_at + own_place * 2 * TILE_QUERIES, m)
        tl.store(stats_at + (own_place * 2 + 1) * TILE_QUERIES, l)
        tl.debug_barrier()  # all threads have written before the counter below goes up
        # acq_rel: releases this part's stores, and acquires the others' for the program that arrives last.
        arrived = tl.atomic_add(arrived_ptr + first_place, 1, sem="acq_rel", scope="gpu")
        if arrived == parts - 1:
            m, l, acc = no_keys(TILE_QUERIES, DIM)  # noqa: E741
            for other in range(parts):
                other_place = first_place + other * KV_HEADS
                # .cg: from L2, because other multiprocessors wrote these and L1 caches are not coherent.
                m_of = tl.load(stats_at + other_place * 2 * TILE_QUERIES, cache_modifier=".cg")  # [M]
                l_of = tl.load(stats_at + (other_place * 2 + 1) * TILE_QUERIES, cache_modifier=".cg")  # [M]
                sums = tl.load(sums_at + other_place * TILE_QUERIES * DIM, cache_modifier=".cg")  # [M, D]
                m, l, acc = _added(m, l, acc, m_of, l_of, sums)  # noqa: E741
            # Back to zero, as the next launch expects it.
            tl.store(arrived_ptr + first_place, 0)
    if arrived == parts - 1:
        tl.store(to, acc / l[:, None], mask=own)


def launch_packed(
    query: Tensor, layer: LayerKV, key: AttentionSpec, page_indptr: Tensor, page_indices: Tensor,
    last_page_len: Tensor, out: Tensor, scratch: Scratch, query_len: int, shared: SharedKeys | None = None,
) -> None:  # fmt: skip
    """Attend B rows with `query_len` tokens each. A causal `key` has no window.

    Args:
        query: [B·query_len, Hq, D], the last dimension contiguous, and out: the same, contiguous; anything may follow.
        page_indptr: [B+1] int32; page_indices: int32, the pages of all rows; last_page_len: [B] int32.
        scratch: buffers for this many queries per row.
        shared: pages that `attention.cascade.kernel.launch_prefix` has attended just before; None without them.
    """
    rows = len(last_page_len)
    pages, (slot, head) = layer.keys, layer.slot_and_head
    if CHECKS.on:
        require(len(query) >= rows * query_len, f"{len(query)} tokens are no {rows} rows of {query_len}")
        require(query.stride(-1) == 1 and out.is_contiguous(), "query or out has gaps")
        require(pages.stride() == layer.values.stride(), "keys and values lie differently")
    heads, width = key.num_kv_heads, _width(query_len * key.group_size)
    tiles = tiling(rows * heads, width, key.head_dim_k, scratch.multiprocessors, scratch.shared_bytes)
    wanted = max(1, tiles.each * scratch.multiprocessors // heads)
    if CHECKS.on:
        require(len(scratch.arrived) >= 2 * wanted * heads, "too little room for the parts of rows")
    _packed_kernel[(heads, rows + wanted)](
        query, pages, layer.values, out, page_indices, page_indptr, last_page_len,
        page_indptr if shared is None else shared.pages, scratch.sums if shared is None else shared.sums,
        scratch.stats if shared is None else shared.stats, scratch.sums, scratch.stats, scratch.arrived,
        key.scale * math.log2(math.e), query_len, query.stride(0), query.stride(1), pages.stride(0), pages.stride(slot),
        pages.stride(head), rows, wanted, key.window or 0, QUERY_HEADS=key.num_q_heads, KV_HEADS=key.num_kv_heads,
        DIM=key.head_dim_k, PAGE_SIZE=pages.shape[slot], TILE_QUERIES=width, TILE_KEYS=tiles.keys,
        LEAST_PAGES=max(1, tiles.least_keys // pages.shape[slot]), ROWS=max(_FEWEST_ROWS, triton.next_power_of_2(rows)),
        STAGES=tiles.stages, CASCADE=shared is not None, PREFIX_PARTS=1 if shared is None else shared.tiling.parts,
        PREFIX_TILE=1 if shared is None else shared.tiling.keys,
        PREFIX_LEAST=1 if shared is None else shared.tiling.least_keys, CAUSAL=key.causal,
        WINDOWED=key.window is not None, num_warps=tiles.warps,
        **dependent_launch(query.device),
    )  # fmt: skip
