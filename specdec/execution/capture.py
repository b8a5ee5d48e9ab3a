"""Capturing the CUDA graphs of one bucket of rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from attention.batch.metadata import CommonAttentionMetadata
from attention.batch.staging import Staged
from attention.runner import FixedPlanner, PlannedBatch
from drafters.eagle3.head import Eagle3Head
from drafters.loops.chain.run import Draft, paged_attend
from drafters.mtp.head import MtpHead
from specdec.acceptance.judge import fill_drafts, in_order
from specdec.compiler.settings import EaglePasses, HeadPasses, MtpPasses, compiler_settings
from specdec.execution.eager import Drafter, EagerExecutor
from specdec.rounds.transfer import DeviceRound

T = TypeVar("T")


@dataclass(frozen=True)
class StepGraph:
    """One draft step after the first pass. x [rows, H] is its output, which the next step's graph reads."""

    planner: FixedPlanner
    graph: torch.cuda.CUDAGraph
    x: torch.Tensor


@dataclass(frozen=True)
class DraftGraphs:
    """The head's graphs: `first` behind the verification, planned by first_planner, and the steps after it."""

    first_planner: FixedPlanner
    first: torch.cuda.CUDAGraph
    steps: tuple[StepGraph, ...]


@dataclass(frozen=True)
class DraftBuffers:
    """What the graphs of all buckets hand on, for the most rows R there can be.

    Attributes:
        hidden: [R, H] outputs of the first pass; drafts: [R, K] int64. Both by row of the last verification.
    """

    hidden: torch.Tensor
    drafts: torch.Tensor


@dataclass(frozen=True)
class Bucket:
    """The graphs of one number of rows.

    token_ids [rows·(K+1)] is what the verification reads, logits [rows·(K+1), V] and packed [rows, 2K+2] what it
    writes; logit_index: [rows, K+1].
    """

    planner: FixedPlanner
    verify: torch.cuda.CUDAGraph
    token_ids: torch.Tensor
    logit_index: torch.Tensor
    logits: torch.Tensor
    packed: torch.Tensor
    draft: DraftGraphs | None


@dataclass(frozen=True)
class EmptyRound:
    """A round without rows in a bucket's shape, at the addresses that its graphs will read.

    first: the head's attention behind the verification; steps: that of the draft steps. None and () without a head.
    """

    target: DeviceRound
    first: CommonAttentionMetadata | None
    steps: tuple[CommonAttentionMetadata, ...]


def head_metadata(target: CommonAttentionMetadata, staged: Staged, host: Any) -> CommonAttentionMetadata:
    """A verification's attention on the head's pages: same rows and lengths, other slots."""
    return replace(
        target,
        host=host,
        block_table=None,
        slot_mapping=staged["head.slot_mapping"],
        page_indices=staged["head.page_indices"],
    )


@dataclass(frozen=True)
class Passes:
    """The head's passes, compiled or not; `plain` holds the channel of their attention."""

    first: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    step: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    plain: HeadPasses

    @classmethod
    def of(cls, drafter: Drafter) -> Passes:
        """EAGLE heads and modules of transformers layers are compiled; any other head runs as it is."""
        plain: HeadPasses
        if isinstance(drafter.head, MtpHead):
            plain = MtpPasses(drafter.head)
        elif isinstance(drafter.head, Eagle3Head):
            plain = EaglePasses(drafter.head)
        else:
            plain = HeadPasses(drafter.head)
            return cls(plain.first, plain.step, plain)
        options: dict[str, Any] = {"fullgraph": True, "dynamic": True}
        return cls(torch.compile(plain.first, **options), torch.compile(plain.step, **options), plain)


