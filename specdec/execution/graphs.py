"""Rounds from CUDA graphs in fixed shapes: the verification, the draft prefill, and each further draft step.

The draft prefill is launched right after the verification, before the host knows what was accepted (see
`drafters/loops/chain/static.py`). So while the host reads the verification result and lays out the draft steps, the
device is at work; each step is planned while the one before runs; commit, schedule and the next verification follow
while the steps run. That makes two transfers per round instead of one.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from drafters.loops.base import Draft, DraftInput, GraphLoop, StaticLoop, StaticSteps
from specdec.acceptance.judge import in_order
from specdec.acceptance.packed import PackedResult
from specdec.compiler.settings import (
    compiled,
    compiled_model,
    compiler_settings,
    for_any_batch,
    store_cos_sin,
    unwrapped,
)
from specdec.compiler.siblings import fuse_siblings
from specdec.config import EngineConfig
from specdec.errors import InvalidInputError, UnsupportedModelError
from specdec.execution.base import Drafter
from specdec.execution.capture import Bucket, DraftCapture, EmptyRound, capture_bucket
from specdec.execution.eager import EagerExecutor
from specdec.execution.readback import HostReads
from specdec.execution.round import Round
from specdec.execution.verification import ChainedVerification, DraftedVerification, Verification
from specdec.ops.argmax import greedy_ids
from specdec.ops.experts import mixtures, using_capturable_experts
from specdec.rounds.buckets import loop_limits, static_shape
from specdec.rounds.drafting import rows_after
from specdec.rounds.fields import HeadPagesSection, VerificationSection
from specdec.rounds.randomness import SamplingRound
from specdec.rounds.static import FixedTarget, uniform_verified
from specdec.rounds.verification import TargetArrays, Verified, empty_target
from specdec.target.selftest import invariance_test, matmul_test
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
            InvalidInputError: the head's draft loop has no static form.
        """
        started, before = time.perf_counter(), torch.cuda.memory_reserved()
        invariant = target.runner.batch_invariant
        if invariant and mixtures(target.hf_model):
            raise UnsupportedModelError(
                f"{type(target.hf_model).__name__} is a mixture of experts, whose matmuls are not batch-invariant; "
                "use backend='flashinfer'"
            )
        model = compiled_model(target.hf_model)
        self._eager = EagerExecutor(target, drafter, config, for_any_batch(model) if invariant else None)
        self._target = target
        self._page_size = config.page_size
        self._query_len = config.num_speculative_tokens + 1
        rows = graph_rows(config.max_num_seqs, self._query_len)
        self._sizes, self._sent = rows[::-1], 0
        drafting = drafter is not None and self._query_len > 1
        device = target.hf_model.device
        self._fixed = {n: FixedTarget(static_shape(config, n), drafting, device) for n in rows}
        self._loop: StaticLoop | None = None
        self._steps: dict[int, StaticSteps] = {}
        head = None if drafter is None else drafter.head
        modules = [m for m in (target.hf_model, head) if isinstance(m, torch.nn.Module)]
        with torch.no_grad(), compiler_settings(invariant), using_capturable_experts(*modules):
            pool = torch.cuda.graph_pool_handle()
            drafts = None
            if drafter is not None and drafting:
                self._loop = _static_form(target, drafter, config)
                self._steps = {n: self._loop.steps(static_shape(config, n)) for n in rows}
                drafts = DraftCapture(self._loop, drafter.runner, pool)
            fused = self._fuse(rows[-1], drafter, drafts)
            store_cos_sin(target.hf_model, target.alterations)
            if self._eager.model is not None:
                log.info("testing that results do not depend on the batch")
                with unwrapped(UnsupportedModelError):
                    invariance_test(target, self._eager.model)
                    matmul_test(target.hf_model)
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
        return self._eager.transfers + self._sent

    @property
    def reads(self) -> HostReads:
        """See `Executor.reads`."""
        return self._eager.reads

    def verified(self, verified: Verified, round_: Round) -> Verified:
        """Token rows of a graph's batch stand K+1 apart."""
        return verified if round_.bucket is None else uniform_verified(verified, self._query_len)

    def send(self, draft: DraftInput | None, target: TargetArrays, sampling: SamplingRound | None) -> Round:
        """See `Executor.send`."""
        rows = self._bucket_of(target)
        eager = rows is None or draft is not None or sampling is not None
        sent = self._eager.send(draft, target, sampling).sent if eager else None
        if rows is not None:
            self._send_verification(rows, target)
        return Round(target, sent, rows, sampling is not None)

    def draft(self, round_: Round, aux_hidden_states: torch.Tensor) -> Draft | None:
        """See `Executor.draft`."""
        return self._eager.draft(round_, aux_hidden_states)

    def verify(self, round_: Round, draft: Draft | None) -> Verification:
        """See `Executor.verify`. Without sampled rows the draft prefill is launched after it."""
        if round_.bucket is None:
            return self._eager.verify(round_, draft)
        bucket = self._buckets[round_.bucket]
        if self._loop is not None and draft is not None and round_.sent is not None:
            self._loop.drafts[: len(draft.token_ids), : draft.token_ids.shape[1]].copy_(draft.token_ids)
        bucket.verify.replay()
        aux_hidden_states = self._target.aux_hidden_states(round_.bucket * self._query_len)
        if round_.sampled:
            return Verification(self._eager.reads.start(self._judge(bucket, round_, draft)), aux_hidden_states)
        read = self._eager.reads.start(bucket.result.rows(round_.num_rows))
        if bucket.draft is None:
            return ChainedVerification(read, aux_hidden_states, partial(self.launch_next, round_))
        bucket.draft.prefill.replay()
        return DraftedVerification(read, aux_hidden_states, partial(self._draft_on, round_))

    def launch_next(self, round_: Round, target: TargetArrays) -> tuple[Round, Verification]:
        """Launch a round without drafts after another one, see `ChainedVerification.launch_next`."""
        assert round_.bucket is not None
        bucket = self._buckets[round_.bucket]
        self._send_verification(round_.bucket, target)
        bucket.token_ids.copy_(bucket.result.first_token)
        after = replace(round_, target=target, sent=None)
        return after, self.verify(after, None)

    def logits_of(self, round_: Round) -> torch.Tensor | None:
        """[J, K+1, V] logits that the graph of a launched greedy round wrote, valid until the next one is launched.

        None of a round whose acceptance ran outside of a graph.
        """
        if round_.bucket is None or round_.sampled:
            return None
        bucket = self._buckets[round_.bucket]
        return bucket.logits[bucket.logit_index[: round_.num_rows]]

    def _judge(self, bucket: Bucket, round_: Round, draft: Draft | None) -> PackedResult:
        assert round_.sent is not None
        index = bucket.logit_index[: round_.num_rows, : round_.target.max_drafts + 1]
        device = replace(round_.sent.verification, logit_index=index)
        return self._eager.judge(bucket.logits, device, in_order(draft, device))

    def _draft_on(self, round_: Round, num_accepted: np.ndarray) -> Draft:
        """Launch the steps after a draft prefill; each is planned while the one before runs."""
        assert round_.bucket is not None and self._loop is not None
        graphs = self._buckets[round_.bucket].draft
        assert graphs is not None
        num_steps = 0
        if graphs.steps:
            rows = rows_after(round_.target, num_accepted)
            batches, _ = self._steps[round_.bucket].send(rows)
            self._sent += 1
            for step, host in zip(graphs.steps, batches, strict=True):
                step.planner.replan(host)
                step.graph.replay()
            num_steps = rows.num_steps
        return Draft(self._loop.drafts[: round_.num_rows, : num_steps + 1], None)

    def _send_verification(self, rows: int, target: TargetArrays) -> None:
        """Send and plan a verification and the draft prefill after it."""
        bucket = self._buckets[rows]
        batch, head, _ = self._fixed[rows].send(target)
        self._sent += 1
        bucket.planner.replan(batch)
        if bucket.draft is not None and head is not None:
            bucket.draft.prefill_planner.replan(head)

    def _bucket_of(self, target: TargetArrays) -> int | None:
        """The smallest bucket that holds a round of verifications only; None for any other round."""
        if not target.only_bonus_tokens:
            return None
        place = bisect_left(self._sizes, len(target.start))
        return self._sizes[place] if place < len(self._sizes) else None

    def _empty_round(self, rows: int) -> EmptyRound:
        """A round without rows in the fixed shape, at the addresses that the graphs read."""
        target = empty_target(self._page_size)
        batch, head, staged = self._fixed[rows].send(target)
        device = VerificationSection.static_views(batch, staged, rows * (self._query_len - 1))
        if head is None:
            return EmptyRound(device, None, ())
        steps = self._steps[rows]
        batches, step_staged = steps.send(rows_after(target, target.start))
        prefill = HeadPagesSection.metadata(device.metadata, staged, head)
        return EmptyRound(device, prefill, steps.views(batches, step_staged))

    def _fuse(self, rows: int, drafter: Drafter | None, drafts: DraftCapture | None) -> int:
        log.info("fusing sibling projections")
        round_, target = self._empty_round(rows), self._target
        token_ids, metadata = round_.target.token_ids, round_.target.metadata
        count = fuse_siblings(
            target.hf_model,
            lambda: target.forward(token_ids, target.runner.plan(metadata), round_.target.logits_indices),
            target.alterations,
        )
        if drafts is None or drafter is None or round_.prefill is None or not isinstance(drafter.head, torch.nn.Module):
            return count
        result = PackedResult.zeros(rows, self._query_len - 1, target.hf_model.device)
        run = partial(drafts.run_plainly, result, round_.prefill)
        return count + fuse_siblings(drafter.head, run, target.alterations)


def _static_form(target: Target, drafter: Drafter, config: EngineConfig) -> StaticLoop:
    """The static form of the head's loop, over the target's buffer of aux hidden states."""
    loop = drafter.loop
    if not isinstance(loop, GraphLoop):
        raise InvalidInputError(f"{loop.name} run without CUDA graphs; use cuda_graphs=False")
    aux, limits = target.aux_hidden_states(config.max_num_batched_tokens), loop_limits(config)
    limits = replace(limits, rows=graph_rows(config.max_num_seqs, config.num_speculative_tokens + 1)[0])
    return loop.static_form(drafter.runner, aux, limits, greedy_ids, compiled)
