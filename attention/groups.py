"""Layers in cache groups by how far they reach back, and `GroupedRunner`: several groups served as one.

Layers with a sliding window need only the keys of the window, layers with chunked attention only the keys of the chunk.
A *windowed group* of such layers has its own pages and frees those behind the window or chunk
(`attention/cache/windowed.py`). The layers that reach furthest are the first group, whose pages stay; a batch carries
the others as `other_groups`.

Source: vllm-project/vllm, "hybrid KV cache manager" (vllm/v1/core/kv_cache_coordinator.py). vLLM's groups have equally
many layers and share one pool; here each group has a separate pool, which keeps groups few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attention.backends.base import AttentionBackend
from attention.batch.metadata import CommonAttentionMetadata
from attention.cache.kv_cache import CacheGroup
from attention.errors import InvalidInputError
from attention.runner import FixedPlanner, GroupRunner, PlannedBatch
from attention.spec import AttentionSpec, Reach, Windows


def reaches_of(specs: Sequence[AttentionSpec], longest: int) -> tuple[Reach, ...]:
    """The reaches whose layers get a windowed group, largest first.

    The layers that reach furthest get none, they are the first group: layers that see everything, or without these,
    layers with the largest reach.

    Args:
        longest: most tokens of a request; a reach that covers all of them does not count.

    >>> full = AttentionSpec(1, 1, 8, 8, 1.0)
    >>> near, far = AttentionSpec(1, 1, 8, 8, 1.0, window=16), AttentionSpec(1, 1, 8, 8, 1.0, chunk_size=64)
    >>> [[str(reach) for reach in reaches_of([near, *more, far], 99)] for more in ([full], [])]
    [['chunks of 64', 'window 16'], ['window 16']]
    """
    every = Reach(longest)
    reaches = {every if spec.reach is None or spec.reach.tokens >= longest else spec.reach for spec in specs}
    return tuple(sorted(reaches, reverse=True)[1:])


def layers_by_group(specs: Sequence[AttentionSpec], reaches: Sequence[Reach]) -> tuple[tuple[int, ...], ...]:
    """The layers of the first group, then the layers of each windowed group.

    >>> full, near = AttentionSpec(1, 1, 8, 8, 1.0), AttentionSpec(1, 1, 8, 8, 1.0, window=16)
    >>> layers_by_group([near, near, full], [Reach(16)])
    ((2,), (0, 1))
    """
    group_of: dict[Reach | None, int] = {reach: number for number, reach in enumerate(reaches, 1)}
    groups: list[list[int]] = [[] for _ in range(len(reaches) + 1)]
    for layer, spec in enumerate(specs):
        groups[group_of.get(spec.reach, 0)].append(layer)
    return tuple(map(tuple, groups))


def split_group(group: CacheGroup, windowed: Windows) -> tuple[CacheGroup, ...]:
    """A group of all layers as the first group and one for each of `windowed`, pairs (reach, pages of its pool).

    Raises:
        InvalidInputError: no layer has such a reach, or none is left for the first group.
    """
    by_group = layers_by_group(group.attention_specs, [reach for reach, _ in windowed])
    if not all(by_group):
        wanted = ", ".join(str(reach) for reach, _ in windowed)
        given = [spec.reach for spec in group.attention_specs]
        raise InvalidInputError(
            f"group {group.name}: {wanted} do not divide layers with {', '.join(map(str, given))} into groups"
        )
    first, *others = (_part(group, layers) for layers in by_group)
    named = zip(others, windowed, strict=True)
    return first, *(replace(g, name=f"{group.name}, {reach}", num_pages=n) for g, (reach, n) in named)


def _part(group: CacheGroup, layers: tuple[int, ...]) -> CacheGroup:
    scales = tuple(group.format.scales[layer] for layer in layers) if group.format.scales else ()
    specs = tuple(group.attention_specs[layer] for layer in layers)
    return replace(group, attention_specs=specs, format=replace(group.format, scales=scales))


class GroupedRunner:
    """The attention of several cache groups over one backend, with the interface of `GroupRunner`.

    Attributes:
        runners: one per group, the first group's first. layer_numbers: by group name, its layers' numbers in the model.
        layers: cache tensors in the order of the model's layers.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        group: CacheGroup,
        windowed: Windows,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """group: contains all layers; windowed: see `split_group`. Raises the same errors as `GroupRunner`."""
        parts = split_group(group, windowed)
        self.runners = tuple(GroupRunner(backend, part, dtype, device) for part in parts)
        layers = layers_by_group(group.attention_specs, [reach for reach, _ in windowed])
        self.layer_numbers = {part.name: own for part, own in zip(parts, layers, strict=True)}
        self._places = _places(layers)
        self.layers = tuple(self.runners[g].layers[place] for g, place in self._places)

    @property
    def page_size(self) -> int:
        return self.runners[0].page_size

    @property
    def batch_invariant(self) -> bool:
        return self.runners[0].batch_invariant

    def plan(self, metadata: CommonAttentionMetadata) -> PlannedBatch:
        """Plan a batch for every group. No device synchronisation."""
        first, *others = self.runners
        planned = (runner.plan(own) for runner, own in zip(others, metadata.other_groups, strict=True))
        return replace(first.plan(metadata), others=tuple(planned))

    def blank(self, metadata: CommonAttentionMetadata) -> PlannedBatch:
        first, *others = (runner.blank(metadata) for runner in self.runners)
        return replace(first, others=tuple(others))

    def fixed_planner(self, rows: int, query_len: int, beside: FixedPlanner | None = None) -> FixedPlanner:
        """A planner of every group, see `GroupRunner.fixed_planner`; `beside` applies to the first group."""
        first, *others = self.runners
        return first.fixed_planner(rows, query_len, beside, tuple(g.fixed_planner(rows, query_len) for g in others))

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
        """Layer `layer` of the model, see `GroupRunner.attend`; planned: a `PlannedBatch` of this runner."""
        group, place = self._places[layer]
        own = planned.others[group - 1] if group else planned
        return self.runners[group].attend(own, place, query, key, value, sinks, out)


Runner = GroupRunner | GroupedRunner
"""The attention of a model's layers, in one cache group or in several."""


def runner_of(
    backend: AttentionBackend,
    group: CacheGroup,
    windowed: Windows,
    dtype: torch.dtype,
    device: torch.device,
) -> Runner:
    """The attention of all layers as one group, or divided if it has windowed groups; see `GroupedRunner`."""
    if not windowed:
        return GroupRunner(backend, group, dtype, device)
    return GroupedRunner(backend, group, windowed, dtype, device)


def _places(layer_numbers: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """The group of each layer, and its number there.

    >>> _places([(2,), (0, 1)])
    ((1, 0), (1, 1), (0, 0))
    """
    found = {layer: (g, place) for g, layers in enumerate(layer_numbers) for place, layer in enumerate(layers)}
    return tuple(found[layer] for layer in range(len(found)))
