"""The two interfaces of this package: `AttentionBackend` and `AttentionMetadataBuilder`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attention.spec import AttentionSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from attention.backends.building import Builds
    from attention.batch.host import HostBatch
    from attention.batch.metadata import CommonAttentionMetadata
    from attention.cache.kv_cache import CacheGroup, KVLayout, LayerKV


class AttentionMetadataBuilder(Protocol):
    """Turns one batch's metadata into a plan for one (CacheGroup, AttentionSpec). Planning depends on nothing else.

    No cache tensors, model or engine are needed to plan: see examples/plan_without_engine.py.
    """

    def build(self, metadata: CommonAttentionMetadata) -> Any:
        """Return the plan that `AttentionBackend.run` takes. Never synchronises with the device."""


@runtime_checkable
class Building(Protocol):
    """A builder whose kernels are built in the background, from the moment it is made."""

    @property
    def builds(self) -> Builds:
        """The kernels that are or were being built."""


class AttentionBackend(Protocol):
    """A family of attention kernels over the paged KV cache."""

    name: str
    batch_invariant: bool
    """Whether a token's result is the same bits whatever else is in the batch and however its row is chunked."""

    def route(self, group: CacheGroup, key: AttentionSpec, dtype: torch.dtype) -> str:
        """Which kernels serve `key`, in words, for people."""

    def builder(self, group: CacheGroup, key: AttentionSpec, dtype: torch.dtype) -> AttentionMetadataBuilder:
        """Return a builder for queries and cache of `dtype`.

        Raises:
            UnsupportedAttentionError: the variant is not offered.
        """

    def run(
        self,
        plan: Any,
        key: AttentionSpec,
        query: Tensor,
        key_states: Tensor,
        value_states: Tensor,
        layer_kv: LayerKV,
        metadata: CommonAttentionMetadata,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Write K and V of the batch's tokens into the cache, then attend.

        This runs for every layer of every round that is no graph as a whole: an implementation calls no operator that
        its kernels do not need.

        Args:
            plan: the result of this backend's builder for `metadata`.
            query: [T', Hq, Dk]; key_states: [T', Hkv, Dk]; value_states: [T', Hkv, Dv] (not read when value_in_key).
                The first T rows are the batch's tokens; others are padding, neither written nor attended.
                Any strides whose last one is 1: models hand out slices and transposed views.
            layer_kv: the layer's cache tensors.
            sinks: [Hq] or None.
            out: [T', Hq, Dv] contiguous, dtype of `query`, to be written to; default a new tensor. Its padding rows
                stay as they are.

        Returns:
            `out`. Padding rows of a new tensor may hold anything.
        """


@runtime_checkable
class AttendsBothWays(Protocol):
    """A backend that serves layers that are not causal; of all others `GroupRunner` refuses them."""

    both_ways: bool
    """True."""


@runtime_checkable
class PrefersLayout(Protocol):
    """A backend whose kernels read one order inside a page better than the other, on its device."""

    @property
    def preferred_layout(self) -> KVLayout:
        """The layout that `kv_cache_layout="auto"` selects for this backend."""


class FixedMetadataBuilder(AttentionMetadataBuilder, Protocol):
    """Plans batches of one shape into the same buffers every time, for launches that a CUDA graph holds."""

    def replan(self, host: HostBatch) -> None:
        """Plan another batch of this shape whose device arrays have the addresses of the last `build`'s."""


@runtime_checkable
class GraphBackend(AttentionBackend, Protocol):
    """A backend whose launches a CUDA graph can hold while the plan changes from replay to replay."""

    def fixed_builder(
        self,
        group: CacheGroup,
        key: AttentionSpec,
        dtype: torch.dtype,
        rows: int,
        query_len: int,
        beside: FixedMetadataBuilder | None = None,
        tokens: int | None = None,
    ) -> FixedMetadataBuilder:
        """A builder for batches of exactly `rows` rows with `query_len` tokens each.

        Args:
            tokens: token count of the batch if rows have varying lengths 0 … query_len (virtual rows of local
                attention); None: rows·query_len.
            beside: a builder of the same shape that is always planned just before this one, for batches of the same
                lengths; where both plans would be equal, the new builder may reuse its plan.

        Raises:
            UnsupportedAttentionError: the variant is not offered.
        """