class DraftCapture:
    """Captures the draft loop."""

    def __init__(self, drafter: Drafter, tapped: torch.Tensor, max_rows: int, num_drafts: int, pool: Any) -> None:
        """tapped: [T, A·Ht] the target's buffer of tapped states."""
        self._runner = drafter.runner
        self._passes = Passes.of(drafter)
        self._tapped = tapped
        self._pool = pool
        hidden = drafter.head.fuse(tapped[:2])
        self.buffers = DraftBuffers(
            hidden.new_zeros(max_rows, hidden.shape[1]),
            torch.zeros(max_rows, num_drafts, dtype=torch.int64, device=tapped.device),
        )

    def run_plainly(self, packed: torch.Tensor, metadata: CommonAttentionMetadata) -> None:
        """The first pass, not compiled and not captured."""
        self._first(self._passes.plain.first, packed, self._runner.plan(metadata))

    def capture(self, packed: torch.Tensor, round_: EmptyRound, target: FixedPlanner) -> DraftGraphs:
        """Capture the first pass behind the verification that writes `packed` [rows, 2K+2], and the steps.

        target: the verification's planner.
        """
        assert round_.first is not None
        rows, query_len = len(packed), packed.shape[1] // 2
        planner = self._runner.fixed_planner(rows, query_len, target)
        planned = planner.plan(round_.first)
        first, _ = record(lambda: self._first(self._passes.first, packed, planned), self._pool)
        return DraftGraphs(planner, first, self._capture_steps(rows, round_))

    def _first(self, run: Callable[..., Any], packed: torch.Tensor, planned: PlannedBatch) -> None:
        rows, query_len = len(packed), packed.shape[1] // 2
        last = torch.arange(0, rows * query_len, query_len, device=packed.device) + packed[:, 0]
        token_ids = packed[:, 1 : 1 + query_len].reshape(-1)
        tapped = self._tapped[: rows * query_len]
        with self._attending(planned):
            x, ids = run(tapped, token_ids, planned.metadata.positions, last)
        self.buffers.hidden[:rows].copy_(x)
        self.buffers.drafts[:rows, 0].copy_(ids)

    def _capture_steps(self, rows: int, round_: EmptyRound) -> tuple[StepGraph, ...]:
        drafts = self.buffers.drafts
        steps: list[StepGraph] = []
        for metadata in round_.steps:
            planner = self._runner.fixed_planner(rows, 1)
            before = partial(_same, steps[-1].x) if steps else self.buffers.hidden[:rows].clone
            launch = partial(self._step, planner.plan(metadata), before, drafts[:rows, len(steps) :])
            steps.append(StepGraph(planner, *record(launch, self._pool)))
        return tuple(steps)

    def _step(self, planned: PlannedBatch, before: Callable[[], torch.Tensor], drafts: torch.Tensor) -> torch.Tensor:
        """One step from x [rows, H] of the step before; drafts [rows, …]: its draft, and the place of the next.

        A view of a larger buffer would be compiled once more than a tensor of its own.
        """
        x = before()
        with self._attending(planned):
            x, ids = self._passes.step(x, drafts[:, 0], planned.metadata.positions)
        drafts[:, 1].copy_(ids)
        return x

    def _attending(self, planned: PlannedBatch) -> AbstractContextManager[None]:
        return self._passes.plain.carrying(paged_attend(self._runner, planned))


def capture_bucket(
    eager: EagerExecutor, model: Callable[..., Any], drafts: DraftCapture | None, round_: EmptyRound, pool: Any
) -> Bucket:
    """Capture everything of one bucket. `model`: the compiled target; every row of it is judged.

    Where the rounds outside of graphs run it too, it is asked as they do, so that it is compiled once.
    """
    judged = None if eager.model is None else round_.target.judged_rows
    rows, query_len = round_.target.logit_index.shape
    planner = eager.target.runner.fixed_planner(rows, query_len)
    planned = planner.plan(round_.target.metadata)
    all_drafts = None if drafts is None else Draft(drafts.buffers.drafts, None)

    def verify() -> tuple[torch.Tensor, torch.Tensor]:
        drafted = in_order(all_drafts, round_.target)
        token_ids = fill_drafts(round_.target, drafted)
        logits = eager.target.forward(token_ids, planned, judged, model).logits
        return logits, eager.judge(logits, round_.target, drafted)

    graph, (logits, packed) = record(verify, pool)
    with compiler_settings():  # the head's: what it says decides no token
        draft = None if drafts is None else drafts.capture(packed, round_, planner)
    return Bucket(planner, graph, round_.target.token_ids, round_.target.logit_index, logits, packed, draft)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def record(launch: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """Run `launch` twice (compile, allocate), then capture it into a graph that shares `pool`; also its result."""
    launch()
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = launch()
    return graph, result
