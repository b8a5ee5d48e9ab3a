"""GroupRunner: one cache group, its tensors and its builders. Plans a batch once, then serves every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attention.backends.base import AttentionBackend, Building, FixedMetadataBuilder, GraphBackend
from attention.backends.building import Build
from attention.batch.host import HostBatch
from attention.batch.metadata import CommonAttentionMetadata
from attention.cache.kv_cache import CacheGroup, LayerKV, allocate
from attention.checking import checking, require
from attention.errors import UnsupportedAttentionError
from attention.spec import AttentionSpec


@dataclass(frozen=True)
class PlannedBatch:
    """One batch planned for every distinct AttentionSpec of a group.

    plans: None for a batch that nothing attends to, see `GroupRunner.blank`.
    """

    metadata: CommonAttentionMetadata
    plans: dict[AttentionSpec, Any] | None


class FixedPlanner:
    """Plans batches of one fixed shape into fixed buffers, for the launches that a CUDA graph holds."""

    def __init__(self, builders: dict[AttentionSpec, FixedMetadataBuilder]) -> None:
        self._builders = builders

    def plan(self, metadata: CommonAttentionMetadata) -> PlannedBatch:
        """Plan a batch of the fixed shape."""
        return PlannedBatch(metadata, {key: builder.build(metadata) for key, builder in self._builders.items()})

    def builder(self, key: AttentionSpec) -> FixedMetadataBuilder | None:
        """The builder of a key, if there is one."""
        return self._builders.get(key)

    def replan(self, host: HostBatch) -> None:
        """Plan another batch of the shape; its device arrays lie where those of the last `plan` did."""
        for builder in self._builders.values():
            builder.replan(host)


class GroupRunner:
    """The attention of one cache group over one backend."""

    def __init__(self, backend: AttentionBackend, group: CacheGroup, dtype: torch.dtype, device: torch.device) -> None:
        """Raises UnsupportedAttentionError when the backend lacks a variant of the group; nothing is allocated then."""
        self.group = group
        self._backend = backend
        self._dtype = dtype
        self._builders = {key: backend.builder(group, key, dtype) for key in dict.fromkeys(group.attention_specs)}
        self.layers: tuple[LayerKV, ...] = allocate(group, dtype, device)

    @property
    def batch_invariant(self) -> bool:
        """See `AttentionBackend.batch_invariant`."""
        return self._backend.batch_invariant

    @property
    def routes(self) -> tuple[str, ...]:
        """Which kernels serve the group, in words; equal ones once."""
        return tuple(dict.fromkeys(self._backend.route(self.group, key, self._dtype) for key in self._builders))

    def plan(self, metadata: CommonAttentionMetadata) -> PlannedBatch:
        """Plan a batch for every distinct AttentionSpec. No device synchronisation."""
        return PlannedBatch(metadata, {key: builder.build(metadata) for key, builder in self._builders.items()})

    @staticmethod
    def blank(metadata: CommonAttentionMetadata) -> PlannedBatch:
        """A batch whose attention is zeros and leaves the cache alone: to run a model before its kernels are there."""
        return PlannedBatch(metadata, None)

    @property
    def builds(self) -> tuple[Build, ...]:
        """The group's kernels that are built in the background."""
        found = (builder.builds for builder in self._builders.values() if isinstance(builder, Building))
        return tuple(dict.fromkeys(build for builds in found for build in builds))

    def fixed_planner(self, rows: int, query_len: int, beside: FixedPlanner | None = None) -> FixedPlanner:
        """A planner for `rows` rows of `query_len` tokens each.

        `beside`: another group's planner of this shape, always planned just before this one for the same lengths.

        Raises:
            UnsupportedAttentionError: the backend has no plans that a CUDA graph can hold.
        """
        backend = self._backend
        if not isinstance(backend, GraphBackend):
            raise UnsupportedAttentionError(f"backend {backend.name!r} has no plans that a CUDA graph can hold")
        args = (self._dtype, rows, query_len)
        return FixedPlanner(
            {
                key: backend.fixed_builder(self.group, key, *args, None if beside is None else beside.builder(key))
                for key in dict.fromkeys(self.group.attention_specs)
            }
        )

    def attend(
        self,
        planned: PlannedBatch,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Layer `layer` of the group: query [T, Hq, Dk], key [T, Hkv, Dk], value [T, Hkv, Dv] -> [T, Hq, Dv].

        Padding after the batch's T tokens, and `out`: see `AttentionBackend.run`.
        """
        spec = self.group.attention_specs[layer]
        if planned.plans is None:
            return query.new_zeros(query.shape[0], spec.num_q_heads, spec.head_dim_v) if out is None else out.zero_()
        given = out
        out = self._backend.run(
            planned.plans[spec], spec, query, key, value, self.layers[layer], planned.metadata, sinks, out
        )
        if checking():
            require(given is None or out is given, f"backend {self._backend.name!r} left its result elsewhere")
            require(out.is_contiguous(), f"backend {self._backend.name!r} returned attention that is not contiguous")
        return out
