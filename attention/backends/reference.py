"""The torch reference backend: attention over the same pages in plain torch, softmax in float32.

It is the CPU path and the oracle of every kernel test. Rows with few query tokens (decoding, verification) are padded
together; every longer row (a prompt chunk) is a separate segment, so that memory is B·Q·S only for small Q.

As "batch_invariant" on a CPU its sums are exact, so that no order of summation, and nothing else in a batch, changes a
bit: queries, keys, values and probabilities are rounded to multiples of a power of two of their vector, of which a sum
in float64 loses no digit. Rounding takes 2**-22 of a vector's largest element at most.

Source: Demmel and Nguyen, Fast Reproducible Floating-Point Summation (ARITH 2013), for rounding before summing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor

from attention.backends.limits import WIDEST_HEAD, check_causal, check_query_heads, dtype_name
from attention.batch.host import HostBatch, offsets_within, owners_of, starts_of
from attention.batch.metadata import CommonAttentionMetadata
from attention.cache.kv_cache import CacheGroup, LayerKV, gather, write
from attention.errors import UnsupportedAttentionError
from attention.spec import AttentionSpec

_SHORT_QUERY = 16
"""Rows with at most this many query tokens are padded into one segment."""
_EXACT_QUERIES = 64
"""Queries of a row in one segment of exact sums, whose keys in float64 stay in a processor's cache."""
_LARGE = 1.5 * 2.0**52
"""A float64 whose last digit is 1: numbers that are added to it are rounded to integers."""
_VECTOR = 2.0**-21
_EXPONENTIAL = 2.0**-32
_WEIGHT = 2.0**-27
"""Steps of exact sums. A product of two vectors of 512 elements is less than 2**53 of its steps, a sum of 2**21
exponentials, which are at most 1, as well, and a sum of weighted values less than 2**52."""


@dataclass(frozen=True)
class Segment:
    """Rows attended together.

    Attributes:
        tokens: [b·Q] int64 token rows of the batch (padding repeats the row's last token), or None when the segment
            is the whole batch with equal query lengths.
        real: [n] int64 indices into b·Q of the tokens that are not padding, or None when all are real.
        slots: [b·S] int64 cache slots of the rows' keys (padding: slot 0); a slice where they follow one another, as
            those of a single row do in most rounds, so that nothing is copied.
        mask: [b, 1, G·Q, S] bool, True = visible, for G query heads a KV head; None when everything is visible.
        bias: [b, Hkv, G·Q, S] float32 that logits get by distance; None without ALiBi slopes.
        shape: (b, Q, S). exact: whether sums are to be exact.
    """

    tokens: Tensor | None
    real: Tensor | None
    slots: Tensor | slice
    mask: Tensor | None
    shape: tuple[int, int, int]
    bias: Tensor | None
    exact: bool


@dataclass(frozen=True)
class TorchPlan:
    """The segments of one batch for one AttentionSpec."""

    segments: tuple[Segment, ...]


