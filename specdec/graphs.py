"""CUDA graphs of a round in fixed shapes: the head's first pass, its further steps, and the verification.

Three graphs a bucket of rows, because the host works between them. After the read of a verification it lays out and
sends the draft loop, plans the first pass and launches it; it plans the steps while the first pass runs, and lays out,
sends and plans the next verification while the steps run. That makes two transfers a round instead of one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from attention.runner import FixedPlanner, GroupRunner, PlannedBatch
from attention.staging import StagingArena
from drafters.chain import Draft, FirstPass, first_pass, paged_attend
from drafters.eagle3 import Eagle3Head
from drafters.mtp import MtpHead
from specdec.compiling import (
    HeadPasses,
    MtpPasses,
    compiled_model,
    compiler_settings,
    fuse_siblings,
    store_angles,
)
from specdec.config import EngineConfig
from specdec.executor import Drafter, EagerExecutor, Verification
from specdec.experts import using_capturable_experts
from specdec.fields import draft_fields, graph_bucket, target_fields
from specdec.padding import (
    empty_round,
    first_pass_fits,
    uniform_first,
    uniform_steps,
    uniform_target,
    uniform_verified,
)
from specdec.round import (
    DeviceRound,
    DraftArrays,
    SamplingRound,
    TargetArrays,
    Verified,
    draft_values,
    first_pass_views,
    step_views,
    target_values,
    target_views,
)
from specdec.target import Target
from specdec.verify import choose_greedy, fill_drafts

log = logging.getLogger("specdec")
T = TypeVar("T")


@dataclass(frozen=True)
class GraphReport:
    """What capturing cost.

    Attributes:
        graphs: number of graphs; rows: the buckets; seconds: compiling and capturing; bytes: memory reserved meanwhile;
        fused_groups: sibling projections that became one matmul.
    """

    graphs: int
    rows: tuple[int, ...]
    seconds: float
    bytes: int
    fused_groups: int


@dataclass(frozen=True)
class GraphRound:
    """A sent round, and what of it runs from graphs.

    Attributes:
        rows: the bucket, None when the round runs eagerly.
        num_rows, num_drafts: J and n of the round itself.
        device: the round in its own shape, where something of it runs eagerly (it fits no bucket, or has sampled rows).
        late: a draft loop whose first pass has another shape (after a prompt) and so waits for `GraphExecutor.draft`.
        drafts: whether there is a draft loop.
    """

    rows: int | None
    num_rows: int
    num_drafts: int
    device: DeviceRound | None
    late: tuple[FirstPass, DraftArrays] | None
    drafts: bool


@dataclass(frozen=True)
class _DraftGraphs:
    """token_ids [rows, K] and carried [rows, H] are what the graphs hand on."""

    first_planner: FixedPlanner
    step_planners: tuple[FixedPlanner, ...]
    first: torch.cuda.CUDAGraph
    steps: torch.cuda.CUDAGraph | None
    token_ids: torch.Tensor
    carried: torch.Tensor


@dataclass(frozen=True)
class _Bucket:
    """logits [rows·(K+1), V] and packed [rows, 2K+2] are what the verification writes; logit_index [rows, K+1]."""

    planner: FixedPlanner
    verify: torch.cuda.CUDAGraph
    logit_index: torch.Tensor
    logits: torch.Tensor
    packed: torch.Tensor
    draft: _DraftGraphs | None


def graph_rows(max_num_seqs: int, query_len: int) -> tuple[int, ...]:
    """The buckets, largest first: powers of two and the most rows there can be.

    A batch of one token in all would be compiled once more (sizes 0 and 1 are special to the compiler): two rows at
    least then.

    >>> graph_rows(12, 6), graph_rows(4, 1), graph_rows(1, 1)
    ((12, 8, 4, 2, 1), (4, 2), (2,))
    """
    least = 2 if query_len == 1 else 1
    powers = {1 << i for i in range(max_num_seqs.bit_length()) if least <= 1 << i < max_num_seqs}
    return tuple(sorted(powers | {max(max_num_seqs, least)}, reverse=True))


class GraphExecutor:
    """Runs rounds of verifications only from CUDA graphs, all others as `EagerExecutor` does.

    Rounds with sampled rows draft eagerly and verify from the graph.
    """

    def __init__(self, target: Target, drafter: Drafter | None, config: EngineConfig) -> None:
        """Fuse, compile and capture; takes tens of seconds for a large model.

        Raises:
            UnsupportedAttentionError: the attention backend has no plans that a graph can hold.
        """
        started, before = time.perf_counter(), torch.cuda.memory_reserved()
        self._eager = EagerExecutor(target, drafter, config)
        self._target = target
        self._drafter = drafter
        self._config = config
        self._query_len = config.num_speculative_tokens + 1
        self._pool = torch.cuda.graph_pool_handle()
        self._layouts = {rows: graph_bucket(config, rows) for rows in self._rows()}
        device = target.hf_model.device
        self._draft_arena = StagingArena(draft_fields(), self._layouts[self._rows()[0]], device)
        self._target_arena = StagingArena(target_fields(), self._layouts[self._rows()[0]], device)
        with torch.no_grad(), compiler_settings(), using_capturable_experts(*self._modules()):
            fused = self._fuse()
            store_angles(target.hf_model)
            self._model = compiled_model(target.hf_model)
            self._passes = None if drafter is None else _passes(drafter)
            self._buckets = {rows: self._capture(rows) for rows in self._rows()}
        torch.cuda.synchronize()
        seconds, taken = time.perf_counter() - started, torch.cuda.memory_reserved() - before
        count = sum(1 if b.draft is None else 2 + (b.draft.steps is not None) for b in self._buckets.values())
        self.report = GraphReport(count, tuple(self._buckets), seconds, taken, fused)

    @property
    def transfers(self) -> int:
        """See `Executor.transfers`."""
        return self._eager.transfers + self._draft_arena.generation + self._target_arena.generation

    def verified(self, verified: Verified, round_: GraphRound) -> Verified:
        """Token rows of a graph's batch stand K+1 apart."""
        return verified if round_.rows is None else uniform_verified(verified, self._query_len)

    def send(self, draft: DraftArrays | None, target: TargetArrays, sampling: SamplingRound | None) -> GraphRound:
        """Send a round; a greedy draft loop is launched at once, before the verification is laid out."""
        num_rows, num_drafts = target.logit_index.shape[0], target.logit_index.shape[1] - 1
        rows = self._bucket_of(target)
        device = self._eager.send(draft, target, sampling) if rows is None or sampling is not None else None
        if rows is None:
            return GraphRound(None, num_rows, num_drafts, device, None, draft is not None)
        late = None if draft is None or sampling is not None else self._launch_draft(draft, rows)
        padded = uniform_target(target, rows, self._query_len)
        self._target_arena.send(self._layouts[rows], target_values(padded))
        self._buckets[rows].planner.replan(padded.batch)
        return GraphRound(rows, num_rows, num_drafts, device, late, draft is not None)

    def draft(self, round_: GraphRound, tapped: torch.Tensor) -> Draft | None:
        """See `Executor.draft`."""
        if round_.device is not None:
            return self._eager.draft(round_.device, tapped)
        if not round_.drafts or round_.rows is None:
            return None
        graphs = self._draft_graphs(round_.rows)
        if round_.late is not None:
            first, draft = round_.late
            self._first_eagerly(first, tapped, graphs)
            self._launch_steps(graphs, draft)
        return Draft(graphs.token_ids[: round_.num_rows, : round_.num_drafts], None)

    def verify(self, round_: GraphRound, draft: Draft | None) -> Verification:
        """See `Executor.verify`."""
        if round_.rows is None:
            assert round_.device is not None
            return self._eager.verify(round_.device, draft)
        bucket = self._buckets[round_.rows]
        if round_.device is not None and draft is not None and bucket.draft is not None:
            bucket.draft.token_ids[: len(draft.token_ids), : round_.num_drafts].copy_(draft.token_ids)
        bucket.verify.replay()
        tapped = self._target.tapped(round_.rows * self._query_len)
        if round_.device is None:
            return Verification(bucket.packed[: round_.num_rows], tapped)
        index = bucket.logit_index[: round_.num_rows, : round_.num_drafts + 1]
        device = replace(round_.device, logit_index=index)
        return Verification(self._eager.judge(bucket.logits, device, draft), tapped)

    def _launch_draft(self, draft: DraftArrays, rows: int) -> tuple[FirstPass, DraftArrays] | None:
        """Send a draft loop and launch it; when its first pass has another shape, leave both to `draft`."""
        padded = uniform_steps(draft, rows, self._config.num_speculative_tokens - 1)
        fits = first_pass_fits(draft, self._query_len)
        if fits:
            padded = uniform_first(padded, rows, self._query_len)
        staged = self._draft_arena.send(self._layouts[rows], draft_values(padded))
        if not fits:
            return first_pass_views(padded, staged), padded
        graphs = self._draft_graphs(rows)
        graphs.first_planner.replan(padded.first)
        graphs.first.replay()
        self._launch_steps(graphs, padded)
        return None

    def _launch_steps(self, graphs: _DraftGraphs, draft: DraftArrays) -> None:
        if graphs.steps is None:
            return
        for planner, host in zip(graphs.step_planners, draft.step_batches, strict=True):
            planner.replan(host)
        graphs.steps.replay()

    def _draft_graphs(self, rows: int) -> _DraftGraphs:
        graphs = self._buckets[rows].draft
        assert graphs is not None
        return graphs

    def _modules(self) -> list[torch.nn.Module]:
        head = None if self._drafter is None else self._drafter.head
        return [self._target.hf_model, *([head] if isinstance(head, torch.nn.Module) else [])]

    def _rows(self) -> tuple[int, ...]:
        return graph_rows(self._config.max_num_seqs, self._query_len)

    def _bucket_of(self, target: TargetArrays) -> int | None:
        """The smallest bucket that holds a round of verifications only; None for any other round."""
        only_roots = len(target.judged) == target.batch.num_reqs
        if not only_roots or not (target.batch.query_lens == target.num_drafts + 1).all():
            return None
        return min((rows for rows in self._buckets if rows >= target.batch.num_reqs), default=None)

    def _first_eagerly(self, first: FirstPass, tapped: torch.Tensor, graphs: _DraftGraphs) -> None:
        """A first pass of another shape (after a prompt), handed to the graph of the steps."""
        assert self._drafter is not None
        head = self._drafter.head
        x = first_pass(head, self._drafter.runner, tapped, first)
        assert x is not None
        graphs.carried[: len(x)].copy_(x)
        graphs.token_ids[: len(x), 0].copy_(head.to_target_ids(choose_greedy(0, head.logits(x))[0]))

    def _empty_round(self, rows: int) -> DeviceRound:
        """A round without rows in the fixed shape, at the addresses that the graphs read."""
        draft, target = empty_round(self._config.page_size)
        padded = uniform_target(target, rows, self._query_len)
        device = target_views(padded, self._target_arena.send(self._layouts[rows], target_values(padded)))
        if self._drafter is None or self._query_len == 1:
            return device
        steps = uniform_steps(draft, rows, self._config.num_speculative_tokens - 1)
        loop = uniform_first(steps, rows, self._query_len)
        staged = self._draft_arena.send(self._layouts[rows], draft_values(loop))
        return replace(device, first=first_pass_views(loop, staged), steps=step_views(loop, staged))

    def _fuse(self) -> int:
        log.info("fusing sibling projections")
        round_ = self._empty_round(self._rows()[-1])
        tapped = self._target.tapped(len(round_.token_ids))
        count = fuse_siblings(self._target.hf_model, lambda: self._eager.verify(round_, None))
        if self._drafter is not None and isinstance(self._drafter.head, torch.nn.Module):
            count += fuse_siblings(self._drafter.head, lambda: self._eager.draft(round_, tapped))
        return count

    def _capture(self, rows: int) -> _Bucket:
        log.info("compiling and capturing for %d rows", rows)
        round_ = self._empty_round(rows)
        draft = None if round_.first is None else self._capture_draft(rows, round_, round_.first)
        planner = self._target.runner.fixed_planner(rows, self._query_len)
        planned = planner.plan(round_.metadata)
        drafted = None if draft is None else Draft(draft.token_ids, None)

        def verify() -> tuple[torch.Tensor, torch.Tensor]:
            token_ids = fill_drafts(round_, drafted)
            logits = self._target.forward(token_ids, planned, None, self._model).logits
            return logits, self._eager.judge(logits, round_, drafted)

        graph, (logits, packed) = record(verify, self._pool)
        return _Bucket(planner, graph, round_.logit_index, logits, packed, draft)

    def _capture_draft(self, rows: int, round_: DeviceRound, first: FirstPass) -> _DraftGraphs:
        assert self._drafter is not None and self._passes is not None
        runner, passes = self._drafter.runner, self._passes
        first_planner = runner.fixed_planner(rows, self._query_len)
        step_planners = tuple(runner.fixed_planner(rows, 1) for _ in round_.steps)
        buffer = self._target.tapped(self._config.max_num_batched_tokens)
        planned = first_planner.plan(first.metadata)
        token_ids = torch.zeros(rows, self._query_len - 1, dtype=torch.int64, device=buffer.device)

        def launch_first() -> torch.Tensor:
            tapped = buffer.index_select(0, first.token_indices)
            with _carrying(passes, runner, planned):
                x, ids = passes.first(tapped, first.token_ids, first.metadata.positions, first.last_row)
            token_ids[:, 0].copy_(ids)
            return x

        first_graph, carried = record(launch_first, self._pool)
        planned_steps = [p.plan(m) for p, m in zip(step_planners, round_.steps, strict=True)]

        def launch_steps() -> None:
            x, ids = carried, token_ids[:, 0]
            for place, step in enumerate(planned_steps, 1):
                with _carrying(passes, runner, step):
                    x, ids = passes.step(x, ids, step.metadata.positions)
                token_ids[:, place].copy_(ids)

        steps_graph = record(launch_steps, self._pool)[0] if planned_steps else None
        return _DraftGraphs(first_planner, step_planners, first_graph, steps_graph, token_ids, carried)


def record(launch: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """Run `launch` twice (compile, allocate), then capture it into a graph that shares `pool`; also its result."""
    launch()
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = launch()
    return graph, result


@dataclass(frozen=True)
class _Passes:
    """The head's passes, compiled or not, and the channel of their attention."""

    first: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    step: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    plain: HeadPasses


def _passes(drafter: Drafter) -> _Passes:
    """EAGLE heads and modules of transformers layers are compiled; any other head runs as it is."""
    plain = MtpPasses(drafter.head) if isinstance(drafter.head, MtpHead) else HeadPasses(drafter.head)
    if not isinstance(drafter.head, (Eagle3Head, MtpHead)):
        return _Passes(plain.first, plain.step, plain)
    options: dict[str, Any] = {"fullgraph": True, "dynamic": True}
    return _Passes(torch.compile(plain.first, **options), torch.compile(plain.step, **options), plain)


def _carrying(passes: _Passes, runner: GroupRunner, planned: PlannedBatch) -> AbstractContextManager[None]:
    return passes.plain.carrying(paged_attend(runner, planned))
