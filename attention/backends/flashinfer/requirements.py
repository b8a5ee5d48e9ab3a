"""Limits of the FlashInfer backend: batches and layers that it refuses before allocating, and workspace sizes.

Where the planner splits a row's KV, each chunk writes a partial output and its log-sum-exp to the float workspace, in
float32, and planning fails when it is too small. It grows with query heads × rows × tokens per row × head
dimension, so it is computed from the plan's geometry, for the batch that needs most of it.

Source: flashinfer-ai/flashinfer 0.7.2, include/flashinfer/attention/scheduler.cuh (PrefillSplitQOKVIndptr,
PrefillPlanImpl) and utils.cuh (FA2DetermineCtaTileQ).
"""

from __future__ import annotations

import math

import torch

from attention.backends.flashinfer.mla import check_mla_supported
from attention.backends.limits import HALF, check_causal, check_heads, has_flashinfer_heads
from attention.cache.kv_cache import CacheGroup
from attention.errors import UnsupportedAttentionError
from attention.spec import AttentionSpec

PAGE_SIZES = (1, 16, 32, 64)


def check_supported(group: CacheGroup, key: AttentionSpec, dtype: torch.dtype) -> None:
    """Refuse layers that this backend does not support, before anything is allocated.

    Raises:
        UnsupportedAttentionError: dtype, heads, or MLA; for heads that FlashInfer has a kernel for, page size and sinks
            with softcap as well.
    """
    check_causal(key, group.name, "flashinfer")
    if key.value_in_key:
        check_mla_supported(group, key, dtype)
        return
    where = f"group {group.name}: FlashInfer"
    elsewhere = "; use backend='torch'"
    if dtype not in HALF:
        names = " and ".join(str(d).removeprefix("torch.") for d in HALF)
        raise UnsupportedAttentionError(f"{where} has no {dtype} attention, only {names}{elsewhere}")
    check_heads(key, where, elsewhere)
    if not has_flashinfer_heads(key):
        return  # specdec's kernel, which has no further limits
    if group.page_size not in PAGE_SIZES:
        raise UnsupportedAttentionError(f"{where} takes page sizes {PAGE_SIZES}; given {group.page_size}")
    if key.has_sinks and key.softcap is not None:
        raise UnsupportedAttentionError(f"{where} has no attention sinks together with a softcap{elsewhere}")


LEAST_BYTES = 256 << 20
"""Twice what FlashInfer's documentation recommends; MLA's partial results need 18 MB of it on 132 multiprocessors."""
_SHORT_TILE, _LONG_TILE = 64, 128
_WIDE_HEAD = 256
"""From this head dimension on, tiles have 64 queries at most."""
_ALIGNMENT = 16


def split_bytes(
    key: AttentionSpec, sms: int, rows: int | None = None, query_len: int | None = None, tokens: int | None = None
) -> int:
    """Most bytes that the partial results of one plan take.

    Args:
        key: heads and head dimensions; sms: multiprocessors.
        rows, query_len: shape of a batch for CUDA graphs, whose grid has at least two blocks per multiprocessor, and
            one per tile; default any batch outside graphs, with at most two split tiles per multiprocessor.
        tokens: token count of the batch if rows have 0 … query_len each; the planner then counts with one row of all
            the tokens that the others leave. None: rows·query_len.

    A verification of Llama-3.1-8B, eight rows of six tokens, and of a model with 71 query heads for one KV head:

    >>> llama, falcon = AttentionSpec(32, 8, 128, 128, 1.0), AttentionSpec(71, 1, 64, 64, 1.0)
    >>> [split_bytes(key, 132, 8, 6) >> 20 for key in (llama, falcon)], split_bytes(llama, 132) >> 20
    ([8, 8], 16)
    >>> split_bytes(AttentionSpec(128, 1, 128, 128, 1.0), 132, 200, 32) >> 20
    403
    """
    group = key.num_q_heads // key.num_kv_heads
    blocks = 2 * sms // key.num_kv_heads
    tile = _LONG_TILE if key.head_dim_v < _WIDE_HEAD else _SHORT_TILE
    if rows is not None and query_len is not None:
        queries = (query_len if tokens is None else tokens - rows + 1) * group
        tile = tile if queries > _SHORT_TILE else _SHORT_TILE
        tiles = rows * math.ceil(queries / tile) if tokens is None else math.ceil(tokens * group / tile) + rows - 1
        blocks = max(blocks, tiles)
    chunks = math.ceil(blocks * tile / group)  # of one token row, all its heads
    outputs, sums = (4 * key.num_q_heads * chunks * width for width in (key.head_dim_v, 1))
    return _aligned(outputs) + _aligned(sums)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
