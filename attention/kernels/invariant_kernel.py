"""Attention over pages whose result for a token depends on that token's own keys alone. Imported on CUDA only.

A program serves one KV head of one row and one tile of the row's queries, and walks along the row's keys in tiles that
begin at fixed positions. The tile has the same form for every query, KV is never split, and tiles without a visible key
change nothing: the same bits alone, with drafts, in a chunk of a prompt, next to any other rows.

Heads of any width from 8 to 512: a tile is as wide as the next power of two, and its last columns are zeros that are
never in memory. Caches in 8 bits are read unscaled, and their scales are factors of scores and of the result.

Letters in the kernel: M query rows of a tile (TILE_QUERIES: tokens times the query heads of one KV head), N keys of a
tile (TILE_KEYS), Dk and Dv head dimensions (DIM_K, DIM_V), Wk and Wv the next powers of two (WIDTH_K, WIDTH_V).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from attention.batch.metadata import CommonAttentionMetadata
from attention.cache.kv_cache import FP8, LayerKV
from attention.checking import CHECKS, require
from attention.kernels.launch import dependent_launch, wait_for_predecessor
from attention.kernels.tiles import attend_tile, key_places, no_keys, row_keys, rows_at, without_padding
from attention.spec import AttentionSpec

_TILE_QUERIES = 32
_TILES = {128: (128, 3, 4), 256: (64, 2, 4), 512: (32, 2, 8)}
"""Keys of a tile, stages and warps, by the widest head that they are for; 512 is chosen to fit, not measured.

