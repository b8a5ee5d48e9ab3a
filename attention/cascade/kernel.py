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
from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from attention.cache.kv_cache import LayerKV
from attention.kernels.launch import dependent_launch, wait_for_predecessor
from attention.kernels.packed_kernel import PrefixTiling, SharedKeys, prefix_share
from attention.kernels.tiles import attend_tile, block_of, key_places, load_where, no_keys, rows_at
from attention.spec import AttentionSpec

_MOST_PARTS, _LEAST_KEYS = 8, 512
"""A part's sums are read one after the other where a row begins; 512 keys take a program about as long as that."""
_FEWEST_ROWS = 16
_TILINGS = (
    (512, 132_096, PrefixTiling(128, 64, 8, 5, 1, 22.6, _MOST_PARTS, _LEAST_KEYS)),
    (0, 115_200, PrefixTiling(64, 64, 4, 5, 2, 25.3, _MOST_PARTS, _LEAST_KEYS)),
    (0, 0, PrefixTiling(64, 64, 4, 3, 2, 28.6, _MOST_PARTS, _LEAST_KEYS)),
)
"""From how many queries of a KV head, and with how many bytes of shared memory, each is used; the first that fits is
taken. Chosen of 27 tiles on an H200, 32 rows of 2,048 shared keys, 1, 4 and 6 tokens; `key_ns` is fitted to 54 measured
cases, of the last entry to 54 others (see `attention.cascade.page_sharing`)."""


def prefix_tiling(queries: int, heads: int, multiprocessors: int, shared_bytes: int) -> PrefixTiling:
    """The tiling for this many queries of each of `heads` KV heads: as many parts as programs run concurrently.

    >>> [prefix_tiling(rows * q * 4, 8, 132, 232_448).parts for rows, q in ((32, 6), (32, 1), (128, 8))]
    [2, 8, 1]
    >>> [prefix_tiling(queries, 8, 132, 232_448).queries for queries in (128, 768)]
    [64, 128]
    >>> prefix_tiling(128, 8, 132, 101_376).stages
    3
    """
    tiling = next(t for least, nbytes, t in _TILINGS if queries >= least and shared_bytes >= nbytes)
    programs = -(-queries // tiling.queries) * heads
    return replace(tiling, parts=max(1, min(_MOST_PARTS, tiling.each * multiprocessors // programs)))


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
    QUERY_HEADS: constexpr, KV_HEADS: constexpr, DIM: constexpr, PAGE_SIZE: constexpr,
    TILE_QUERIES: constexpr, TILE_KEYS: constexpr, LEAST_KEYS: constexpr, ROWS: constexpr,
    STAGES: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    GROUP: constexpr = QUERY_HEADS // KV_HEADS
    index = tl.arange(0, ROWS)
    shared = load_where(shared_ptr + index, index < rows)  # [ROWS]
    length = tl.max(shared, 0) * PAGE_SIZE
    share = prefix_share(length, tl.num_programs(2), TILE_KEYS, LEAST_KEYS)
    kv_head, part = tl.program_id(0), tl.program_id(2)
    begin = part * share
    if begin >= length:
        return
    packed = block_of(tl.program_id(1), TILE_QUERIES)  # [M]
    column, key_at = tl.arange(0, DIM), tl.arange(0, TILE_KEYS)
    token, head = (packed // GROUP).to(tl.int64), kv_head * GROUP + packed % GROUP  # [M], [M]
    own = token < tokens  # [M]
    own = own & (load_where(shared_ptr + token // query_len, own) > 0)
    if tl.max(own.to(tl.int32), 0) == 0:
        return
    first_page = tl.load(page_indptr_ptr + tl.min(tl.where(shared > 0, index, ROWS), 0))
    query_at = token * query_token + head * query_head  # [M]
    q = rows_at(query_ptr, query_at, column, own[:, None])  # [M, D]
    m, l, acc = no_keys(TILE_QUERIES, DIM)  # noqa: E741
    for start in tl.range(begin, tl.minimum(begin + share, length), TILE_KEYS, num_stages=STAGES):
        position = start + key_at  # [N]
        inside = position < length  # [N]
        at = key_places(page_indices_ptr, first_page, position, inside, page_stride, slot_stride, PAGE_SIZE)
        at += kv_head * head_stride  # [N]
        k = rows_at(keys_ptr, at, column, inside[:, None])  # [N, D]
        v = rows_at(values_ptr, at, column, inside[:, None])  # [N, D]
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
    query: Tensor, layer: LayerKV, key: AttentionSpec, page_indptr: Tensor, page_indices: Tensor,
    shared: SharedKeys, query_len: int,
) -> None:  # fmt: skip
    """Attend the shared pages; `packed_kernel.launch_packed` with the same arguments attends the others."""
    rows, tiling = len(shared.pages), shared.tiling
    tokens = rows * query_len
    queries = tokens * key.group_size
    pages, (slot, head) = layer.keys, layer.slot_and_head
    _prefix_kernel[(key.num_kv_heads, triton.cdiv(queries, tiling.queries), tiling.parts)](
        query, pages, layer.values, page_indices, page_indptr, shared.pages, shared.sums, shared.stats,
        key.scale * math.log2(math.e), query_len, query.stride(0), query.stride(1), pages.stride(0), pages.stride(slot),
        pages.stride(head), rows, tokens, QUERY_HEADS=key.num_q_heads, KV_HEADS=key.num_kv_heads, DIM=key.head_dim_k,
        PAGE_SIZE=pages.shape[slot], TILE_QUERIES=tiling.queries, TILE_KEYS=tiling.keys, LEAST_KEYS=tiling.least_keys,
        ROWS=max(_FEWEST_ROWS, triton.next_power_of_2(rows)), STAGES=tiling.stages, num_warps=tiling.warps,
        **dependent_launch(query.device),
    )  # fmt: skip