class TorchBuilder:
    """Builds gather indices and masks for one AttentionSpec."""

    def __init__(self, key: AttentionSpec, num_pages: int, device: torch.device, exact: bool = False) -> None:
        """num_pages: size of the pool, including the null page. exact: a segment is one row's, of few queries."""
        self._num_pages = num_pages
        self._exact = exact
        self._window = key.window
        self._causal = key.causal
        self._groups = key.group_size
        self._device = device
        slopes = None if key.alibi is None else np.array(key.alibi, np.float32)
        self._slopes = None if slopes is None else slopes.reshape(key.num_kv_heads, -1, 1, 1)  # [Hkv, G, 1, 1]

    def build(self, metadata: CommonAttentionMetadata) -> TorchPlan:
        """Plan one batch: its rows as padded segments, from host arrays only.

        Raises:
            InvariantError: a page is not in the pool.
        """
        host = _in_blocks(metadata.host) if self._exact else metadata.host
        host.validate_pages(self._num_pages)
        lens = host.query_lens
        rows = np.arange(len(host.seq_lens))
        most = 0 if self._exact else _SHORT_QUERY
        if lens.min(initial=1) > 0 and lens.max(initial=0) <= most:
            return TorchPlan((self._segment(host, rows),))
        short = rows[(lens > 0) & (lens <= most)]
        groups = [*([short] if len(short) else []), *rows[lens > most][:, None]]
        return TorchPlan(tuple(self._segment(host, group) for group in groups))

    def _segment(self, host: HostBatch, rows: ndarray) -> Segment:
        """These rows [b] of a batch, padded to the longest query Q and the most keys S of them."""
        lens = host.query_lens[rows]
        seqs = host.seq_lens[rows]
        computed = host.num_computed_tokens[rows]
        num_queries = int(lens.max())
        num_keys = int(seqs.max())
        page_size = host.page_size
        even = int(lens.min()) == num_queries
        same = int(seqs.min()) == num_keys
        key = np.arange(num_keys)
        within = np.minimum(np.arange(num_queries), lens[:, None] - 1)  # [b, Q], last repeated
        tokens = mask = bias = None
        if not even or len(rows) < len(host.seq_lens):
            tokens = self._send((host.query_start_loc[:-1][rows, None].astype(np.int64) + within).reshape(-1))
        pages = host.block_table[rows, : -(-num_keys // page_size), None].astype(np.int64)  # [b, P, 1]
        slots = (pages * page_size + np.arange(page_size)).reshape(len(rows), -1)[:, :num_keys]
        if not same:
            slots = np.where(key < seqs[:, None], slots, 0)
        place = (computed[:, None].astype(np.int64) + within)[:, :, None]  # [b, Q, 1] position in the cache
        if num_queries > 1 or not same or (self._window is not None and self._window < num_keys):
            # [b, Q, S] bool: queries at place [b, Q, 1] see positions key [S] of rows that end at seqs [b].
            visible = key <= place if self._causal else np.repeat(key < seqs[:, None, None], place.shape[1], 1)
            if self._window is not None:
                visible &= key > place - self._window
                if not self._causal:
                    visible &= key < place + self._window
            mask = self._send(np.tile(visible[:, None], (1, 1, self._groups, 1)))
        if self._slopes is not None:
            bias = self._slopes * (key - place)[:, None, None].astype(np.float32)  # [b, Hkv, G, Q, S]
            bias = self._send(bias.reshape(len(rows), len(self._slopes), -1, num_keys))
        real = None if even else self._send(np.flatnonzero(np.arange(num_queries) < lens[:, None]))
        flat = slots.reshape(-1)
        run = slice(int(flat[0]), int(flat[0]) + len(flat))
        follow = np.array_equal(flat, np.arange(run.start, run.stop))
        shape = len(rows), num_queries, num_keys
        return Segment(tokens, real, run if follow else self._send(flat), mask, shape, bias, self._exact)

    def _send(self, array: ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _in_blocks(host: HostBatch) -> HostBatch:
    """Rows of up to 64 queries, several for a longer row."""
    counts = -(-host.query_lens // _EXACT_QUERIES)
    owner = owners_of(counts)
    start = offsets_within(counts) * _EXACT_QUERIES
    lens = np.minimum(host.query_lens[owner] - start, _EXACT_QUERIES)
    before = host.num_computed_tokens[owner] + start
    ends = starts_of(lens)
    table = host.block_table[owner]
    # Not `replace`: the pages of a windowed batch are no field.
    return HostBatch(ends, before + lens, before, table, host.slot_mapping, host.positions, host.page_size)


class TorchBackend:
    """`AttentionBackend`, the reference: all variants (GQA, window, softcap, sinks, ALiBi, Dk != Dv, MLA, 8 bits, not
    causal)."""

    name = "torch"
    batch_invariant = False
    both_ways = True
    """See `attention.backends.base.AttendsBothWays`."""

    def __init__(self, device: torch.device, exact: bool = False) -> None:
        """exact: batch-invariant by exact sums; without MLA and 8 bits."""
        self._device = device
        self._exact = exact
        if exact:
            self.name = "batch_invariant"
            self.batch_invariant = True

    def route(self, group: CacheGroup, key: AttentionSpec, dtype: torch.dtype) -> str:
        kind = "by exact sums" if self._exact else "reference"
        return f"torch {kind}, cache {dtype_name(group.format.dtype_for(dtype))}"

    def builder(self, group: CacheGroup, key: AttentionSpec, dtype: torch.dtype) -> TorchBuilder:
        """A builder for `key`, any floating dtype.

        Raises:
            UnsupportedAttentionError: Hq is not a multiple of Hkv; MLA, a cache in 8 bits, or tokens that see those
                after them, if batch-invariant.
        """
        if self._exact:  # a row's queries are divided among segments, which end at their own last key
            check_causal(key, group.name, self.name)
        check_query_heads(key, f"group {group.name}: torch attention")
        if self._exact and (key.value_in_key or group.format.dtype or key.head_dim_k > WIDEST_HEAD):
            raise UnsupportedAttentionError(
                f"group {group.name}: batch-invariant attention has no MLA, no cache in 8 bits, and head dims up to "
                f"{WIDEST_HEAD}; use backend='torch'"
            )
        return TorchBuilder(key, group.num_pages, self._device, self._exact)

    def run(
        self,
        plan: TorchPlan,
        key: AttentionSpec,
        query: Tensor,
        key_states: Tensor,
        value_states: Tensor,
        layer_kv: LayerKV,
        metadata: CommonAttentionMetadata,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Write K and V, then attend; see `AttentionBackend.run`."""
        tokens = len(metadata.slot_mapping)
        if self._exact:
            query, key_states, value_states = map(_rounded, (query, key_states, value_states))
        write(layer_kv, key_states[:tokens], value_states[:tokens], metadata.slot_mapping)
        if len(plan.segments) == 1 and plan.segments[0].tokens is None:
            attended = _attend_segment(plan.segments[0], key, query[:tokens], layer_kv, sinks)
            if out is None and tokens == len(query):
                return attended
            out = key.room(query, out)
            out[:tokens] = attended
            return out
        out = key.room(query, out)
        for segment in plan.segments:
            assert segment.tokens is not None
            rows = segment.tokens
            part = _attend_segment(segment, key, query.index_select(0, rows), layer_kv, sinks)
            if segment.real is not None:
                rows = rows[segment.real]
                part = part[segment.real]
            out.index_copy_(0, rows, part)
        return out


def _attend_segment(
    segment: Segment, key: AttentionSpec, query: Tensor, layer_kv: LayerKV, sinks: Tensor | None
) -> Tensor:
    rows, num_queries, num_keys = segment.shape
    heads = key.num_kv_heads
    groups = key.group_size
    q = query.view(rows, num_queries, heads, groups, key.head_dim_k).permute(0, 2, 3, 1, 4)
    k = gather(layer_kv.keys, segment.slots, layer_kv.layout, layer_kv.key_scale)
    k = k.view(rows, num_keys, heads, -1).transpose(1, 2)
    if key.value_in_key:
        v = k[..., : key.head_dim_v]
    else:
        v = gather(layer_kv.values, segment.slots, layer_kv.layout, layer_kv.value_scale)
        v = v.view(rows, num_keys, heads, -1).transpose(1, 2)
    folded = q.reshape(rows, heads, groups * num_queries, -1)
    out = _attend_folded(folded, k, v, segment.mask, key, sinks, segment.bias, segment.exact)
    out = out.view(rows, heads, groups, num_queries, key.head_dim_v).permute(0, 3, 1, 2, 4)
    # With one row the reshape is a view in another order of memory.
    return out.reshape(-1, key.num_q_heads, key.head_dim_v).to(query.dtype).contiguous()


def attend(
    query: Tensor,
    key_states: Tensor,
    value_states: Tensor,
    mask: Tensor,
    key: AttentionSpec,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention with float32 softmax.

    Args:
        query: [b, Hq, Q, Dk]; key_states: [b, Hkv, S, Dk]; value_states: [b, Hkv, S, Dv].
        mask: [b, 1, Q, S] bool, True = visible.
        key: scale, softcap.
        sinks: [Hq] logits that join the denominator (Source: huggingface/transformers, modeling_gpt_oss.py).

    Returns:
        [b, Hq, Q, Dv] float32 (float64 for float64 input).

    Raises:
        UnsupportedAttentionError: ALiBi slopes, because a mask does not carry the queries' positions.
    """
    if key.alibi is not None:
        raise UnsupportedAttentionError("dense attention has no ALiBi slopes; use TorchBackend over pages")
    rows, _, num_queries, _ = query.shape
    folded = query.reshape(rows, key.num_kv_heads, key.group_size * num_queries, -1)
    out = _attend_folded(folded, key_states, value_states, mask.repeat(1, 1, key.group_size, 1), key, sinks)
    return out.reshape(rows, key.num_q_heads, num_queries, -1)


def _attend_folded(
    query: Tensor,
    key_states: Tensor,
    value_states: Tensor,
    mask: Tensor | None,
    key: AttentionSpec,
    sinks: Tensor | None,
    bias: Tensor | None = None,
    exact: bool = False,
) -> Tensor:
    """`attend` with the G query heads of a KV head folded into the query axis.

    query [b, Hkv, G·Q, Dk] -> [b, Hkv, G·Q, Dv]; mask: [b, 1, G·Q, S] bool or None; bias: see `Segment`. exact: of
    rounded queries, keys and values.
    """
    dtype = torch.float64 if exact else torch.promote_types(query.dtype, torch.float32)
    q = query.to(dtype)
    k = key_states.to(dtype)
    v = value_states.to(dtype)
    if not exact and key.softcap is None and sinks is None and bias is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=key.scale)
    scores = (q @ k.transpose(-1, -2)) * key.scale  # [b, Hkv, G·Q, S]
    if key.softcap is not None:
        scores = key.softcap * torch.tanh(scores / key.softcap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        per_query = sinks.to(dtype).view(key.num_kv_heads, -1, 1)  # [Hkv, G, 1]
        column = per_query.expand(-1, -1, q.shape[2] // per_query.shape[1]).reshape(1, key.num_kv_heads, -1, 1)
        scores = torch.cat([scores, column.expand(q.shape[0], -1, -1, -1)], -1)
    return _mixed_exactly(scores, v) if exact else scores.softmax(-1)[..., : v.shape[2]] @ v


def _mixed_exactly(scores: Tensor, v: Tensor) -> Tensor:
    """scores [b, Hkv, M, S or, with sinks, S+1], rounded values [b, Hkv, S, Dv] -> softmax of scores times values."""
    weights = _to_multiples(scores.sub_(scores.amax(-1, keepdim=True)).exp_(), _EXPONENTIAL)
    total = weights.sum(-1, keepdim=True)
    weights = weights[..., : v.shape[2]]
    size = _power_of_two(v.abs().amax(-1)).clamp_(min=1e-200)[:, :, None]  # of each key's values, zeros among them
    bound = _power_of_two(total) * (size * (weights > 0)).amax(-1, keepdim=True)  # 4 of it exceed the sum of products
    return _to_multiples(weights, bound / size * _WEIGHT) @ v / total


def _rounded(x: Tensor) -> Tensor:
    """Vectors x [..., D] as multiples of 2**-21 of the power of two below their largest element.

    >>> _rounded(torch.tensor([[4.0, 1e-7], [4.0, 1e-6]])).tolist() == [[4.0, 0.0], [4.0, 2**-20]]
    True
    """
    wide = x.to(torch.float64, copy=True)
    return _to_multiples(wide, _power_of_two(wide.abs().amax(-1, keepdim=True)) * _VECTOR).to(x.dtype)


def _to_multiples(x: Tensor, step: Tensor | float) -> Tensor:
    """x float64 as the nearest multiples of `step`, powers of two; in place."""
    large = step * _LARGE
    return x.add_(large).sub_(large)


def _power_of_two(x: Tensor) -> Tensor:
    """The largest powers of two up to x >= 0, float64: its exponent without its digits."""
    return (x.view(torch.int64) & 0x7FF0000000000000).view(torch.float64)