Of nine choices on an H200 the best for 1 to 32 rows of 640 keys. µs, 32 query heads over 8 of 128, FlashInfer in
brackets: 1 row of 6 tokens 12.6 (10.7), 8 rows 13.3 (20.5), 32 rows 28.8 (31.2), 128 rows 96 (106); 1 row over 8,192
keys 149; a prompt of 2,048 tokens 240 (tiles of 64 queries 142, but slower everywhere else)."""


@triton.jit
def _invariant_attention_kernel(  # type: ignore[no-untyped-def]
    query_ptr,  # [T, Hq, Dk]
    keys_ptr,  # [pages, page_size, Hkv, Dk], or [pages, Hkv, page_size, Dk]: see the strides
    values_ptr,  # as keys, Dv wide
    sinks_ptr,  # [Hq]
    out_ptr,  # [T, Hq, Dv] contiguous
    query_start_ptr,  # [B+1] int32
    page_indices_ptr,  # [sum of the rows' pages] int32
    page_indptr_ptr,  # [B+1] int32
    last_page_len_ptr,  # [B] int32
    scale, value_scale, softcap, window, query_token, query_head, page_stride, slot_stride, head_stride, value_page,
    value_slot, value_head,
    HAS_SOFTCAP: constexpr, HAS_WINDOW: constexpr, HAS_SINKS: constexpr, QUERY_HEADS: constexpr,
    KV_HEADS: constexpr, DIM_K: constexpr, DIM_V: constexpr, WIDTH_K: constexpr, WIDTH_V: constexpr,
    EIGHT_BITS: constexpr, PAGE_SIZE: constexpr, TILE_QUERIES: constexpr, TILE_KEYS: constexpr,
    STAGES: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    GROUP: constexpr = QUERY_HEADS // KV_HEADS
    LOG2_E: constexpr = 1.4426950408889634
    row, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    first_token = tl.load(query_start_ptr + row)
    query_len = tl.load(query_start_ptr + row + 1) - first_token
    first_query = tl.program_id(1) * TILE_QUERIES
    if first_query >= query_len * GROUP:
        return
    packed, key_at = first_query + tl.arange(0, TILE_QUERIES), tl.arange(0, TILE_KEYS)
    column, value_column = tl.arange(0, WIDTH_K), tl.arange(0, WIDTH_V)
    token, head = packed // GROUP, kv_head * GROUP + packed % GROUP  # [M], [M]
    own = (token < query_len)[:, None]  # [M, 1]
    place = first_token.to(tl.int64) + token  # [M] row of query and out
    query_at = place * query_token + head * query_head  # [M]
    in_query = without_padding(own, column, DIM_K)  # [M, Wk] or [M, 1]
    q = rows_at(query_ptr, query_at, column, in_query)  # [M, Wk]
    first_page, length = row_keys(page_indptr_ptr, last_page_len_ptr, row, PAGE_SIZE)
    last_key = length - query_len + token  # [M] the last position that each query sees
    begin, end = 0, tl.minimum(length, length - query_len + (first_query + TILE_QUERIES - 1) // GROUP + 1)
    if HAS_WINDOW:
        begin = tl.maximum(length - query_len + first_query // GROUP - window + 1, 0) // TILE_KEYS * TILE_KEYS
    m, l, acc = no_keys(TILE_QUERIES, WIDTH_V)  # noqa: E741
    for start in tl.range(begin, end, TILE_KEYS, num_stages=STAGES):
        position = start + key_at  # [N]
        inside = position < length  # [N]
        at = key_places(page_indices_ptr, first_page, position, inside, page_stride, slot_stride, PAGE_SIZE)
        at += kv_head * head_stride  # [N]
        of_values = at
        if DIM_V != DIM_K:
            of_values = key_places(page_indices_ptr, first_page, position, inside, value_page, value_slot, PAGE_SIZE)
            of_values += kv_head * value_head  # [N]
        in_key = without_padding(inside[:, None], column, DIM_K)  # [N, Wk] or [N, 1]
        k = rows_at(keys_ptr, at, column, in_key)  # [N, Wk]
        in_value = without_padding(inside[:, None], value_column, DIM_V)  # [N, Wv] or [N, 1]
        v = rows_at(values_ptr, of_values, value_column, in_value)  # [N, Wv]
        if EIGHT_BITS:  # every e4m3 number is one of float16 and of bfloat16
            k, v = k.to(q.dtype), v.to(q.dtype)
        s = tl.dot(q, k.T) * scale  # [M, N]
        if HAS_SOFTCAP:  # softcap · tanh(s / softcap)
            s = softcap * (1 - 2 / (1 + tl.exp2(s * (2 * LOG2_E / softcap))))
        visible = position[None, :] <= last_key[:, None]  # [M, N]
        if HAS_WINDOW:
            visible = visible & (position[None, :] > last_key[:, None] - window)
        s = tl.where(visible, s * LOG2_E, -1e30)  # log2(e): `attend_tile` uses exp2, which GPUs compute in hardware
        m, l, acc = attend_tile(s, v, m, l, acc)  # noqa: E741
    if HAS_SINKS:  # one more logit in the denominator, without a value
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E  # [M]
        m_new = tl.maximum(m, sink)  # [M]
        alpha = tl.exp2(m - m_new)  # [M]
        l = l * alpha + tl.exp2(sink - m_new)  # noqa: E741
        acc = acc * alpha[:, None]
    if EIGHT_BITS:
        acc *= value_scale
    to = out_ptr + (place * QUERY_HEADS + head)[:, None] * DIM_V + value_column[None, :]  # [M, Wv]
    in_out = without_padding(own, value_column, DIM_V)  # [M, Wv] or [M, 1]
    tl.store(to, acc / l[:, None], mask=in_out)


def launch_invariant_attention(
    query: Tensor, layer: LayerKV, key: AttentionSpec, max_query_len: int, batch: CommonAttentionMetadata,
    sinks: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """Attend, causally, the rows of a batch, of which only the arrays on the device are read.

    query: [T, Hq, Dk], the last dimension contiguous; out: [T, Hq, Dv], contiguous; sinks: [Hq], or None.
    max_query_len: most tokens of a row.
    """
    pages, values, (slot, head) = layer.keys, layer.values, layer.slot_and_head
    width_k, width_v = (max(16, triton.next_power_of_2(dim)) for dim in (key.head_dim_k, key.head_dim_v))
    if CHECKS.on:
        require(query.stride(-1) == 1 and out.is_contiguous(), "query or out has gaps")
        require(max(width_k, width_v) <= 512, "a head is too wide")
    # Keys of a tile, stages and warps for heads of this width.
    tile_keys, stages, warps = next(tile for most, tile in _TILES.items() if max(width_k, width_v) <= most)
    tiles = triton.cdiv(max_query_len * key.group_size, _TILE_QUERIES)
    _invariant_attention_kernel[(len(batch.last_page_len) * key.num_kv_heads, tiles)](
        query, pages, values, query if sinks is None else sinks, out, batch.query_start_loc, batch.page_indices,
        batch.page_indptr, batch.last_page_len, key.scale * layer.key_scale, layer.value_scale, key.softcap or 1.0,
        key.window or 0, query.stride(0), query.stride(1), pages.stride(0), pages.stride(slot), pages.stride(head),
        values.stride(0), values.stride(slot), values.stride(head), HAS_SOFTCAP=key.softcap is not None,
        HAS_WINDOW=key.window is not None, HAS_SINKS=sinks is not None, QUERY_HEADS=key.num_q_heads,
        KV_HEADS=key.num_kv_heads, DIM_K=key.head_dim_k, DIM_V=key.head_dim_v, WIDTH_K=width_k, WIDTH_V=width_v,
        EIGHT_BITS=pages.dtype == FP8, PAGE_SIZE=pages.shape[slot], TILE_QUERIES=_TILE_QUERIES, TILE_KEYS=tile_keys,
        STAGES=stages, num_warps=warps, **dependent_launch(query.device),
    )  # fmt: skip
