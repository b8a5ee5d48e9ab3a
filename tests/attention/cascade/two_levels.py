"""Cascade attention in plain torch: a backend that attends in two levels.

Each level gives a weighted mean of values and the logarithm of its sum of weights, in float32; the levels are merged by
these (Source: Milakov & Gimelshein, arXiv 1805.02867, the online softmax).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from attention.backends.reference import Segment, TorchBackend, TorchBuilder, TorchPlan
from attention.batch.host import HostBatch
from attention.batch.metadata import CommonAttentionMetadata
from attention.cache.kv_cache import CacheGroup, LayerKV, gather, write
from attention.cache.pages import NULL_PAGE
from attention.cascade.shared_pages import SharedPrefix, shared_prefixes
from attention.spec import AttentionSpec


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


def shared_prefix(block_table: np.ndarray, num_computed_tokens: np.ndarray, page_size: int) -> SharedPrefix | None:
    """The class that saves most keys; None where no two rows share a page."""
    return next(shared_prefixes(block_table, num_computed_tokens, page_size), None)


@dataclass(frozen=True)
class Cascade:
    """A batch in two levels.

    Attributes:
        tokens: [t] int64, the token rows of the batch whose queries see all of the prefix.
        pages: [num_pages] int32, the prefix's pages. num_keys: number of keys on them.
        suffix: all rows over the pages that are their own, with the batch's slots and rotary positions: those that
            share the prefix count their keys after it.
    """

    tokens: np.ndarray
    pages: np.ndarray
    num_keys: int
    suffix: HostBatch


def cascade(batch: HostBatch, prefix: SharedPrefix) -> Cascade:
    """Divide a batch at a prefix that `shared_prefix` found in it."""
    rows, cut = prefix.rows, prefix.num_pages
    assert batch.num_computed_tokens[rows].min() >= prefix.num_keys, "a row does not see all of the prefix"
    table = batch.block_table.copy()
    table[rows, : table.shape[1] - cut] = batch.block_table[rows, cut:]
    table[rows, table.shape[1] - cut :] = NULL_PAGE
    before = np.zeros(batch.num_reqs, np.int32)
    before[rows] = prefix.num_keys
    members = np.zeros(batch.num_reqs, bool)
    members[rows] = True
    suffix = HostBatch(
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens - before,
        num_computed_tokens=batch.num_computed_tokens - before,
        block_table=table,
        slot_mapping=batch.slot_mapping,
        positions=batch.positions,
        page_size=batch.page_size,
    )
    return Cascade(
        tokens=np.flatnonzero(np.repeat(members, batch.query_lens)),
        pages=batch.block_table[rows[0], :cut],
        num_keys=prefix.num_keys,
        suffix=suffix,
    )


@dataclass(frozen=True)
class TwoLevels(TorchPlan):
    """The segments of the rows' own keys. prefix: keys that some of the tokens see before these."""

    prefix: PrefixLevel | None = None


class CascadeBuilder(TorchBuilder):
    """Divides a batch where rows begin with the same pages."""

    def build(self, metadata: CommonAttentionMetadata) -> TwoLevels:
        host = metadata.host
        prefix = shared_prefix(host.block_table, host.num_computed_tokens, host.page_size)
        if prefix is None:
            return TwoLevels(super().build(metadata).segments)
        two = cascade(host, prefix)
        pages, within = np.divmod(np.arange(two.num_keys), host.page_size)
        slots = two.pages[pages].astype(np.int64) * host.page_size + within
        level = PrefixLevel(torch.from_numpy(two.tokens), torch.from_numpy(slots))
        return TwoLevels(super().build(replace(metadata, host=two.suffix)).segments, level)


class CascadingBackend(TorchBackend):
    """The reference, which attends in two levels where rows begin with the same pages."""

    def builder(self, group: CacheGroup, key: AttentionSpec, dtype: torch.dtype) -> CascadeBuilder:
        return CascadeBuilder(key, group.num_pages, self._device)

    def run(
        self,
        plan: Any,
        key: AttentionSpec,
        query: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_kv: LayerKV,
        metadata: CommonAttentionMetadata,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if plan.prefix is None:
            return super().run(plan, key, query, key_states, value_states, layer_kv, metadata, sinks, out)
        tokens = len(metadata.slot_mapping)
        write(layer_kv, key_states[:tokens], value_states[:tokens], metadata.slot_mapping)
        attended = attend_levels(plan, key, query[:tokens], layer_kv).to(query.dtype)
        out = query.new_empty(len(query), *attended.shape[1:]) if out is None else out
        out[:tokens] = attended
        return out


def attend_levels(plan: TwoLevels, key: AttentionSpec, query: torch.Tensor, layer_kv: LayerKV) -> torch.Tensor:
    """query [T, Hq, Dk] -> [T, Hq, Dv] in float32: every row's own keys, then those before them."""
    assert plan.prefix is not None
    dtype = torch.promote_types(query.dtype, torch.float32)
    means = query.new_empty(len(query), key.num_q_heads, key.head_dim_v, dtype=dtype)
    log_sums = query.new_empty(len(query), key.num_q_heads, dtype=dtype)
    for segment in plan.segments:
        rows = torch.arange(len(query), device=query.device) if segment.tokens is None else segment.tokens
        q, k, v = segment_states(segment, key, query.index_select(0, rows), layer_kv)
        level = level_of(q, k, v, segment.mask, key)
        real = slice(None) if segment.real is None else segment.real
        means[rows[real]], log_sums[rows[real]] = level.means[real], level.log_sums[real]
    shared = plan.prefix.tokens
    own = Level(means[shared], log_sums[shared])
    means[shared] = merged([own, attend_prefix(plan.prefix, key, query, layer_kv)]).means
    return means


def segment_states(
    segment: Segment, key: AttentionSpec, query: torch.Tensor, layer_kv: LayerKV
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A segment's queries [b, Hkv, G, Q, Dk], keys and values [b, Hkv, S, D]; query: [b·Q, Hq, Dk]."""
    rows, num_queries, num_keys = segment.shape
    heads, groups = key.num_kv_heads, key.num_q_heads // key.num_kv_heads
    q = query.view(rows, num_queries, heads, groups, key.head_dim_k).permute(0, 2, 3, 1, 4)
    k = gather(layer_kv.keys, segment.slots, layer_kv.layout, layer_kv.key_scale)
    k = k.view(rows, num_keys, heads, -1).transpose(1, 2)
    if key.value_in_key:
        return q, k, k[..., : key.head_dim_v]
    v = gather(layer_kv.values, segment.slots, layer_kv.layout, layer_kv.value_scale)
    return q, k, v.view(rows, num_keys, heads, -1).transpose(1, 2)
