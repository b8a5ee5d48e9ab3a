"""Rounds from CUDA graphs in fixed shapes: the verification, the head's first pass, and each further draft step.

The first pass is launched right behind the verification, before the host knows what was accepted: it reads every token
row of the verification with the verdict's own tokens, on the device, and takes its output at the last accepted one.
What it writes for rejected rows lies behind the row's end and is overwritten. So while the host reads the verdict and
lays out the draft steps, the device is at work; each step is planned while the one before runs; commit, schedule and
the next verification follow while the steps run. That makes two transfers a round instead of one.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from drafters.loops.chain.run import Draft
from specdec.acceptance.judge import in_order
from specdec.compiler.settings import (
    compiled_model,
    compiler_settings,
    for_any_batch,
    fuse_siblings,
    store_angles,
    unwrapped,
)
from specdec.config import EngineConfig
from specdec.errors import UnsupportedModelError
from specdec.execution.capture import Bucket, DraftBuffers, DraftCapture, EmptyRound, capture_bucket, head_metadata
from specdec.execution.eager import Drafter, EagerExecutor
from specdec.execution.readback import HostReads
from specdec.execution.verification import ChainedVerification, DraftedVerification, Verification
from specdec.ops.experts import mixtures, using_capturable_experts
from specdec.rounds.static import FixedRound, empty_round, fixed_shape, uniform_verified
from specdec.rounds.transfer import DeviceRound, fixed_views, step_views
from specdec.rounds.verification import DraftArrays, SamplingRound, TargetArrays, Verified, steps_after
from specdec.target.selftest import invariance_test, products_test
from specdec.target.target import Target

log = logging.getLogger("specdec")


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
        target: the round's host arrays. device: the round in its own shape, where something of it runs eagerly (it
            fits no bucket, drafts from tapped states, or has sampled rows).
        sampled: whether rows are sampled: the graph gives the logits, and the verdict is made apart.
    """

    rows: int | None
    target: TargetArrays
    device: DeviceRound | None
    sampled: bool

    @property
    def num_rows(self) -> int:
        """J."""
        return len(self.target.judged)


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

    Rounds with sampled rows draft eagerly and verify from the graph. Over a batch-invariant backend the target is the
    compiled one in all rounds.
    """

    def __init__(self, target: Target, drafter: Drafter | None, config: EngineConfig) -> None:
        """Fuse, compile and capture; takes tens of seconds for a large model.

        Raises:
            UnsupportedAttentionError: the attention backend has no plans that a graph can hold.
            UnsupportedModelError: the backend is batch-invariant and the model is not.
        """
        started, before = time.perf_counter(), torch.cuda.memory_reserved()
        invariant = target.runner.batch_invariant
        if invariant and mixtures(target.hf_model):
            raise UnsupportedModelError(
                f"{type(target.hf_model).__name__} is a mixture of experts, whose products are not batch-invariant; "
                "use backend='flashinfer'"
            )
        model = compiled_model(target.hf_model)
        self._eager = EagerExecutor(target, drafter, config, for_any_batch(model) if invariant else None)
        self._target = target
        self._page_size = config.page_size
        self._query_len = config.num_speculative_tokens + 1
        rows = graph_rows(config.max_num_seqs, self._query_len)
        drafting = drafter is not None and self._query_len > 1
        self._fixed = {n: FixedRound(fixed_shape(config, n), drafting, target.hf_model.device) for n in rows}
        head = None if drafter is None else drafter.head
        modules = [m for m in (target.hf_model, head) if isinstance(m, torch.nn.Module)]
        with torch.no_grad(), compiler_settings(invariant), using_capturable_experts(*modules):
            pool = torch.cuda.graph_pool_handle()
            drafts = None
            if drafter is not None and drafting:
                tapped = target.tapped(config.max_num_batched_tokens)
                drafts = DraftCapture(drafter, tapped, rows[0], self._query_len - 1, pool)
            self._drafts: DraftBuffers | None = None if drafts is None else drafts.buffers
            fused = self._fuse(rows[-1], drafter, drafts)
            store_angles(target.hf_model)
            if self._eager.model is not None:
                log.info("testing that results do not depend on the batch")
                with unwrapped(UnsupportedModelError):
                    invariance_test(target, self._eager.model)
                    products_test(target.hf_model)
            self._buckets: dict[int, Bucket] = {}
            for n in rows:
                log.info("compiling and capturing for %d rows", n)
                self._buckets[n] = capture_bucket(self._eager, model, drafts, self._empty_round(n), pool)
        torch.cuda.synchronize()
        seconds, taken = time.perf_counter() - started, torch.cuda.memory_reserved() - before
        count = sum(1 if b.draft is None else 2 + len(b.draft.steps) for b in self._buckets.values())
        self.report = GraphReport(count, rows, seconds, taken, fused)

    @property
    def transfers(self) -> int:
        """See `Executor.transfers`."""
        return self._eager.transfers + sum(fixed.transfers for fixed in self._fixed.values())

    @property
    def reads(self) -> HostReads:
        """See `Executor.reads`."""
        return self._eager.reads

    def verified(self, verified: Verified, round_: GraphRound) -> Verified:
        """Token rows of a graph's batch stand K+1 apart."""
        return verified if round_.rows is None else uniform_verified(verified, self._query_len)

    def send(self, draft: DraftArrays | None, target: TargetArrays, sampling: SamplingRound | None) -> GraphRound:
        """See `Executor.send`."""
        rows = self._bucket_of(target)
        eager = rows is None or draft is not None or sampling is not None
        device = self._eager.send(draft, target, sampling) if eager else None
        if rows is not None:
            self._send_verification(rows, target)
        return GraphRound(rows, target, device, sampling is not None)

    def draft(self, round_: GraphRound, tapped: torch.Tensor) -> Draft | None:
        """See `Executor.draft`."""
        return None if round_.device is None else self._eager.draft(round_.device, tapped)

    def verify(self, round_: GraphRound, draft: Draft | None) -> Verification:
        """See `Executor.verify`. Without sampled rows the head's first pass is launched behind it."""
        if round_.rows is None:
            assert round_.device is not None
            return self._eager.verify(round_.device, draft)
        bucket = self._buckets[round_.rows]
        if self._drafts is not None and draft is not None and round_.device is not None:
            self._drafts.drafts[: len(draft.token_ids), : draft.token_ids.shape[1]].copy_(draft.token_ids)
        bucket.verify.replay()
        tapped = self._target.tapped(round_.rows * self._query_len)
        if round_.sampled:
            return Verification(self._eager.reads.start(self._judge(bucket, round_, draft)), tapped)
        read = self._eager.reads.start(bucket.packed[: round_.num_rows])
        if bucket.draft is None:
            return ChainedVerification(read, tapped, partial(self.launch_next, round_))
        bucket.draft.first.replay()
        return DraftedVerification(read, tapped, partial(self._draft_on, round_))

    def launch_next(self, round_: GraphRound, target: TargetArrays) -> tuple[GraphRound, Verification]:
        """Launch a round without drafts after another one, see `ChainedVerification.launch_next`."""
        assert round_.rows is not None
        bucket = self._buckets[round_.rows]
        self._send_verification(round_.rows, target)
        bucket.token_ids.copy_(bucket.packed[:, 1])
        after = replace(round_, target=target, device=None)
        return after, self.verify(after, None)

    def logits_of(self, round_: GraphRound) -> torch.Tensor | None:
        """[J, K+1, V] logits that the graph of a launched greedy round wrote, valid until the next one is launched.

        None of a round that was judged outside of a graph.
        """
        if round_.rows is None or round_.sampled:
            return None
        bucket = self._buckets[round_.rows]
        return bucket.logits[bucket.logit_index[: round_.num_rows]]

    def _judge(self, bucket: Bucket, round_: GraphRound, draft: Draft | None) -> torch.Tensor:
        assert round_.device is not None
        index = bucket.logit_index[: round_.num_rows, : round_.target.max_drafts + 1]
        device = replace(round_.device, logit_index=index)
        return self._eager.judge(bucket.logits, device, in_order(draft, device))

    def _draft_on(self, round_: GraphRound, num_accepted: np.ndarray) -> Draft:
        """Launch the steps behind a first pass; each is planned while the one before runs."""
        assert round_.rows is not None and self._drafts is not None
        graphs = self._buckets[round_.rows].draft
        assert graphs is not None
        num_steps = 0
        if graphs.steps:
            draft = steps_after(round_.target, num_accepted)
            batches, _ = self._fixed[round_.rows].steps.send(draft)
            for step, host in zip(graphs.steps, batches, strict=True):
                step.planner.replan(host)
                step.graph.replay()
            num_steps = draft.num_steps
        return Draft(self._drafts.drafts[: round_.num_rows, : num_steps + 1], None)

    def _send_verification(self, rows: int, target: TargetArrays) -> None:
        """Send and plan a verification and the first pass behind it."""
        bucket = self._buckets[rows]
        batch, head, _ = self._fixed[rows].target.send(target)
        bucket.planner.replan(batch)
        if bucket.draft is not None and head is not None:
            bucket.draft.first_planner.replan(head)

    def _bucket_of(self, target: TargetArrays) -> int | None:
        """The smallest bucket that holds a round of verifications only; None for any other round."""
        if not target.only_roots:
            return None
        return min((rows for rows in self._buckets if rows >= len(target.start)), default=None)

    def _empty_round(self, rows: int) -> EmptyRound:
        """A round without rows in the fixed shape, at the addresses that the graphs read."""
        draft, target = empty_round(self._page_size)
        fixed = self._fixed[rows]
        batch, head, staged = fixed.target.send(target)
        device = fixed_views(batch, staged, rows * (self._query_len - 1))
        if head is None:
            return EmptyRound(device, None, ())
        batches, step_staged = fixed.steps.send(draft)
        first = head_metadata(device.metadata, staged, head)
        return EmptyRound(device, first, step_views(batches, step_staged))

    def _fuse(self, rows: int, drafter: Drafter | None, drafts: DraftCapture | None) -> int:
        log.info("fusing sibling projections")
        round_, target = self._empty_round(rows), self._target
        token_ids, metadata = round_.target.token_ids, round_.target.metadata
        count = fuse_siblings(
            target.hf_model, lambda: target.forward(token_ids, target.runner.plan(metadata), round_.target.judged_rows)
        )
        if drafts is None or drafter is None or round_.first is None or not isinstance(drafter.head, torch.nn.Module):
            return count
        packed = torch.zeros(rows, 2 * self._query_len, dtype=torch.int64, device=target.hf_model.device)
        return count + fuse_siblings(drafter.head, partial(drafts.run_plainly, packed, round_.first))
