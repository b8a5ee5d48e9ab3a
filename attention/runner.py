"""GroupRunner: one cache group, its tensors and its builders. Plans a batch once, then serves every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.backends.base import (
    AttendsBothWays,
    AttentionBackend,
    AttentionMetadataBuilder,
    Building,
    FixedMetadataBuilder,
    GraphBackend,
)
from attention.backends.building import Builds
from attention.backends.limits import check_causal
from attention.batch.host import HostBatch
from attention.batch.metadata import CommonAttentionMetadata, with_rows
from attention.cache.kv_cache import CacheGroup, allocate, write
from attention.checking import CHECKS, require
from attention.errors import UnsupportedAttentionError
from attention.spec import AttentionSpec, TemperatureTuning

if TYPE_CHECKING:
    from attention.batch.transforms.local_attention import FixedLocalRows


@dataclass(frozen=True)
class PlannedBatch:
    """One batch (`metadata`) planned for every distinct AttentionSpec of a group.

    Attributes:
        plans: the backend's plan for each spec; None for a batch without attention, see `GroupRunner.blank`.
        rows: the batch in the rows that each spec's layers attend, where some attend in chunks; {} where none do.
        temperatures: [T', 1, 1] float32 factors of the queries, padding included, for layers with temperature tuning.
            A launch's first tuned layer computes them, so that a captured launch does so with every round's positions.
        others: the batch planned for each further cache group, see `attention.groups.GroupedRunner`.
    """

    metadata: CommonAttentionMetadata
    plans: dict[AttentionSpec, Any] | None
    rows: Mapping[AttentionSpec, CommonAttentionMetadata] = field(default_factory=dict)
    temperatures: dict[TemperatureTuning, Tensor] = field(default_factory=dict)
    others: tuple[PlannedBatch, ...] = ()


def _planned(
    metadata: CommonAttentionMetadata,
    builders: Mapping[AttentionSpec, AttentionMetadataBuilder],
    in_chunks: Mapping[int, CommonAttentionMetadata],
) -> PlannedBatch:
    """A batch planned by these builders; in_chunks: the batch in virtual rows by chunk size."""
    rows = {key: metadata if key.chunk_size is None else in_chunks[key.chunk_size] for key in builders}
    return PlannedBatch(metadata, {key: builder.build(rows[key]) for key, builder in builders.items()}, rows)


@dataclass(eq=False)
class FixedPlanner:
    """Plans batches of one fixed shape into fixed buffers, for the launches that a CUDA graph holds.

    num_pages: size of the pool. local: by chunk size, the virtual rows of layers with chunked attention. others:
    planners of the further cache groups, whose batches come with those of the first.
    """

    builders: dict[AttentionSpec, FixedMetadataBuilder]
    num_pages: int
    local: Mapping[int, FixedLocalRows]
    others: tuple[FixedPlanner, ...]

    def plan(self, metadata: CommonAttentionMetadata) -> PlannedBatch:
        """Plan a batch of the fixed shape. Raises InvariantError, in check mode, for a page that is not in the pool."""
        if CHECKS.on:
            metadata.host.validate_pages(self.num_pages)
        in_chunks = {size: rows.metadata(metadata) for size, rows in self.local.items()}
        others = zip(self.others, metadata.other_groups, strict=bool(self.others))
        planned = tuple(planner.plan(own) for planner, own in others)
        return replace(_planned(metadata, self.builders, in_chunks), others=planned)

    def replan(self, host: HostBatch) -> None:
        """Plan another batch of this shape whose device arrays have the addresses of the last `plan`'s."""
        if CHECKS.on:
            host.validate_pages(self.num_pages)
        for planner, own in zip(self.others, host.other_groups, strict=bool(self.others)):
            planner.replan(own)
        in_chunks = {size: rows.send(host)[0] for size, rows in self.local.items()}
        for key, builder in self.builders.items():
            builder.replan(host if key.chunk_size is None else in_chunks[key.chunk_size])


class GroupRunner:
    """The attention of one cache group over one backend."""

    def __init__(self, backend: AttentionBackend, group: CacheGroup, dtype: torch.dtype, device: torch.device) -> None:
        """Nothing is allocated when it raises.

        Raises:
            UnsupportedAttentionError: the backend lacks a variant of the group.
            InvalidInputError: a layer attends in chunks that the page size does not divide.
        """
        self.group = group
        self._chunk_sizes = tuple(
            dict.fromkeys(s.chunk_size for s in group.attention_specs if s.chunk_size is not None)
        )
        for chunk_size in self._chunk_sizes:
            from attention.batch.transforms.local_attention import check_chunk_size

            check_chunk_size(chunk_size, group.page_size)
        if not isinstance(backend, AttendsBothWays):
            for key in group.attention_specs:
                check_causal(key, group.name, backend.name)
        specs = reversed(list(enumerate(group.attention_specs)))
        self._first_tuned = {spec.temperature: layer for layer, spec in specs if spec.temperature is not None}
        self._backend = backend
        self._dtype = dtype
        self._device = device
        self._builders = {key: backend.builder(group, key, dtype) for key in dict.fromkeys(group.attention_specs)}
        self.layers = allocate(group, dtype, device)

    @property
    def runners(self) -> tuple[GroupRunner, ...]:
        """Itself: the one group of these layers. See `attention.groups.GroupedRunner`."""
        return (self,)

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.group.page_size

    @property
    def batch_invariant(self) -> bool:
        """See `AttentionBackend.batch_invariant`."""
        return self._backend.batch_invariant

    @property
    def routes(self) -> tuple[str, ...]:
        """Which kernels serve the group, in words; equal ones once."""
        return tuple(dict.fromkeys(self._route(key) for key in self._builders))

    def _route(self, key: AttentionSpec) -> str:
        local = "" if key.chunk_size is None else f", in chunks of {key.chunk_size} tokens"
        return self._backend.route(self.group, key, self._dtype) + local

    def plan(self, metadata: CommonAttentionMetadata) -> PlannedBatch:
        """Plan a batch for every distinct AttentionSpec. No device synchronisation.

        Raises:
            InvariantError: in check mode, a page is not in the pool.
        """
        if CHECKS.on:
            metadata.host.validate_pages(self.group.num_pages)
        if not self._chunk_sizes:
            return PlannedBatch(metadata, {key: builder.build(metadata) for key, builder in self._builders.items()})
        return _planned(metadata, self._builders, {size: _in_chunks(metadata, size) for size in self._chunk_sizes})

    @staticmethod
    def blank(metadata: CommonAttentionMetadata) -> PlannedBatch:
        """A batch whose attention returns zeros and leaves the cache unchanged, so that a model can run before its
        kernels are built."""
        return PlannedBatch(metadata, None)

    @property
    def builds(self) -> Builds:
        """The group's kernels that are built in the background."""
        found = (builder.builds for builder in self._builders.values() if isinstance(builder, Building))
        return tuple(dict.fromkeys(build for builds in found for build in builds))

    def fixed_planner(
        self, rows: int, query_len: int, beside: FixedPlanner | None = None, others: tuple[FixedPlanner, ...] = ()
    ) -> FixedPlanner:
        """A planner for `rows` rows of `query_len` tokens each.

        Args:
            beside: another group's planner of this shape that is always planned just before this one, for the same
                lengths.
            others: see `FixedPlanner`.

        Raises:
            UnsupportedAttentionError: the backend has no plans that a CUDA graph can hold.
        """
        backend = self._backend
        group = self.group
        if not isinstance(backend, GraphBackend):
            raise UnsupportedAttentionError(f"backend {backend.name!r} has no plans that a CUDA graph can hold")
        local = {size: self._local_rows(rows, query_len, size) for size in self._chunk_sizes}
        builders = {}
        for key in self._builders:
            own = (group, key, self._dtype)
            shared = None if beside is None else beside.builders.get(key)
            if key.chunk_size is None or query_len == 1:  # a single token lies in one chunk
                builders[key] = backend.fixed_builder(*own, rows, query_len, shared)
            else:
                virtual = local[key.chunk_size].num_rows
                most = min(query_len, key.chunk_size)
                builders[key] = backend.fixed_builder(*own, virtual, most, shared, tokens=rows * query_len)
        return FixedPlanner(builders, group.num_pages, local, others)

    def _local_rows(self, rows: int, query_len: int, chunk_size: int) -> FixedLocalRows:
        from attention.batch.transforms.local_attention import FixedLocalRows

        return FixedLocalRows(rows, query_len, chunk_size, self.group.page_size, self.group.num_pages, self._device)

    def attend(
        self,
        planned: Any,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Layer `layer` of the group: query [T, Hq, Dk], key [T, Hkv, Dk], value [T, Hkv, Dv] -> [T, Hq, Dv].

        planned: a `PlannedBatch` of this runner. Padding after the batch's T tokens, and `out`: see
        `AttentionBackend.run`.

        Raises:
            StaleMetadataError: in check mode, the batch's arrays show another batch by now, whatever the backend.
        """
        spec = self.group.attention_specs[layer]
        if planned.plans is None:
            return spec.room(query, out).zero_()
        if CHECKS.on:
            planned.metadata.staged.ensure_fresh()
        given = out
        if spec.temperature is not None:
            query = self._tuned(planned, layer, spec.temperature, query)
        rows = planned.metadata if spec.chunk_size is None else planned.rows[spec]
        out = self._backend.run(planned.plans[spec], spec, query, key, value, self.layers[layer], rows, sinks, out)
        if CHECKS.on:
            require(given is None or out is given, f"backend {self._backend.name!r} left its result elsewhere")
            require(out.is_contiguous(), f"backend {self._backend.name!r} returned attention that is not contiguous")
        return out

    def write(self, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write key [T, Hkv, Dk] and value [T, Hkv, Dv] of T tokens to their slots [T] int64 of a layer."""
        if not key.is_cuda:
            return write(self.layers[layer], key, value, slots)
        from attention.kernels.cache_write import write_kv

        return write_kv(self.layers[layer], key, value, slots)

    def _tuned(self, planned: PlannedBatch, layer: int, tuning: TemperatureTuning, query: Tensor) -> Tensor:
        """Scaled queries [T', Hq, Dk] of a layer with temperature tuning."""
        if layer == self._first_tuned[tuning] or tuning not in planned.temperatures:
            # [T, 1, 1] float32, by the operations of transformers in their order.
            steps = torch.floor((planned.metadata.positions.float() + 1.0) / tuning.floor)
            factors = (torch.log1p(steps) * tuning.scale + 1.0)[:, None, None]
            planned.temperatures[tuning] = F.pad(factors, (0, 0, 0, 0, 0, len(query) - len(factors)))
        return (query * planned.temperatures[tuning]).to(query.dtype)


def _in_chunks(metadata: CommonAttentionMetadata, chunk_size: int) -> CommonAttentionMetadata:
    """The batch in virtual rows; itself when every row lies in its first chunk."""
    if int(metadata.host.seq_lens.max(initial=0)) <= chunk_size:
        return metadata
    from attention.batch.transforms.local_attention import local_attention

    return with_rows(metadata, local_attention(metadata.host, chunk_size))
