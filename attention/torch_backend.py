"""The torch reference backend: attention over the same pages in plain torch, softmax in float32.

It is the CPU path and the oracle of every kernel test. Rows with few query tokens (decoding, verification) are padded
together; every longer row (a prompt chunk) is a segment of its own, so that memory stays B·Q·S for small Q only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from attention.backend import PlanKey
from attention.batch import HostBatch, slots_of
from attention.checking import checking
from attention.errors import UnsupportedAttentionError
from attention.kv_cache import CacheGroup, LayerKV, gather, write
from attention.metadata import CommonAttentionMetadata

_SHORT_QUERY = 16
"""Rows with at most this many query tokens are padded into one segment."""


@dataclass(frozen=True)
class Segment:
    """Rows attended together.

    Attributes:
        tokens: [b, Q] int64 token rows of the batch (padding repeats the row's last token), or None when the segment
            is the whole batch with equal query lengths.
        real: [n] int64 flat indices into b·Q of the tokens that are not padding, or None when all are real.
        slots: [b, S] int64 cache slots of the row's keys (padding: slot 0).
        mask: [b, 1, Q, S] bool, True = visible.
        shape: (b, Q).
    """

    tokens: torch.Tensor | None
    real: torch.Tensor | None
    slots: torch.Tensor
    mask: torch.Tensor
    shape: tuple[int, int]


@dataclass(frozen=True)
class TorchPlan:
    """The segments of one batch for one window."""

    segments: tuple[Segment, ...]


class TorchBuilder:
    """Builds gather indices and masks for one window."""

    def __init__(self, window: int | None, device: torch.device) -> None:
        self._window = window
        self._device = device

    def build(self, metadata: CommonAttentionMetadata) -> TorchPlan:
        """Plan one batch: its rows as padded segments, from host arrays only."""
        host = metadata.host
        lens = host.query_lens
        short = np.flatnonzero((lens > 0) & (lens <= _SHORT_QUERY))
        groups = ([short] if len(short) else []) + [np.array([i]) for i in np.flatnonzero(lens > _SHORT_QUERY)]
        return TorchPlan(tuple(self._segment(host, rows) for rows in groups))

    def _segment(self, host: HostBatch, rows: np.ndarray) -> Segment:
        lens, seqs = host.query_lens[rows], host.seq_lens[rows]
        num_queries, num_keys = int(lens.max()), int(seqs.max())
        query = np.arange(num_queries)
        key = np.arange(num_keys)
        cache_pos = host.num_computed_tokens[rows][:, None] + np.minimum(query, lens[:, None] - 1)  # [b, Q]
        visible = key <= cache_pos[:, :, None]  # [b, Q, S]
        if self._window is not None:
            visible &= key > cache_pos[:, :, None] - self._window
        in_row = key < seqs[:, None]
        owners = np.broadcast_to(rows[:, None], in_row.shape)
        slots = slots_of(host.block_table, owners, np.where(in_row, key, 0), host.page_size)
        whole = len(rows) == host.num_reqs and bool((lens == num_queries).all())
        tokens = host.query_start_loc[:-1][rows][:, None] + np.minimum(query, lens[:, None] - 1)
        real = None if (lens == num_queries).all() else np.flatnonzero(query < lens[:, None])
        return Segment(
            tokens=None if whole else self._send(tokens.astype(np.int64)),
            real=None if real is None else self._send(real),
            slots=self._send(slots),
            mask=self._send(visible[:, None]),
            shape=(len(rows), num_queries),
        )

    def _send(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


class TorchBackend:
    """Reference attention: GQA, sliding window, softcap, sinks, Dk != Dv, NHD and HND pages."""

    name = "torch"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def builder(self, group: CacheGroup, key: PlanKey) -> TorchBuilder:
        """A builder for `key`.

        Raises:
            UnsupportedAttentionError: Hq is not a multiple of Hkv.
        """
        if key.num_q_heads % key.num_kv_heads:
            raise UnsupportedAttentionError(
                f"group {group.name}: {key.num_q_heads} query heads are not a multiple of {key.num_kv_heads} KV heads"
            )
        return TorchBuilder(key.window, self._device)

    def run(
        self,
        plan: TorchPlan,
        key: PlanKey,
        query: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_kv: LayerKV,
        metadata: CommonAttentionMetadata,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write K and V, then attend; see `AttentionBackend.run`."""
        if checking():
            metadata.staged.ensure_fresh()
        write(layer_kv, key_states, value_states, metadata.slot_mapping)
        if len(plan.segments) == 1 and plan.segments[0].tokens is None:
            return _attend_segment(plan.segments[0], key, query, layer_kv, sinks)
        out = query.new_empty(query.shape[0], key.num_q_heads, key.head_dim_v)
        for segment in plan.segments:
            assert segment.tokens is not None
            tokens = segment.tokens.view(-1)
            part = _attend_segment(segment, key, query.index_select(0, tokens), layer_kv, sinks)
            if segment.real is not None:
                tokens, part = tokens[segment.real], part[segment.real]
            out.index_copy_(0, tokens, part)
        return out


def _attend_segment(
    segment: Segment, key: PlanKey, query: torch.Tensor, layer_kv: LayerKV, sinks: torch.Tensor | None
) -> torch.Tensor:
    rows, num_queries = segment.shape
    q = query.view(rows, num_queries, key.num_q_heads, key.head_dim_k).transpose(1, 2)  # [b, Hq, Q, Dk]
    k = gather(layer_kv.keys, segment.slots, layer_kv.layout).transpose(1, 2)  # [b, Hkv, S, Dk]
    v = gather(layer_kv.values, segment.slots, layer_kv.layout).transpose(1, 2)
    out = attend(q, k, v, segment.mask, key, sinks)
    return out.transpose(1, 2).reshape(-1, key.num_q_heads, key.head_dim_v).to(query.dtype)


def attend(
    query: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    mask: torch.Tensor,
    key: PlanKey,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention with float32 softmax.

    Args:
        query: [b, Hq, Q, Dk]; key_states: [b, Hkv, S, Dk]; value_states: [b, Hkv, S, Dv].
        mask: [b, 1, Q, S] bool, True = visible.
        key: scale, softcap.
        sinks: [Hq] logits that join the denominator (Source: huggingface/transformers, modeling_gpt_oss.py).

    Returns:
        [b, Hq, Q, Dv] float32 (float64 for float64 input).
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, k, v = query.to(dtype), key_states.to(dtype), value_states.to(dtype)
    if key.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=key.scale, enable_gqa=True)
    groups = key.num_q_heads // key.num_kv_heads
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(-1, -2)) * key.scale  # [b, Hq, Q, S]
    if key.softcap is not None:
        scores = key.softcap * torch.tanh(scores / key.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.to(dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v
    return scores.softmax(-1) @ v
