"""Capturing the CUDA graphs of one bucket of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from attention.batch.metadata import CommonAttentionMetadata
from attention.runner import FixedPlanner, GroupRunner, PlannedBatch
from drafters.loops.base import Chosen, Draft, StaticLoop, StaticPrefill, paged_attend
from specdec.acceptance.judge import fill_from_loop, judge_from_loop
from specdec.acceptance.packed import PackedResult
from specdec.compiler.settings import compiler_settings
from specdec.execution.sampled import SampledDrafts, decide_sampled
from specdec.ops.argmax import greedy_ids
from specdec.ops.draws import Proposal
from specdec.rounds.fields import DeviceRound, StaticSampling
from specdec.target.target import Target

T = TypeVar("T")


@dataclass(frozen=True)
class StepGraph:
    """One draft step after the draft prefill. x [rows, H] is its output, which the next step's graph reads.

    choose: draws its draft of sampled rows again; None where those are greedy, too.
    """

    planner: FixedPlanner
    graph: torch.cuda.CUDAGraph
    x: torch.Tensor
    choose: torch.cuda.CUDAGraph | None


@dataclass(frozen=True)
class DraftGraphs:
    """The head's graphs: the draft prefill after the verification, planned by prefill_planner, and the steps.

    choose: draws draft 1 of sampled rows again; None where those are greedy, too.
    """

    prefill_planner: FixedPlanner
    prefill: torch.cuda.CUDAGraph
    choose: torch.cuda.CUDAGraph | None
    steps: tuple[StepGraph, ...]

    @property
    def num_graphs(self) -> int:
        """Graphs that every round runs."""
        return 1 + len(self.steps)

    @property
    def num_sampled(self) -> int:
        """Graphs that rounds with sampled rows run beside them."""
        return sum(choose is not None for choose in (self.choose, *(step.choose for step in self.steps)))


@dataclass(frozen=True)
class Bucket:
    """The graphs of one number of rows.

    token_ids [rows·(K+1)] is what the verification reads, logits [rows·(K+1), V] and result [rows] what it writes;
    logit_index: [rows, K+1]; num_drafts: [rows]. decide: decides the sampled rows of that result again.
    """

    planner: FixedPlanner
    verify: torch.cuda.CUDAGraph
    decide: torch.cuda.CUDAGraph
    token_ids: torch.Tensor
    logit_index: torch.Tensor
    num_drafts: torch.Tensor
    logits: torch.Tensor
    result: PackedResult
    draft: DraftGraphs | None

    @property
    def num_graphs(self) -> int:
        """Graphs that every round runs."""
        return 1 if self.draft is None else 1 + self.draft.num_graphs

    @property
    def num_sampled(self) -> int:
        """Graphs that rounds with sampled rows run beside them."""
        return 1 if self.draft is None else 1 + self.draft.num_sampled


@dataclass(frozen=True)
class EmptyRound:
    """A round without rows in a bucket's shape, at the addresses that its graphs will read.

    prefill: the head's attention after the verification; steps: that of the draft steps. None and () without a head.
    """

    target: DeviceRound
    prefill: CommonAttentionMetadata | None
    steps: tuple[CommonAttentionMetadata, ...]


class DraftCapture:
    """Captures the static form of a draft loop."""

    def __init__(self, loop: StaticLoop, sampled: SampledDrafts | None, runner: GroupRunner, pool: Any) -> None:
        """sampled: None where drafts are greedy in all rows."""
        self.loop = loop
        self.sampled = sampled
        self._runner = runner
        self._pool = pool

    def run_plainly(self, result: PackedResult, metadata: CommonAttentionMetadata) -> None:
        """The draft prefill, not compiled and not captured."""
        self._prefill(result, self._runner.plan(metadata), compiled=False)

    def capture(self, result: PackedResult, round_: EmptyRound, target: FixedPlanner) -> DraftGraphs:
        """Capture the draft prefill after the verification that writes `result`, and the steps.

        target: the verification's planner.
        """
        assert round_.prefill is not None
        rows, query_len = result.tokens.shape
        planner = self._runner.fixed_planner(rows, query_len, target)
        planned = planner.plan(round_.prefill)
        prefill, chosen = record(lambda: self._prefill(result, planned), self._pool)
        choose = self._choosing(partial(self._choose_first, result, chosen))
        return DraftGraphs(planner, prefill, choose, self._capture_steps(rows, round_))

    def proposal(self, sources: torch.Tensor | None) -> Proposal | None:
        """What sampled rows are drafted from; sources: [rows] int64, their rows among the drafts."""
        return None if self.sampled is None or sources is None else self.sampled.proposal(sources)

    def _choosing(self, choose: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        return None if self.sampled is None else record(choose, self._pool)[0]

    def _choose_first(self, result: PackedResult, chosen: Chosen) -> None:
        assert self.sampled is not None
        self.sampled.begin(result.num_accepted)
        self.sampled.choose(0, chosen)

    def _prefill(self, result: PackedResult, planned: PlannedBatch, compiled: bool = True) -> Chosen:
        """Over every token row of the verification, which stand query_len apart, up to the last accepted one."""
        rows, query_len = result.tokens.shape
        first = torch.arange(0, rows * query_len, query_len, device=result.packed.device)
        inputs = StaticPrefill(result.tokens.reshape(-1), first + result.num_accepted)
        return self.loop.prefill(inputs, planned.metadata.positions, paged_attend(self._runner, planned), compiled)

    def _capture_steps(self, rows: int, round_: EmptyRound) -> tuple[StepGraph, ...]:
        steps: list[StepGraph] = []
        for index, metadata in enumerate(round_.steps):
            planner = self._runner.fixed_planner(rows, 1)
            before = steps[-1].x if steps else None
            launch = partial(self.loop.step, index, rows, planner.plan(metadata), before)
            graph, (x, chosen) = record(launch, self._pool)
            choose = None if self.sampled is None else self._choosing(partial(self.sampled.choose, index + 1, chosen))
            steps.append(StepGraph(planner, graph, x, choose))
        return tuple(steps)


def capture_bucket(
    target: Target,
    model: Callable[..., Any],
    drafts: DraftCapture | None,
    round_: EmptyRound,
    sampling: StaticSampling,
    pool: Any,
) -> Bucket:
    """Capture everything of one bucket. `model`: the compiled target; every row of it is decided.

    It is asked for rows by their logits indices, as rounds of any shape do, so that it is compiled once.
    """
    device = round_.target
    rows, query_len = device.logit_index.shape
    planner = target.runner.fixed_planner(rows, query_len)
    planned = planner.plan(device.metadata)
    all_drafts = None if drafts is None else Draft(drafts.loop.drafts, None)

    def verify() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        token_ids = fill_from_loop(device, all_drafts)
        logits = target.forward(token_ids, planned, device.logits_indices, model).logits
        greedy = greedy_ids(logits)
        return logits, greedy, judge_from_loop(greedy, device, all_drafts).packed

    graph, (logits, greedy, packed) = record(verify, pool)
    result = PackedResult(packed)
    with compiler_settings():  # the head's: what it says decides no token
        draft = None if drafts is None else drafts.capture(result, round_, planner)
    proposal = None if drafts is None else drafts.proposal(device.sources)
    index, own = device.logit_index, sampling.first(rows)
    decide, _ = record(
        lambda: decide_sampled(logits, greedy, index, device.num_drafts, own, result, proposal),
        pool,
    )
    return Bucket(planner, graph, decide, device.token_ids, index, device.num_drafts, logits, result, draft)


def record(launch: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """Run `launch` twice (compile, allocate), then capture it into a graph that shares `pool`; also its result."""
    launch()
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = launch()
    return graph, result
