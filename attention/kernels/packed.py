"""Attention of short queries over pages as one Triton kernel. Imported on CUDA only.

A program serves one KV head of one row: all query heads of it, of all the row's tokens, in one tile, which reads every
key once. There is no split-KV, so there is no reduction over partial results and no plan.

Letters in the kernel: M query rows of the tile (TILE_QUERIES: tokens times the query heads of one KV head), N keys of a
tile (TILE_KEYS), D head dimension (DIM).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from attention.cache.kv_cache import LayerKV
from attention.checking import checking, require
from attention.kernels.pdl import dependent_launch, wait_for_predecessor
from attention.kernels.tiles import attend_tile, key_places, row_keys
from attention.spec import AttentionSpec

_NARROW, _WIDE = (64, 2), (128, 4)
"""Keys a tile and warps."""
_FEW_PROGRAMS = 384
_STAGES = 3
"""Of eight choices on an H200 the best, 32 query heads over 8. µs, this kernel and FlashInfer's: 128 rows of 640 keys
90 and 106 with 6 tokens, 80 and 92 with one; 48 rows 42 and 58; 128 rows of 4,096 keys 502 and 562. 32 rows of 6 tokens
leave a multiprocessor two programs, which need wide tiles: 27 and 33 (narrow ones 35)."""


@triton.jit
def _packed_kernel(  # type: ignore[no-untyped-def]
    query_ptr,  # [B·query_len, Hq, D]
    keys_ptr,  # [pages, page_size, Hkv, D], or [pages, Hkv, page_size, D]: see the strides
    values_ptr,  # as keys
    out_ptr,  # [B·query_len, Hq, D] contiguous
    page_indices_ptr,  # [sum of the rows' pages] int32
    page_indptr_ptr,  # [B+1] int32
    last_page_len_ptr,  # [B] int32
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
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_predecessor(DEPENDENT)
    GROUP: tl.constexpr = QUERY_HEADS // KV_HEADS
    row, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    packed, column, key_at = tl.arange(0, TILE_QUERIES), tl.arange(0, DIM), tl.arange(0, TILE_KEYS)
    token, head = packed // GROUP, kv_head * GROUP + packed % GROUP  # [M], [M]
    own = (token < query_len)[:, None]  # [M, 1]
    place = row.to(tl.int64) * query_len + token  # [M] row of query and out
    query_at = place * query_token + head * query_head  # [M]
    q = tl.load(query_ptr + query_at[:, None] + column[None, :], mask=own, other=0.0)  # [M, D]
    first_page, length = row_keys(page_indptr_ptr, last_page_len_ptr, row, PAGE_SIZE)
    last_key = length - query_len + token  # [M] the last position that each query sees
    m = tl.full((TILE_QUERIES,), -1e30, tl.float32)  # [M] running maximum; finite, so that m - m_new is never NaN
    l = tl.zeros((TILE_QUERIES,), tl.float32)  # noqa: E741  # [M] running sum of weights
    acc = tl.zeros((TILE_QUERIES, DIM), tl.float32)  # [M, D] running weighted sum of values
    for start in tl.range(0, length, TILE_KEYS, num_stages=STAGES):
        position = start + key_at  # [N]
        inside = position < length  # [N]
        at = key_places(page_indices_ptr, first_page, position, inside, page_stride, slot_stride, PAGE_SIZE)
        at += kv_head * head_stride  # [N]
        k = tl.load(keys_ptr + at[:, None] + column[None, :], mask=inside[:, None], other=0.0)  # [N, D]
        v = tl.load(values_ptr + at[:, None] + column[None, :], mask=inside[:, None], other=0.0)  # [N, D]
        s = tl.dot(q, k.T) * scale_log2  # [M, N]
        s = tl.where(position[None, :] <= last_key[:, None], s, -1e30)
        m, l, acc = attend_tile(s, v, m, l, acc)  # noqa: E741
    to = out_ptr + (place * QUERY_HEADS + head)[:, None] * DIM + column[None, :]  # [M, D]
    tl.store(to, (acc / l[:, None]).to(out_ptr.dtype.element_ty), mask=own)


def launch_packed(
    query: torch.Tensor,
    layer: LayerKV,
    key: AttentionSpec,
    page_indptr: torch.Tensor,
    page_indices: torch.Tensor,
    last_page_len: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Attend, causally, B rows with equally many tokens each.

    Args:
        query: [B·q, Hq, D], the last dimension contiguous, and out: the same, contiguous.
        page_indptr: [B+1] int32; page_indices: int32, the pages of all rows; last_page_len: [B] int32.
    """
    rows = len(last_page_len)
    tokens = len(query) // rows
    pages, (slot, head) = layer.keys, layer.slot_and_head
    if checking():
        require(len(query) == rows * tokens, f"{len(query)} tokens are not {rows} equal rows")
        require(query.stride(-1) == 1 and out.is_contiguous(), "query or out has gaps")
        require(pages.stride() == layer.values.stride(), "keys and values lie differently")
    tile_queries = max(16, triton.next_power_of_2(tokens * (key.num_q_heads // key.num_kv_heads)))
    programs = rows * key.num_kv_heads
    tile_keys, warps = _WIDE if tile_queries > 16 and programs < _FEW_PROGRAMS else _NARROW
    _packed_kernel[(programs,)](
        query,
        pages,
        layer.values,
        out,
        page_indices,
        page_indptr,
        last_page_len,
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
        TILE_QUERIES=tile_queries,
        TILE_KEYS=tile_keys,
        STAGES=_STAGES,
        num_warps=warps,
        **dependent_launch(query.device),
    )
