"""Rounds of any shape (prompts with verifications) from graphs by segments: one set for each bucket of tokens.

The tokens of a round are padded up to its bucket; attention sees only the real tokens. Captured at the start are: the
largest bucket, in whose memory all others lie; the smallest bucket, so that code with separate forms for few and for
many tokens (mixtures of experts) is compiled; and the buckets of rows that decode while a long prompt is read. Any
other bucket is captured when it is first needed, in about a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attention.batch.metadata import CommonAttentionMetadata
from attention.hf.custom_op import LayerAttend
from attention.runner import GroupRunner, PlannedBatch
from drafters.loops.base import CarriedRows, Chosen, FixedLoop, FixedPrefill, PassesAttend, PrefillPasses
from specdec.acceptance.packed import PackedResult
from specdec.config import EngineConfig
from specdec.execution.segments import Between, SegmentedGraph, record_segments, unowned
from specdec.rounds.buckets import TILE_TOKENS, power_of_two, prefill_budget
from specdec.rounds.transfer import DeviceAhead
from specdec.values import Function
from specdec.wrapped.group import Group
from specdec.wrapped.target import Target

Compiling = Callable[[], AbstractContextManager[None]]

_LEAST_TOKENS = 64
_STEPS = 16
"""Buckets up to a power of two: from 1,024 tokens on, at most an eighth of a round is padding."""
_FEW = 4
"""The fewer logits indices that graphs are captured for, as a share of all: a quarter."""


def token_bucket(tokens: int, most: int) -> int:
    """Tokens of the graph for a round of `tokens` tokens.

    >>> [token_bucket(n, 3000) for n in (1, 65, 500, 600, 1100, 2049, 2999)]
    [64, 128, 512, 640, 1152, 2304, 3000]
    """
    least = TILE_TOKENS if tokens > 4 * TILE_TOKENS else _LEAST_TOKENS
    step = max(least, power_of_two(tokens) // _STEPS)
    return min(-(-tokens // step) * step, max(most, 2))


def mixed_bucket(config: EngineConfig, rows: int) -> int:
    """Tokens of the graph for `rows` decoding rows in a round that reads as many prompt tokens as it may.

    >>> config = EngineConfig(3, 4096, 32, 2048, 16, 100, max_num_prefill_tokens=512)
    >>> [mixed_bucket(config, rows) for rows in (32, 24, 16, 1)]
    [640, 512, 512, 512]
    """
    tokens = rows * (config.num_speculative_tokens + 1)
    return token_bucket(tokens + prefill_budget(config, tokens), config.max_num_batched_tokens)


def mixed_buckets(config: EngineConfig, rows: int) -> set[int]:
    """Tokens of all graphs for rounds of up to `rows` decoding rows with prompt tokens.

    >>> config = EngineConfig(3, 4096, 32, 2048, 16, 100, max_num_prefill_tokens=512)
    >>> sorted(mixed_buckets(config, 32))
    [64, 128, 192, 256, 320, 384, 448, 512, 640]
    """
    most = mixed_bucket(config, rows)
    return {token_bucket(tokens, most) for tokens in range(1, most + 1, _LEAST_TOKENS)}


@dataclass(frozen=True)
class _TargetGraph:
    """token_ids, positions [T] and logits_indices [R] are read, logits [R, V] and the aux hidden states written."""

    token_ids: Tensor
    positions: Tensor
    logits_indices: Tensor
    graph: SegmentedGraph
    logits: Tensor


@dataclass(frozen=True)
class _PrefillGraph:
    """inputs and positions [T] of each pass are read, the loop's own buffers and `chosen` written."""

    inputs: FixedPrefill
    positions: tuple[Tensor, ...]
    graph: SegmentedGraph
    chosen: Chosen


