"""Attention of many rows' queries over the pages that they share, as one Triton kernel. Imported on CUDA only.

The tokens of all rows, times the query heads of a KV head, are tiles of queries that see every key of the shared
pages. A tile's keys are split among several programs, so that the GPU is full; each leaves its part of the sum in
float32, and `attention.kernels.packed_kernel` begins with these where it attends a row's own pages.

How many pages are shared, and by which rows, is read on the device: a captured graph serves any prefix. Without shared
pages the programs end after one load.

Letters in the kernel: M query rows of the tile, N keys of a tile, D head dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention.cache.kv_cache import LayerKV
from attention.kernels.launch import dependent_launch, wait_for_predecessor
from attention.kernels.tiles import attend_tile, key_places
from attention.spec import AttentionSpec

_MOST_PARTS, _LEAST_KEYS = 8, 512
"""A part's sums are read one after the other where a row begins; 512 keys take a program about as long as that."""
_FEWEST_ROWS = 16


@dataclass(frozen=True)
class PrefixTile:
    """What a program works on, in the order of `_TILES`.

    Attributes:
        from_queries: least queries of a KV head for which it is used. shared_bytes: shared memory that it needs.
        queries, keys: size of a tile; warps: per program.
        stages: pipeline stages of the loop over tiles of keys. Up to 4 nothing is loaded while a tile is computed,
            because the page numbers must be there first: the compiler loads the next tile after it. 5 load one tile
            ahead, 7 two.
        each: programs that a multiprocessor runs concurrently; key_ns: time in which each computes one key.
    """

    from_queries: int
    shared_bytes: int
    queries: int
    keys: int
    warps: int
    stages: int
    each: int
    key_ns: float


_TILES = (
    PrefixTile(512, 132_096, 128, 64, 8, 5, 1, 22.6),
    PrefixTile(0, 115_200, 64, 64, 4, 5, 2, 25.3),
    PrefixTile(0, 0, 64, 64, 4, 3, 2, 28.6),
)
"""The first that fits is taken: more queries first, then more memory. Chosen of 27 tiles on an H200, 32 rows of 2,048
shared keys, 1, 4 and 6 tokens; `key_ns` is fitted to 54 measured cases, of the last entry to 54 others (see
`attention.backends.flashinfer.shared_pages`)."""


@dataclass(frozen=True)
class PrefixTiling:
    """Number of parts that enough shared keys are split into, and the fewest keys of a part, in whole tiles."""

    tile: PrefixTile
    parts: int
    least_keys: int


