"""Cascade attention in plain torch, the oracle of the kernels for it; and which layers have none.

Each level gives a weighted mean of values and the logarithm of its sum of weights, in float32; the levels are merged by
these (Source: Milakov & Gimelshein, arXiv 1805.02867, the online softmax).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attention.cache.kv_cache import LayerKV, gather
from attention.spec import AttentionSpec


def cascade_limit(key: AttentionSpec, eight_bits: bool) -> str:
    """Why layers are never attended in two levels, in words; "" where they can be. eight_bits: the cache.

    >>> plain, windowed = AttentionSpec(8, 2, 64, 64, 1.0), AttentionSpec(8, 2, 64, 64, 1.0, window=9)
    >>> cascade_limit(plain, False), cascade_limit(plain, True), cascade_limit(windowed, False)
    ('', 'an 8-bit cache', 'a sliding window')
    """
    limits = (
        (eight_bits, "an 8-bit cache"),
        (key.value_in_key, "MLA"),
        (key.window is not None, "a sliding window"),
        (key.chunk_size is not None, "attention in chunks"),
        (key.has_sinks, "attention sinks"),
        (key.softcap is not None, "a softcap"),
        (key.alibi is not None, "ALiBi slopes"),
        (key.head_dim_k != key.head_dim_v, "keys and values of different widths"),
    )
    return next((name for limited, name in limits if limited), "")


@dataclass(frozen=True)
class PrefixLevel:
    """Queries that see the same keys. tokens: [t] int64 token rows of the batch; slots: [n] int64 of the keys."""

    tokens: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class Level:
    """Attention over some of the keys: means [t, Hq, Dv], log_sums [t, Hq], both float32 (float64 for float64)."""

    means: torch.Tensor
    log_sums: torch.Tensor


def attend_prefix(level: PrefixLevel, key: AttentionSpec, query: torch.Tensor, layer: LayerKV) -> Level:
    """query [T, Hq, Dk] of the whole batch -> attention of the level's tokens, not causal."""
    heads, tokens = key.num_kv_heads, len(level.tokens)
    q = query.index_select(0, level.tokens).view(tokens, heads, -1, key.head_dim_k)  # [t, Hkv, G, D]
    k = gather(layer.keys, level.slots, layer.layout, layer.key_scale)  # [n, Hkv, D]
    v = gather(layer.values, level.slots, layer.layout, layer.value_scale)
    return level_of(q.permute(1, 2, 0, 3)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], None, key)


def level_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, key: AttentionSpec) -> Level:
    """q [b, Hkv, G, Q, Dk], k and v [b, Hkv, S, D], mask [b, 1, G·Q, S] bool or None -> of the b·Q tokens in order."""
    rows, heads, groups, queries, _ = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    folded = q.reshape(rows, heads, groups * queries, -1).to(dtype)
    scores = (folded @ k.to(dtype).transpose(-1, -2)) * key.scale  # [b, Hkv, G·Q, S]
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    means = scores.softmax(-1) @ v.to(dtype)  # [b, Hkv, G·Q, Dv]
    shape = (rows, heads, groups, queries)
    sums = scores.logsumexp(-1).view(shape).permute(0, 3, 1, 2)  # [b, Q, Hkv, G]
    means = means.view(*shape, -1).permute(0, 3, 1, 2, 4)  # [b, Q, Hkv, G, Dv]
    return Level(means.reshape(rows * queries, heads * groups, -1), sums.reshape(rows * queries, heads * groups))


def merged(levels: Sequence[Level]) -> Level:
    """Attention over the keys of all levels, of the same tokens."""
    log_sums = torch.stack([level.log_sums for level in levels])  # [levels, t, Hq]
    means = torch.stack([level.means for level in levels])
    weights = log_sums.softmax(0)[..., None]
    return Level((weights * means).sum(0), log_sums.logsumexp(0))
