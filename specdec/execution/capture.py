"""Capturing the CUDA graphs of one bucket of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from attention.batch.metadata import CommonAttentionMetadata
from attention.runner import FixedPlanner, GroupRunner, PlannedBatch
from drafters.loops.base import Draft, StaticLoop, StaticPrefill
from specdec.acceptance.judge import fill_drafts, in_order
from specdec.acceptance.packed import PackedResult
from specdec.compiler.settings import compiler_settings
from specdec.execution.eager import EagerExecutor
from specdec.rounds.fields import DeviceRound

T = TypeVar("T")


@dataclass(frozen=True)
class StepGraph:
    """One draft step after the draft prefill. x [rows, H] is its output, which the next step's graph reads."""

    planner: FixedPlanner
    graph: torch.cuda.CUDAGraph
    x: torch.Tensor


@dataclass(frozen=True)
class DraftGraphs:
    """The head's graphs: the draft prefill after the verification, planned by prefill_planner, and the steps."""

    prefill_planner: FixedPlanner
    prefill: torch.cuda.CUDAGraph
    steps: tuple[StepGraph, ...]


@dataclass(frozen=True)
class Bucket:
    """The graphs of one number of rows.

    token_ids [rows·(K+1)] is what the verification reads, logits [rows·(K+1), V] and result [rows] what it writes;
    logit_index: [rows, K+1].
    """

    planner: FixedPlanner
    verify: torch.cuda.CUDAGraph
    token_ids: torch.Tensor
    logit_index: torch.Tensor
    logits: torch.Tensor
    result: PackedResult
    draft: DraftGraphs | None


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

    def __init__(self, loop: StaticLoop, runner: GroupRunner, pool: Any) -> None:
        self.loop = loop
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
        prefill, _ = record(lambda: self._prefill(result, planned), self._pool)
        return DraftGraphs(planner, prefill, self._capture_steps(rows, round_))

    def _prefill(self, result: PackedResult, planned: PlannedBatch, compiled: bool = True) -> None:
        """Over every token row of the verification, which stand query_len apart, up to the last accepted one."""
        rows, query_len = result.tokens.shape
        first = torch.arange(0, rows * query_len, query_len, device=result.packed.device)
        inputs = StaticPrefill(result.tokens.reshape(-1), first + result.num_accepted)
        self.loop.prefill(inputs, planned, compiled)

    def _capture_steps(self, rows: int, round_: EmptyRound) -> tuple[StepGraph, ...]:
        steps: list[StepGraph] = []
        for index, metadata in enumerate(round_.steps):
            planner = self._runner.fixed_planner(rows, 1)
            before = steps[-1].x if steps else None
            launch = partial(self.loop.step, index, rows, planner.plan(metadata), before)
            steps.append(StepGraph(planner, *record(launch, self._pool)))
        return tuple(steps)


def capture_bucket(
    eager: EagerExecutor, model: Callable[..., Any], drafts: DraftCapture | None, round_: EmptyRound, pool: Any
) -> Bucket:
    """Capture everything of one bucket. `model`: the compiled target; every row of it is decided.

    Where the rounds outside of graphs run it too, it is asked as they do, so that it is compiled once.
    """
    logits_indices = None if eager.model is None else round_.target.logits_indices
    rows, query_len = round_.target.logit_index.shape
    planner = eager.target.runner.fixed_planner(rows, query_len)
    planned = planner.plan(round_.target.metadata)
    all_drafts = None if drafts is None else Draft(drafts.loop.drafts, None)

    def verify() -> tuple[torch.Tensor, torch.Tensor]:
        drafted = in_order(all_drafts, round_.target)
        token_ids = fill_drafts(round_.target, drafted)
        logits = eager.target.forward(token_ids, planned, logits_indices, model).logits
        return logits, eager.judge(logits, round_.target, drafted).packed

    graph, (logits, packed) = record(verify, pool)
    result = PackedResult(packed)
    with compiler_settings():  # the head's: what it says decides no token
        draft = None if drafts is None else drafts.capture(result, round_, planner)
    return Bucket(planner, graph, round_.target.token_ids, round_.target.logit_index, logits, result, draft)


def record(launch: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """Run `launch` twice (compile, allocate), then capture it into a graph that shares `pool`; also its result."""
    launch()
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = launch()
    return graph, result