def prefix_tiling(queries: int, heads: int, multiprocessors: int, shared_bytes: int) -> PrefixTiling:
    """The tiling for this many queries of each of `heads` KV heads: as many parts as programs run concurrently.

    >>> [prefix_tiling(rows * q * 4, 8, 132, 232_448).parts for rows, q in ((32, 6), (32, 1), (128, 8))]
    [2, 8, 1]
    >>> [prefix_tiling(queries, 8, 132, 232_448).tile.queries for queries in (128, 768)]
    [64, 128]
    >>> prefix_tiling(128, 8, 132, 101_376).tile.stages
    3
    """
    tile = next(t for t in _TILES if queries >= t.from_queries and shared_bytes >= t.shared_bytes)
    programs = -(-queries // tile.queries) * heads
    return PrefixTiling(tile, max(1, min(_MOST_PARTS, tile.each * multiprocessors // programs)), _LEAST_KEYS)


@dataclass(frozen=True)
class SharedKeys:
    """The pages that the rows of a batch share, on the device, and the buffers for the sums over them.

    Attributes:
        pages: [B] int32, the leading pages that a row shares with others: the same number n for all rows that share
            any, 0 for the others; n is taken from the first of these. Every query of these rows sees all of them.
        sums: [parts, T, Hq, D] float32, and stats: [parts, T, Hq, 2] float32, maximum and sum of weights; any content.
        tiling: see `prefix_tiling`.
    """

    pages: torch.Tensor
    sums: torch.Tensor
    stats: torch.Tensor
    tiling: PrefixTiling


@triton.jit
def prefix_share(keys, parts, TILE_KEYS: tl.constexpr, LEAST_KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys of each part, in whole tiles."""
    return tl.maximum(tl.cdiv(tl.cdiv(keys, parts), TILE_KEYS) * TILE_KEYS, LEAST_KEYS)


# Not specialised: Triton would compile variants for 1 and for multiples of 16, in the middle of serving.
@triton.jit(do_not_specialize=["rows", "tokens"])
def _prefix_kernel(  # type: ignore[no-untyped-def]
    query_ptr,  # [T, Hq, D]
    keys_ptr,  # [pages, page_size, Hkv, D], or [pages, Hkv, page_size, D]: see the strides
    values_ptr,  # as keys
    page_indices_ptr,  # [sum of the rows' pages] int32
    page_indptr_ptr,  # [B+1] int32
    shared_ptr,  # [B] int32
    sums_ptr,  # [parts, T, Hq, D] float32
    stats_ptr,  # [parts, T, Hq, 2] float32
    scale_log2, query_len, query_token, query_head, page_stride, slot_stride, head_stride, rows, tokens,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TILE_QUERIES: tl.constexpr, TILE_KEYS: tl.constexpr, LEAST_KEYS: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    GROUP: tl.constexpr = QUERY_HEADS // KV_HEADS
    index = tl.arange(0, ROWS)
    shared = tl.load(shared_ptr + index, mask=index < rows, other=0)  # [ROWS]
    length = tl.max(shared, 0) * PAGE_SIZE
    share = prefix_share(length, tl.num_programs(2), TILE_KEYS, LEAST_KEYS)
    kv_head, part = tl.program_id(0), tl.program_id(2)
    begin = part * share
    if begin >= length:
        return
    packed = tl.program_id(1) * TILE_QUERIES + tl.arange(0, TILE_QUERIES)  # [M]
    column, key_at = tl.arange(0, DIM), tl.arange(0, TILE_KEYS)
    token, head = (packed // GROUP).to(tl.int64), kv_head * GROUP + packed % GROUP  # [M], [M]
    own = token < tokens  # [M]
    own = own & (tl.load(shared_ptr + token // query_len, mask=own, other=0) > 0)
    if tl.max(own.to(tl.int32), 0) == 0:
        return
    first_page = tl.load(page_indptr_ptr + tl.min(tl.where(shared > 0, index, ROWS), 0))
    query_at = token * query_token + head * query_head  # [M]
    q = tl.load(query_ptr + query_at[:, None] + column[None, :], mask=own[:, None], other=0.0)  # [M, D]
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
        s = tl.where(inside[None, :], s, -1e30)
        m, l, acc = attend_tile(s, v, m, l, acc)  # noqa: E741
    place = (part.to(tl.int64) * tokens + token) * QUERY_HEADS + head  # [M]
    tl.store(sums_ptr + place[:, None] * DIM + column[None, :], acc, mask=own[:, None])
    tl.store(stats_ptr + place * 2, m, mask=own)
    tl.store(stats_ptr + place * 2 + 1, l, mask=own)


def sum_shapes(key: AttentionSpec, tokens: int, tiling: PrefixTiling) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of `SharedKeys.sums` and `SharedKeys.stats`, for a batch of this many tokens."""
    places = (tiling.parts, tokens, key.num_q_heads)
    return (*places, key.head_dim_v), (*places, 2)


def launch_prefix(
    query: torch.Tensor, layer: LayerKV, key: AttentionSpec, page_indptr: torch.Tensor, page_indices: torch.Tensor,
    shared: SharedKeys, query_len: int,
) -> None:  # fmt: skip
    """Attend the shared pages; `packed_kernel.launch_packed` with the same arguments attends the others."""
    rows, tiling = len(shared.pages), shared.tiling
    tile = tiling.tile
    tokens = rows * query_len
    queries = tokens * (key.num_q_heads // key.num_kv_heads)
    pages, (slot, head) = layer.keys, layer.slot_and_head
    _prefix_kernel[(key.num_kv_heads, triton.cdiv(queries, tile.queries), tiling.parts)](
        query, pages, layer.values, page_indices, page_indptr, shared.pages, shared.sums, shared.stats,
        key.scale * math.log2(math.e), query_len, query.stride(0), query.stride(1), pages.stride(0), pages.stride(slot),
        pages.stride(head), rows, tokens, QUERY_HEADS=key.num_q_heads, KV_HEADS=key.num_kv_heads, DIM=key.head_dim_k,
        PAGE_SIZE=pages.shape[slot], TILE_QUERIES=tile.queries, TILE_KEYS=tile.keys, LEAST_KEYS=tiling.least_keys,
        ROWS=max(_FEWEST_ROWS, triton.next_power_of_2(rows)), STAGES=tile.stages, num_warps=tile.warps,
        **dependent_launch(query.device),
    )  # fmt: skip