class RaggedTarget:
    """The compiled target on any batch."""

    def __init__(self, target: Target, model: Function, config: EngineConfig, pool: Any, compiling: Compiling) -> None:
        """model: the compiled target; compiling: the state in which it was compiled."""
        self._compiling = compiling
        self._target = target
        self._model = model
        self._config = config
        self._most_tokens = config.max_num_batched_tokens
        self._most_indices = max(2, config.max_num_seqs * (config.num_speculative_tokens + 1))
        self._few_indices = max(2, self._most_indices // _FEW)
        self._pool = pool
        self._graphs: dict[tuple[int, int], _TargetGraph] = {}

    def logits(self, token_ids: Tensor, metadata: CommonAttentionMetadata, logits_indices: Tensor) -> Tensor:
        """token_ids [T], logits_indices [R'] -> [R', V], valid until the next graph runs."""
        count = len(token_ids)
        rows = len(logits_indices)
        graph = self._graph(token_bucket(count, self._most_tokens), self._index_bucket(rows))
        graph.token_ids[:count].copy_(token_ids)
        graph.positions[:count].copy_(self._target.rotary_positions(metadata))
        graph.logits_indices[:rows].copy_(logits_indices)
        graph.logits_indices[rows:].zero_()
        graph.graph.replay(partial(self._between, metadata))
        return graph.logits[:rows]

    def _between(self, metadata: CommonAttentionMetadata) -> Between:
        """Plan what a batch needs between the graphs."""
        planned = self._target.runner.plan(metadata)
        return Between(partial(self._target.runner.attend, planned), self._target.recur(planned))

    def capture_expected(self, rows: Iterable[int]) -> None:
        """Capture the largest bucket, the smallest, and those for these numbers of decoding rows, see `mixed_bucket`.

        The largest bucket twice: of prompts alone, which decide at most one token a row, and of a call's prompts beside
        its own rows that decode.
        """
        config = self._config
        query_len = self._config.num_speculative_tokens + 1
        for indices in (config.max_num_seqs, self._most_indices):
            self._graph(token_bucket(self._most_tokens, self._most_tokens), self._index_bucket(indices))
        for n in rows:
            self._graph(mixed_bucket(config, n), self._index_bucket(n * query_len))
        self._graph(token_bucket(1, self._most_tokens), self._few_indices)

    @property
    def num_graphs(self) -> int:
        """Graphs captured so far."""
        return sum(each.graph.num_graphs for each in self._graphs.values())

    def _index_bucket(self, rows: int) -> int:
        """Logits indices of the graph for `rows` of them; a power of two if extras need more than the decided rows."""
        if rows > self._most_indices:
            return power_of_two(rows)
        return self._few_indices if rows <= self._few_indices else self._most_indices

    def _graph(self, tokens: int, indices: int) -> _TargetGraph:
        """The graph for so many tokens and logits indices, captured when it is first needed."""
        key = tokens, indices
        if key not in self._graphs:
            self._graphs[key] = self._capture(tokens, indices)
        return self._graphs[key]

    def _capture(self, tokens: int, indices: int) -> _TargetGraph:
        with torch.inference_mode(False), self._compiling():  # normal tensors, as those it was compiled for
            device = self._target.hf_model.device
            ids, positions, rows = (_integers(n, device) for n in (tokens, tokens, indices))
            launch = partial(self._target.launch, ids, positions, rows, model=self._model)
            graph, logits = record_segments(
                lambda attend, served: launch(attend=attend, recur=served),
                *(self._pool, self._target.group, self._target.states),
            )
        return _TargetGraph(ids, positions, rows, graph, unowned(logits))


def _in_turn(runner: GroupRunner, passes: Sequence[CommonAttentionMetadata]) -> Callable[..., Tensor]:
    """The attention of a draft prefill, see `drafters.loops.base.PassesAttend`.

    A pass is planned when its turn comes: plans that wait for their launch would be overwritten by later ones.
    """
    planned: list[PlannedBatch] = []

    def attend(layer: int, *states: Any) -> Tensor:
        # Pass m has layer m of the head's group; a single pass has all of its layers.
        m = layer % len(passes)
        if m == len(planned):
            planned.append(runner.plan(passes[m]))
        return runner.attend(planned[m], layer, *states)

    return attend


class RaggedPrefill:
    """The draft prefill after any verification, launched before the verification is read."""

    def __init__(
        self,
        loop: FixedLoop,
        passes: PrefillPasses,
        runner: GroupRunner,
        config: EngineConfig,
        pool: Any,
        compiling: Compiling,
        group: Group,
    ) -> None:
        """compiling: the state in which the passes were compiled; group: the target's."""
        self._group = group
        self._compiling = compiling
        self._loop = loop
        self._passes = passes
        self._runner = runner
        self._most_tokens = config.max_num_batched_tokens + passes.bonus * config.max_num_seqs
        self._device = loop.drafts.device
        self._pool = pool
        self._graphs: dict[int, _PrefillGraph] = {}

    @property
    def num_rows(self) -> int:
        """Rows of each graph, including the vectors that modules carry: as many as the loop drafts for."""
        return len(self._loop.drafts)

    def run(self, result: PackedResult, ahead: DeviceAhead) -> tuple[Tensor, Chosen | None]:
        """Write draft 1 of every row, and the inputs of the steps, into the loop's buffers.

        Returns:
            [B] int64 accepted drafts of each row, and the choices for the largest number of rows.
        """
        # One more entry, 0: the `decided_place` of rows that are not decided is J.
        accepted = torch.cat([result.num_accepted, result.num_accepted.new_zeros(1)])
        accepted = accepted.index_select(0, ahead.decided_place)
        drafts = result.tokens.reshape(-1).index_select(0, ahead.token_sources)
        if not self._loop.prefill_attends:
            # Operator by operator: a prefill that attends nothing.
            token_ids = ahead.token_ids.index_copy(0, ahead.token_places, drafts)
            (own,) = ahead.passes
            inputs = FixedPrefill(token_ids, ahead.last_row + accepted)
            unplanned = PlannedBatch(own, {})
            return accepted, self._loop.prefill(
                inputs, [own.positions], PassesAttend(self._runner, [unplanned]), compiled=False
            )
        count = len(ahead.token_ids)
        rows = len(ahead.last_row)
        graph = self._graph(token_bucket(count, self._most_tokens))
        inputs = graph.inputs
        ids = inputs.token_ids
        last_row = inputs.last_row
        carried = inputs.carried
        ids[:count].copy_(ahead.token_ids)
        ids.index_copy_(0, ahead.token_places, drafts)
        torch.add(ahead.last_row, accepted, out=last_row[:rows])
        last_row[rows:].zero_()
        for positions, each in zip(graph.positions, ahead.passes, strict=True):
            positions[:count].copy_(each.positions)
        if carried is not None and ahead.carried is not None:
            carried.sources[:count].copy_(ahead.carried.sources)
            carried.request_rows[:rows].copy_(ahead.carried.request_rows)
            carried.request_rows[rows:].fill_(-1)
        graph.graph.replay(lambda: Between(_in_turn(self._runner, ahead.passes)))
        return accepted, graph.chosen

    def capture_expected(self, mixed: Iterable[int]) -> None:
        """Capture the largest bucket, these of prompts with decoding rows, and the smallest."""
        if not self._loop.prefill_attends:
            return
        for tokens in (self._most_tokens, *mixed, 1):
            self._graph(token_bucket(tokens, self._most_tokens))

    @property
    def num_graphs(self) -> int:
        """Graphs captured so far."""
        return sum(each.graph.num_graphs for each in self._graphs.values())

    def _graph(self, tokens: int) -> _PrefillGraph:
        """The graph for so many tokens, captured when it is first needed."""
        if tokens not in self._graphs:
            self._graphs[tokens] = self._capture(tokens)
        return self._graphs[tokens]

    def _capture(self, tokens: int) -> _PrefillGraph:
        with torch.inference_mode(False), self._compiling():  # normal tensors, as those it was compiled for
            new = partial(torch.zeros, dtype=torch.int64, device=self._device)
            rows = self.num_rows
            nobody = new(rows).fill_(-1)  # request rows of -1: the captured launch writes to no request's place
            carried = CarriedRows(nobody, new(tokens)) if self._passes.count > 1 else None
            inputs = FixedPrefill(new(tokens), new(rows), carried)
            positions = tuple(_integers(tokens, self._device) for _ in range(self._passes.count))

            def launch(attend: LayerAttend, served: Any) -> tuple[Tensor, Tensor]:
                def attended(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                    return attend(layer, query, key, value, None)

                chosen = self._loop.prefill(inputs, positions, attended)
                assert chosen is not None
                return chosen.ids, chosen.logits

            graph, chosen = record_segments(launch, self._pool, self._group)
        ids, logits = map(unowned, chosen)
        return _PrefillGraph(inputs, positions, graph, Chosen(ids, logits))


def _integers(count: int, device: torch.device) -> Tensor:
    """[count] int64, made in the same way as views of a staging arena: torch.compile guards on whether a tensor is a
    view, and of what kind, so other tensors would be compiled again.
    """
    memory = torch.zeros(_LEAST_TOKENS + 8 * count, dtype=torch.uint8, device=device)
    return memory[_LEAST_TOKENS:].view(torch.int64).view(count)
