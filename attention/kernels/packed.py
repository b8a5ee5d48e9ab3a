"""Attention of short queries over pages as one Triton kernel. Imported on CUDA only.

A program serves one KV head of one row: all query heads of it, of all the row's tokens, in one tile, which reads every
key once. Where that would leave multiprocessors idle, or one long row would keep the others waiting, the keys of a row
are split among several programs (split-KV): each leaves its part of the sum in float32, and the last one of a row adds
the parts up. Nothing is planned: a program finds its share from the row's length.

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

from attention.cache.kv_cache import LayerKV
from attention.checking import checking, require
from attention.kernels.pdl import dependent_launch, wait_for_predecessor
from attention.kernels.tiles import attend_tile, key_places, row_keys
from attention.spec import AttentionSpec

_MOST_PARTS = 1024
_FAR_AHEAD_BYTES = 150_000
"""Shared memory for two tiles of 128 keys and values with 128 numbers each, and 32 queries."""


@dataclass(frozen=True)
class Tiling:
    """How the keys of a row are gone through.

    Attributes:
        keys: of a tile; warps: of a program; stages: of the loop over tiles.
        splits: parts of a row at most; least_keys: of a part.
    """

    keys: int
    warps: int
    stages: int
    splits: int
    least_keys: int


def tiling(units: int, multiprocessors: int, shared_bytes: int = 200_000) -> Tiling:
    """The tiling for so many rows times KV heads.

    Few units: one program a multiprocessor, which reads far ahead where it has the memory. More: two and more of them
    each, and the longest rows split.

    Args:
        units: rows times KV heads; multiprocessors, and shared_bytes of a program at most: of the device.

    >>> [tiling(8 * rows, 132).splits for rows in (1, 8, 16, 32, 128)]
    [16, 2, 1, 4, 1]
    """
    if units <= multiprocessors:
        stages = 5 if shared_bytes >= _FAR_AHEAD_BYTES else 3
        return Tiling(128, 4, stages, 1 << (multiprocessors // units).bit_length() - 1, 128)
    splits = 4 if 4 * units <= _MOST_PARTS else 1
    return Tiling(64, 2, 5, splits, 384) if units < 4 * multiprocessors else Tiling(32, 2, 5, splits, 384)


@dataclass(frozen=True)
class Scratch:
    """Where the programs of a row leave their parts, on one device. One launch at a time may use it.

    Attributes:
        sums, stats: float32, of any content. arrived: int32, zeros between launches.
        multiprocessors, shared_bytes: see `tiling`.
    """

    sums: torch.Tensor
    stats: torch.Tensor
    arrived: torch.Tensor
    multiprocessors: int
    shared_bytes: int

    @classmethod
    def on(cls, device: torch.device, most_queries: int, most_dim: int) -> Scratch:
        """For up to `most_queries` query heads of a KV head times tokens of a row, of up to `most_dim` numbers each."""
        new, width = partial(torch.empty, dtype=torch.float32, device=device), _width(most_queries)
        sums, stats = (new(_MOST_PARTS * width * each) for each in (most_dim, 2))
        arrived = torch.zeros(_MOST_PARTS, dtype=torch.int32, device=device)
        if device.type != "cuda":
            return cls(sums, stats, arrived, 1, 0)
        facts = triton.runtime.driver.active.utils.get_device_properties(sums.device.index)
        return cls(sums, stats, arrived, facts["multiprocessor_count"], facts["max_shared_mem"])


def _width(queries: int) -> int:
    return max(16, 1 << (queries - 1).bit_length())


@triton.jit
def _share(length, TILE_KEYS: tl.constexpr, SPLITS: tl.constexpr, LEAST_KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys of each part of a row, in whole tiles."""
    parts = tl.minimum(SPLITS, tl.maximum(length // LEAST_KEYS, 1))
    return tl.cdiv(tl.cdiv(length, parts), TILE_KEYS) * TILE_KEYS


@triton.jit
def _packed_kernel(  # type: ignore[no-untyped-def]
    query_ptr,  # [B·query_len, Hq, D]
    keys_ptr,  # [pages, page_size, Hkv, D], or [pages, Hkv, page_size, D]: see the strides
    values_ptr,  # as keys
    out_ptr,  # [B·query_len, Hq, D] contiguous
    page_indices_ptr,  # [sum of the rows' pages] int32
    page_indptr_ptr,  # [B+1] int32
    last_page_len_ptr,  # [B] int32
    sums_ptr,  # [B·Hkv, SPLITS, M, D] float32: parts of the weighted sum of values
    stats_ptr,  # [B·Hkv, SPLITS, 2, M] float32: their maxima and sums of weights
    arrived_ptr,  # [B·Hkv] int32: parts that are done; zeros between launches
    scale_log2,
    query_len,
    query_token,
    query_head,
    page_stride,
    slot_stride,
    head_stride,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST_KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_predecessor(DEPENDENT)
    GROUP: tl.constexpr = QUERY_HEADS // KV_HEADS
    unit, part = tl.program_id(0), tl.program_id(1)
    row, kv_head = unit // KV_HEADS, unit % KV_HEADS
    packed, column, key_at = tl.arange(0, TILE_QUERIES), tl.arange(0, DIM), tl.arange(0, TILE_KEYS)
    token, head = packed // GROUP, kv_head * GROUP + packed % GROUP  # [M], [M]
    own = (token < query_len)[:, None]  # [M, 1]
    place = row.to(tl.int64) * query_len + token  # [M] row of query and out
    to = out_ptr + (place * QUERY_HEADS + head)[:, None] * DIM + column[None, :]  # [M, D]
    first_page, length = row_keys(page_indptr_ptr, last_page_len_ptr, row, PAGE_SIZE)
    share = _share(length, TILE_KEYS, SPLITS, LEAST_KEYS)
    begin, parts = part * share, tl.cdiv(length, share)
    if part >= parts:
        return
    query_at = place * query_token + head * query_head  # [M]
    q = tl.load(query_ptr + query_at[:, None] + column[None, :], mask=own, other=0.0)  # [M, D]
    last_key = length - query_len + token  # [M] the last position that each query sees
    m = tl.full((TILE_QUERIES,), -1e30, tl.float32)  # [M] running maximum; finite, so that m - m_new is never NaN
    l = tl.zeros((TILE_QUERIES,), tl.float32)  # noqa: E741  # [M] running sum of weights
    acc = tl.zeros((TILE_QUERIES, DIM), tl.float32)  # [M, D] running weighted sum of values
    for start in tl.range(begin, tl.minimum(begin + share, length), TILE_KEYS, num_stages=STAGES):
        position = start + key_at  # [N]
        inside = position < length  # [N]
        at = key_places(page_indices_ptr, first_page, position, inside, page_stride, slot_stride, PAGE_SIZE)
        at += kv_head * head_stride  # [N]
        k = tl.load(keys_ptr + at[:, None] + column[None, :], mask=inside[:, None], other=0.0)  # [N, D]
        v = tl.load(values_ptr + at[:, None] + column[None, :], mask=inside[:, None], other=0.0)  # [N, D]
        s = tl.dot(q, k.T) * scale_log2  # [M, N]
        s = tl.where(position[None, :] <= last_key[:, None], s, -1e30)
        m, l, acc = attend_tile(s, v, m, l, acc)  # noqa: E741
    arrived = parts - 1
    if SPLITS > 1:  # noqa: SIM102 (known when the kernel is compiled)
        if parts > 1:
            first_part = unit.to(tl.int64) * SPLITS
            sums_at = sums_ptr + packed[:, None] * DIM + column[None, :]  # [M, D]
            stats_at = stats_ptr + packed  # [M]
            tl.store(sums_at + (first_part + part) * TILE_QUERIES * DIM, acc)
            tl.store(stats_at + (first_part + part) * 2 * TILE_QUERIES, m)
            tl.store(stats_at + ((first_part + part) * 2 + 1) * TILE_QUERIES, l)
            tl.debug_barrier()  # all threads have written before one of them says so
            arrived = tl.atomic_add(arrived_ptr + unit, 1, sem="acq_rel", scope="gpu")
            if arrived == parts - 1:
                m = tl.full((TILE_QUERIES,), -1e30, tl.float32)
                l = tl.zeros((TILE_QUERIES,), tl.float32)  # noqa: E741
                acc = tl.zeros((TILE_QUERIES, DIM), tl.float32)
                for other in range(parts):
                    at_sums = sums_at + (first_part + other) * TILE_QUERIES * DIM
                    at_stats = stats_at + (first_part + other) * 2 * TILE_QUERIES
                    m_of = tl.load(at_stats, cache_modifier=".cg")  # [M]
                    l_of = tl.load(at_stats + TILE_QUERIES, cache_modifier=".cg")  # [M]
                    sums = tl.load(at_sums, cache_modifier=".cg")  # [M, D]
                    m_new = tl.maximum(m, m_of)
                    kept, added = tl.exp2(m - m_new), tl.exp2(m_of - m_new)  # [M]; 0 for keys that no query sees
                    l = l * kept + l_of * added  # noqa: E741
                    acc = acc * kept[:, None] + sums * added[:, None]
                    m = m_new
                tl.store(arrived_ptr + unit, 0)
    if arrived == parts - 1:
        tl.store(to, (acc / l[:, None]).to(out_ptr.dtype.element_ty), mask=own)


def launch_packed(
    query: torch.Tensor,
    layer: LayerKV,
    key: AttentionSpec,
    page_indptr: torch.Tensor,
    page_indices: torch.Tensor,
    last_page_len: torch.Tensor,
    out: torch.Tensor,
    scratch: Scratch,
) -> None:
    """Attend, causally, B rows with equally many tokens each.

    Args:
        query: [B·q, Hq, D], the last dimension contiguous, and out: the same, contiguous.
        page_indptr: [B+1] int32; page_indices: int32, the pages of all rows; last_page_len: [B] int32.
        scratch: for as many queries a row.
    """
    rows = len(last_page_len)
    tokens = len(query) // rows
    pages, (slot, head) = layer.keys, layer.slot_and_head
    if checking():
        require(len(query) == rows * tokens, f"{len(query)} tokens are not {rows} equal rows")
        require(query.stride(-1) == 1 and out.is_contiguous(), "query or out has gaps")
        require(pages.stride() == layer.values.stride(), "keys and values lie differently")
    units, width = rows * key.num_kv_heads, _width(tokens * (key.num_q_heads // key.num_kv_heads))
    tiles = tiling(units, scratch.multiprocessors, scratch.shared_bytes)
    _packed_kernel[(units, tiles.splits)](
        query,
        pages,
        layer.values,
        out,
        page_indices,
        page_indptr,
        last_page_len,
        scratch.sums,
        scratch.stats,
        scratch.arrived,
        key.scale * math.log2(math.e),
        tokens,
        query.stride(0),
        query.stride(1),
        pages.stride(0),
        pages.stride(slot),
        pages.stride(head),
        QUERY_HEADS=key.num_q_heads,
        KV_HEADS=key.num_kv_heads,
        DIM=key.head_dim_k,
        PAGE_SIZE=pages.shape[slot],
        TILE_QUERIES=width,
        TILE_KEYS=tiles.keys,
        SPLITS=tiles.splits,
        LEAST_KEYS=tiles.least_keys,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        **dependent_launch(query.device),
    )
