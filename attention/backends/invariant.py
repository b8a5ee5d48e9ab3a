"""Attention by specdec's own kernel whose result for a token has the same bits whatever else is in the batch.

With it, matmuls and norms of the same kind (`specdec/ops/linear.py`), half precision gives the same tokens with drafts
and without: a verification of several tokens computes the same values as steps of one token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attention.backends.limits import HALF, check_causal, check_heads, dtype_name
from attention.batch.host import HostBatch
from attention.batch.metadata import CommonAttentionMetadata
from attention.cache.kv_cache import CacheGroup, LayerKV
from attention.errors import UnsupportedAttentionError
from attention.spec import AttentionSpec


@dataclass(frozen=True)
class InvariantPlan:
    """All that a launch needs besides the batch's arrays on the device."""

    max_query_len: int


class InvariantBuilder:
    """The kernel does not split KV, so planning is empty."""

    def __init__(self, max_query_len: int | None = None) -> None:
        """max_query_len: longest query of all batches that replay the launch; None: that of the batch being planned."""
        self._max_query_len = max_query_len

    def build(self, metadata: CommonAttentionMetadata) -> InvariantPlan:
        most = self._max_query_len
        return InvariantPlan(metadata.max_query_len if most is None else most)

    def replan(self, host: HostBatch) -> None:
        """See `FixedMetadataBuilder`."""


def own_kernel(group: CacheGroup, key: AttentionSpec, dtype: torch.dtype) -> str:
    """Describe the layer that the kernel is compiled for.

    >>> group = CacheGroup("target", (), 4, 16)
    >>> own_kernel(group, AttentionSpec(8, 2, 192, 128, 1.0), torch.bfloat16)
    'Triton kernel, bfloat16, head dims 192 and 128'
    """
    dims = f"head dim {key.head_dim_k}"
    if key.head_dim_v != key.head_dim_k:
        dims = f"head dims {key.head_dim_k} and {key.head_dim_v}"
    cache = "" if group.format.dtype is None else f", cache {dtype_name(group.format.dtype)}"
    return f"Triton kernel, {dtype_name(dtype)}, {dims}{cache}"


def run_invariant(
    plan: InvariantPlan,
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
    from attention.kernels.cache_write import write_kv
    from attention.kernels.invariant_kernel import launch_invariant_attention

    write_kv(layer_kv, key_states, value_states, metadata.slot_mapping)
    out = key.room(query, out)
    launch_invariant_attention(query, layer_kv, key, plan.max_query_len, metadata, sinks, out)
    return out


def check_supported(group: CacheGroup, key: AttentionSpec, dtype: torch.dtype) -> None:
    """Refuse layers that this backend does not support, before anything is allocated.

    Raises:
        UnsupportedAttentionError: dtype, head dim, head counts, MLA, or a cache in 8 bits.
    """
    check_causal(key, group.name, "batch_invariant")
    where = f"group {group.name}: batch-invariant attention"
    if dtype not in HALF:
        raise UnsupportedAttentionError(
            f"{where} takes float16 and bfloat16, given {dtype}; in float32 backend='torch' decides every answer alike"
        )
    if key.value_in_key:
        raise UnsupportedAttentionError(f"{where} does not serve MLA; use backend='flashinfer'")
    check_heads(key, where)
    if group.format.dtype is not None:
        raise UnsupportedAttentionError(f"{where} has no cache in 8 bits; use kv_cache_dtype='auto'")


class InvariantBackend:
    """`GraphBackend` for heads of any width up to 512: GQA, sliding window, softcap, sinks; no cache in 8 bits."""

    name = "batch_invariant"
    batch_invariant = True

    def route(self, group: CacheGroup, key: AttentionSpec, dtype: torch.dtype) -> str:
        return f"batch-invariant {own_kernel(group, key, dtype)}"

    def builder(self, group: CacheGroup, key: AttentionSpec, dtype: torch.dtype) -> InvariantBuilder:
        """A builder for `key`; see `check_supported` for what it raises."""
        check_supported(group, key, dtype)
        return InvariantBuilder()

    def fixed_builder(
        self,
        group: CacheGroup,
        key: AttentionSpec,
        dtype: torch.dtype,
        rows: int,
        query_len: int,
        beside: object | None = None,
        tokens: int | None = None,
    ) -> InvariantBuilder:
        check_supported(group, key, dtype)
        return InvariantBuilder(query_len)

    run = staticmethod(run_invariant)
