"""Capturing the CUDA graphs of one bucket of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from attention.hf.padding import padding_known
from attention.runner import FixedPlanner, GroupRunner, PlannedBatch
from drafters.loops.base import CarriedRows, Chosen, Draft, Draw, FixedLoop, FixedPrefill, Passes, PassesAttend
from specdec.acceptance.judge import fill_from_loop, judge_from_loop
from specdec.acceptance.packed import PackedResult
from specdec.compiler.compiling import compiler_settings
from specdec.execution.sampled import SampledDrafts, decide_sampled
from specdec.ops.greedy_rows import greedy_ids
from specdec.rounds.extras import RoundExtra, adjusted
from specdec.rounds.transfer import DeviceRound, DeviceSampling
from specdec.values import Function
from specdec.wrapped.group import ALONE, Group
from specdec.wrapped.target import Target

T = TypeVar("T")


class Recorder(Protocol):
    """Makes a graph of a launch, in a pool of memory: see `record`."""

    def __call__(self, launch: Callable[[], T], pool: Any) -> tuple[Any, T]:
        """The graph, and the result of the launch."""


@dataclass(frozen=True)
class PassGraph:
    """A pass of the head that chooses a draft greedily, and the same with the drafts of sampled rows drawn after it.

    One graph for both parts: between two, the device would pause for about as long as a kernel of theirs takes.

    drawn: None if drafts of sampled rows are greedy, too. x: input of the next step, of either graph; None after the
        draft prefill, which leaves it in the loop's buffer.
    """

    greedy: torch.cuda.CUDAGraph
    drawn: torch.cuda.CUDAGraph | None
    x: tuple[Tensor | None, Tensor | None]

    def of(self, sampled: bool) -> torch.cuda.CUDAGraph:
        """The graph for a round with sampled rows or without."""
        return self.drawn if sampled and self.drawn is not None else self.greedy


@dataclass(frozen=True)
class StepGraph:
    """One draft step after the draft prefill."""

    planner: FixedPlanner
    run: PassGraph


@dataclass(frozen=True)
class DraftGraphs:
    """The head's graphs: the draft prefill after the verification, with a planner of each pass that attends, and the
    steps."""

    prefill_planners: tuple[FixedPlanner, ...]
    prefill: PassGraph
    steps: tuple[StepGraph, ...]

    @property
    def num_graphs(self) -> int:
        """Graphs that rounds without sampled rows run."""
        return 1 + len(self.steps)

    @property
    def num_sampled(self) -> int:
        """Graphs that only rounds with sampled rows run, in place of these."""
        return sum(run.drawn is not None for run in (self.prefill, *(step.run for step in self.steps)))


@dataclass(frozen=True)
class Bucket:
    """The graphs of one number of rows.

    device: the round at the addresses that they read; logits [rows·(K+1), V], result [rows]: outputs of the
    verification. decide: decides the sampled rows of that result again.
    """

    planner: FixedPlanner
    verify: torch.cuda.CUDAGraph
    decide: torch.cuda.CUDAGraph
    device: DeviceRound
    logits: Tensor
    result: PackedResult
    draft: DraftGraphs | None

    @property
    def num_graphs(self) -> int:
        """Graphs that every round runs."""
        return 1 if self.draft is None else 1 + self.draft.num_graphs

    @property
    def num_sampled(self) -> int:
        """Additional graphs that rounds with sampled rows run."""
        return 1 if self.draft is None else 1 + self.draft.num_sampled


@dataclass(frozen=True)
class EmptyRound:
    """A round without rows in a bucket's shape, at the addresses that its graphs will read.

    prefill: the head's attention in each pass after the verification; steps: in each draft step; () without a
    head. carried: see `FixedPrefill`.
    """

    target: DeviceRound
    prefill: Passes = ()
    steps: Passes = ()
    carried: CarriedRows | None = None


def step_rows(rows: int) -> int:
    """Rows of the draft steps in a bucket: at least two, because one row would be compiled once more.

    >>> step_rows(1), step_rows(8)
    (2, 8)
    """
    return max(rows, 2)


@dataclass(frozen=True, eq=False)
class DraftCapture:
    """Captures the fixed-shape form of a draft loop. sampled: None where drafts are greedy in all rows."""

    loop: FixedLoop
    sampled: SampledDrafts | None
    runner: GroupRunner
    pool: Any

    def run_plainly(self, result: PackedResult, round_: EmptyRound) -> None:
        """The draft prefill without its attention, not compiled and not captured."""
        self._prefill(result, round_, [self.runner.blank(each) for each in round_.prefill], compiled=False)

    def compile(self, result: PackedResult, round_: EmptyRound) -> None:
        """Run the draft prefill and the steps once without their attention, so that they are compiled."""
        self._prefill(result, round_, [self.runner.blank(each) for each in round_.prefill])
        before = None
        for index, metadata in enumerate(round_.steps):
            planned = self.runner.blank(metadata)
            before = self.loop.step(index, step_rows(result.num_rows), planned, before, _nothing_drawn)

    def capture(
        self, result: PackedResult, round_: EmptyRound, target: FixedPlanner, recorder: Recorder
    ) -> DraftGraphs:
        """Capture the draft prefill after the verification that writes `result`, and the steps.

        target: the verification's planner.
        """
        rows, query_len = result.tokens.shape
        planners = []
        planned = []
        for m, metadata in enumerate(round_.prefill):  # only the first, without a bonus token, has `target`'s lengths
            if not self.loop.prefill_attends:
                planned.append(PlannedBatch(metadata, {}))
                continue
            width = metadata.num_tokens // rows
            planners.append(self.runner.fixed_planner(rows, width, None if m or width > query_len else target))
            planned.append(planners[-1].plan(metadata))
        prefill = self._recorded(partial(self._prefill_and_choose, result, round_, planned), recorder)
        steps: list[StepGraph] = []
        # Each form of a step (greedy, drawn) reads the output of the same form of the step before.
        for index, metadata in enumerate(round_.steps):
            planner = self.runner.fixed_planner(step_rows(rows), self.loop.step_width(index))
            before = steps[-1].run.x if steps else (None, None)
            launch = partial(self._step_and_choose, index, step_rows(rows), planner.plan(metadata), before)
            steps.append(StepGraph(planner, self._recorded(launch, recorder)))
        return DraftGraphs(tuple(planners), prefill, tuple(steps))

    def _recorded(self, launch: Callable[[bool], Tensor | None], recorder: Recorder) -> PassGraph:
        """A pass with the drafts of sampled rows drawn by launch(drawn), or without; it returns what the next reads."""
        graph, x = recorder(partial(launch, False), self.pool)
        if self.sampled is None:
            return PassGraph(graph, None, (x, None))
        drawn, drawn_x = recorder(partial(launch, True), self.pool)
        return PassGraph(graph, drawn, (x, drawn_x))

    def _prefill_and_choose(
        self, result: PackedResult, round_: EmptyRound, planned: Sequence[PlannedBatch], drawn: bool
    ) -> None:
        chosen = self._prefill(result, round_, planned)
        if drawn and self.sampled is not None:
            self.sampled.choose(0, chosen, result.num_accepted)

    def _step_and_choose(
        self, index: int, rows: int, planned: PlannedBatch, before: tuple[Tensor | None, ...], drawn: bool
    ) -> Tensor:
        draw: Draw = self.sampled.choose if drawn and self.sampled is not None else _nothing_drawn
        with padding_known(planned.metadata):
            return self.loop.step(index, rows, planned, before[drawn], draw)

    def _prefill(
        self, result: PackedResult, round_: EmptyRound, planned: Sequence[PlannedBatch], compiled: bool = True
    ) -> Chosen | None:
        """Run over every token row of the verification (query_len for each row), up to the last accepted token."""
        rows = len(result.tokens)
        tokens = result.tokens
        bonus = round_.prefill[0].num_tokens // rows - tokens.shape[1]
        if bonus:
            tokens = torch.cat([round_.target.token_ids.view(rows, -1)[:, :1], tokens], 1)
        first = torch.arange(bonus, tokens.numel(), tokens.shape[1], device=tokens.device)
        inputs = FixedPrefill(tokens.reshape(-1), first + result.num_accepted, round_.carried)
        positions = [metadata.positions for metadata in round_.prefill]
        with padding_known(round_.prefill[0]):
            return self.loop.prefill(inputs, positions, PassesAttend(self.runner, planned), compiled)


def _nothing_drawn(draft: int, chosen: Chosen) -> None:
    """A `Draw` where every row drafts greedily."""


def compile_bucket(
    target: Target,
    model: Function,
    drafts: DraftCapture | None,
    round_: EmptyRound,
    extras: Sequence[RoundExtra],
) -> None:
    """Run everything of one bucket once without attention: this compiles the code that every bucket captures.

    It needs no kernel of the attention backend's, so it can run while these are being built.
    """
    planned = target.runner.blank(round_.target.metadata)
    _, _, packed = _verify(target, model, drafts, round_.target, planned, extras)
    if drafts is not None:
        drafts.compile(PackedResult(packed), round_)


def _verify(
    target: Target,
    model: Function,
    drafts: DraftCapture | None,
    device: DeviceRound,
    planned: PlannedBatch,
    extras: Sequence[RoundExtra],
) -> tuple[Tensor, Tensor, Tensor]:
    """The verification: logits, their arg max, and the packed result, as if every row were greedy."""
    drafted = None if drafts is None else Draft(drafts.loop.drafts, None)
    if drafted is not None:
        target.group.share(drafted.token_ids)
    token_ids = fill_from_loop(device, drafted)
    with padding_known(device.metadata):
        logits = target.forward(token_ids, planned, device.logits_indices, model).logits
    logits = adjusted(extras, logits, device)
    greedy = greedy_ids(logits)
    return logits, greedy, judge_from_loop(greedy, device, drafted).packed


def capture_bucket(
    target: Target,
    model: Function,
    drafts: DraftCapture | None,
    round_: EmptyRound,
    sampling: DeviceSampling,
    extras: Sequence[RoundExtra],
    pool: Any,
    recorder: Recorder | None = None,
) -> Bucket:
    """Capture everything of one bucket. `model`: the compiled target; every row of it is decided.

    It takes logits indices, as in rounds of any shape, so that it is compiled once.

    recorder: makes graphs, default `record`; with `rehearse` all is launched once, without graphs.
    """
    recorder = recorder or partial(record, group=target.group)
    device = round_.target
    rows, query_len = device.logit_index.shape
    planner = target.runner.fixed_planner(rows, query_len)
    planned = planner.plan(device.metadata)
    graph, (logits, greedy, packed) = recorder(partial(_verify, target, model, drafts, device, planned, extras), pool)
    result = PackedResult(packed)
    with compiler_settings():  # the head's: it decides no token
        draft = None if drafts is None else drafts.capture(result, round_, planner, recorder)
    proposal = None
    if drafts is not None and drafts.sampled is not None and device.sources is not None:
        proposal = drafts.sampled.proposal(device.sources)
    index, own = device.logit_index, sampling.first(rows)
    decide, _ = recorder(
        lambda: decide_sampled(logits, greedy, index, device.num_drafts, own, result, proposal),
        pool,
    )
    return Bucket(planner, graph, decide, device, logits, result, draft)


def record(launch: Callable[[], T], pool: Any, group: Group = ALONE) -> tuple[torch.cuda.CUDAGraph, T]:
    """Run a `launch` that was rehearsed once (load, allocate), and capture it into a graph that shares `pool`.

    Returns the graph, and what the launch returned. group: the processes whose exchanges the graph may hold.
    """
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    group.note_graph(graph)
    # Only calls of this thread must be capturable: NCCL's watchdog thread queries events meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = launch()
    return graph, result


def rehearse(launch: Callable[[], T], pool: Any) -> tuple[None, T]:
    """Run `launch` once; no graph, and its result."""
    return None, launch()


@contextmanager
def kernels_compiled_together(device: torch.device) -> Iterator[None]:
    """See `attention.kernels.launch.compiled_together`; elsewhere than on CUDA nothing is compiled."""
    if device.type != "cuda":
        yield
        return
    from attention.kernels.launch import compiled_together

    with compiled_together():
        yield


def rehearse_decisions(
    logits: Tensor, rows: int, most_drafts: int, sampling: DeviceSampling, drawn: SampledDrafts | None
) -> None:
    """Decide sampled rows as rounds of any shape do, which have no more drafts than the row with most of them has.

    Args:
        logits: [T, V] with any values, T >= 1; rows: J. sampling: parameters of J rows or more, all greedy.
        drawn: distributions of drawn drafts; None if drafts are greedy.
    """
    new = logits.new_zeros
    proposal = None if drawn is None else drawn.proposal_of(rows, None)
    for num_drafts in range(most_drafts + 1):
        index = new(rows, num_drafts + 1, dtype=torch.int64)
        counts = new(rows, dtype=torch.int64)
        result = PackedResult.zeros(rows, num_drafts, logits.device)
        decide_sampled(logits, greedy_ids(logits), index, counts, sampling.first(rows), result, proposal)
