"""Rounds from CUDA graphs: the verification, the draft prefill, and each further draft step.

Rounds in which every row verifies have a fixed shape; others run by segments (`ragged.py`), and then the same steps.

The draft prefill is launched right after the verification, before the host knows what was accepted (see
`drafters/loops/fixed_forms.py`): the device is busy while the host lays out the draft steps; it
plans each while the one before runs. This takes two transfers per round instead of one, three with sampled rows, and
one more for drafts that the host gives.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from attention.hf.gate import gate_of
from attention.staging import on_device
from drafters.loops.base import Draft, DraftInput, FixedLoop, FixedSteps, GraphLoop, PrefillPasses
from specdec.acceptance.judge import Drafted, fill_from_loop, filled_drafts, in_order, judge_from_loop
from specdec.acceptance.packed import PackedResult
from specdec.compiler.compiling import (
    compiled,
    compiled_model,
    compiler_settings,
    for_any_batch,
    store_cos_sin,
    unwrapped,
)
from specdec.compiler.gemm_selection import choose_products
from specdec.compiler.siblings import fuse_siblings
from specdec.config import EngineConfig
from specdec.errors import InvalidInputError, UnsupportedModelError
from specdec.execution.base import (
    ChainedVerification,
    DraftBuffers,
    DraftedVerification,
    Drafter,
    GraphReport,
    Round,
    Verification,
)
from specdec.execution.capture import (
    Bucket,
    DraftCapture,
    EmptyRound,
    Recorder,
    capture_bucket,
    compile_bucket,
    kernels_compiled_together,
    rehearse,
    rehearse_decisions,
    step_rows,
)
from specdec.execution.ragged import RaggedPrefill, RaggedTarget, mixed_bucket, mixed_buckets
from specdec.execution.readback import HostReads
from specdec.execution.sampled import SampledDrafts, decide_sampled
from specdec.ops.greedy_rows import greedy_drafts, greedy_ids
from specdec.ops.mixtures.choice import using_capturable_experts
from specdec.rounds.buckets import fixed_shape, graph_rows, loop_limits
from specdec.rounds.drafting import accepted_by_row, ahead_inputs, rows_after
from specdec.rounds.extras import Decision, adjusted, noted, read_early, rewritten
from specdec.rounds.fixed import FixedSampling, fixed_target
from specdec.rounds.randomness import SamplingRound
from specdec.rounds.transfer import AheadTransfer, DeviceRound
from specdec.rounds.verification import TargetArrays, empty_target
from specdec.selftest.selftest import experts_test, invariance_test, matmul_test
from specdec.wrapped.alterations import Alterations
from specdec.wrapped.target import Target

log = logging.getLogger("specdec")


class GraphExecutor:
    """`Executor` of rounds from CUDA graphs: verifications in one shape for each bucket of rows, others by segments.

    The constructor compiles; then call `capture`. With a head, for greedy and for sampled rows, the draft prefill is
    launched after the verification, before its result is read, and the draft steps run from the graphs of a bucket.

    before_capture: called before anything is compiled or captured; raises if the model has changed.
    """

    def __init__(self, target: Target, drafter: Drafter | None, config: EngineConfig) -> None:
        """Fuse and compile; takes tens of seconds for a large model. Needs no attention kernel. Then call `capture`.

        What raises leaves the model and the head as they were.

        Raises:
            InvalidInputError: the head's draft loop has no fixed-shape form.
        """
        started = time.perf_counter()
        self._memory = torch.cuda.memory_reserved()
        invariant = target.runner.batch_invariant
        model = compiled_model(target.hf_model)
        self._target = target
        self._extras = config.extras
        device = target.hf_model.device
        most = PackedResult.numel(config.max_num_seqs, config.num_speculative_tokens)
        self.reads = HostReads(most, device, target.group)
        self.before_capture: Callable[[], None] | None = None
        fixed = config if drafter is not None else replace(config, num_speculative_tokens=0)
        self._query_len = fixed.num_speculative_tokens + 1  # without a head, rounds with drafts are of any shape
        rows = graph_rows(config.max_num_seqs, self._query_len)
        self._nobody = empty_target(fixed)
        self._sizes, self._sent, self._keyed = rows[::-1], 0, config.keyed
        self._sampling = FixedSampling(step_rows(rows[0]) + 1, config.num_speculative_tokens, device, config.keyed)
        self._drawn: SampledDrafts | None = None
        drafting = drafter is not None and self._query_len > 1
        self._passes = passes = PrefillPasses.of(drafter.loop if drafter is not None and drafting else None)
        self._transfer = AheadTransfer(passes, config, device)
        self._fixed = {n: fixed_target(fixed, n, passes, device) for n in rows}
        self._loop: FixedLoop | None = None
        self._steps: dict[int, FixedSteps] = {}
        self._buckets: dict[int, Bucket] = {}
        self._mixed = {mixed_bucket(config, n) + passes.bonus * (n + 1) for n in rows}
        self._beside_prompts = mixed_buckets(config, rows[0])
        self._alterations = Alterations(self)
        target.alterations.on_undo(self._alterations.undo)
        self._head = head = None if drafter is None else drafter.head
        self._modules = [m for m in (target.hf_model, head) if isinstance(m, torch.nn.Module)]
        self._model, self._pool, drafts = model, torch.cuda.graph_pool_handle(), None
        self._ragged = RaggedTarget(target, model, config, self._pool, self._compiling)
        self._prefill: RaggedPrefill | None = None
        with self._alterations.undone_on_error(), self._compiling():
            if drafter is not None and drafting:
                drafts = self._draft_forms(drafter, config, rows)
            self._drafts = drafts
            self.draft_buffers = None if self._loop is None else DraftBuffers(self._loop, self._drawn)
            self._fused = self._fuse(rows[-1], drafter, drafts)
            for module in self._modules[: 1 + passes.bonus]:  # of heads, a whole model; the others have few layers
                store_cos_sin(module, self._alterations)
            if not invariant:  # invariant models: in `capture`, from inputs that are the same in every engine
                log.info("compiling")
                compile_bucket(target, model, drafts, self._empty_round(rows[0]), config.extras)
        self._seconds = time.perf_counter() - started

    def _draft_forms(self, drafter: Drafter, config: EngineConfig, rows: Sequence[int]) -> DraftCapture:
        """Make the fixed-shape form of the draft loop and buffers of sampled drafts; returns the capture of both."""
        target = self._target
        self._loop = loop = _fixed_form(target, drafter, config)
        self._steps = {n: loop.steps(fixed_shape(config, step_rows(n))) for n in rows}
        if config.draws_drafts or config.keys_drafts:
            self._drawn = SampledDrafts(drafter.head, loop, self._sampling.device, target.vocab_size)
        own = self._pool, self._compiling, target.group
        self._prefill = RaggedPrefill(loop, self._passes, drafter.runner, config, *own)
        return DraftCapture(loop, self._drawn, drafter.runner, self._pool)

    def capture(self) -> None:
        """Capture the graphs of every bucket, once.

        Raises:
            UnsupportedAttentionError: the attention backend has no plans that a graph can hold.
            UnsupportedModelError: the backend is batch-invariant and the model is not.
        """
        started = time.perf_counter()
        target = self._target
        invariant = target.runner.batch_invariant
        with self._compiling():
            if invariant:
                log.info("compiling, and testing that results do not depend on the batch")
                with unwrapped(UnsupportedModelError):
                    invariance_test(target, for_any_batch(self._model))
                    matmul_test(target.hf_model)
                    experts_test(target.hf_model)
            tokens = {n * self._query_len for n in self._fixed}
            beside_prompts = (target.hf_model.get_decoder(), self._beside_prompts)
            loop = self._loop
            steps = range(0 if loop is None else loop.num_steps(self._query_len - 1))
            widths = {1} if loop is None else {1, *map(loop.step_width, steps)}
            of_steps = {rows * width for rows in self._sizes for width in widths}  # of 1: also of chosen drafts
            of_prefill = {n * (self._query_len + self._passes.bonus) for n in self._fixed}
            readers = [(target.hf_model, tokens), beside_prompts, (self._head, of_prefill | of_steps)]
            products = choose_products(readers, invariant)
            log.info("compiling kernels of all rounds")
            with kernels_compiled_together(target.hf_model.device):
                self._rehearse()
            for n in self._fixed:
                log.info("capturing for %d rows", n)
                self._buckets[n] = self._captured(n)
        log.info("capturing for rounds of any shape")
        self._ragged.capture_expected(self._fixed)
        if self._prefill is not None:
            self._prefill.capture_expected(self._mixed)
        torch.cuda.synchronize()
        seconds = self._seconds + time.perf_counter() - started
        taken = torch.cuda.memory_reserved() - self._memory
        buckets = self._buckets.values()
        numbers = sum(b.num_graphs for b in buckets), sum(b.num_sampled for b in buckets)
        segments = self._ragged.num_graphs + (0 if self._prefill is None else self._prefill.num_graphs)
        self.report = GraphReport(*numbers, segments, tuple(self._fixed), seconds, taken, self._fused, products)

    def _captured(self, rows: int, recorder: Recorder | None = None) -> Bucket:
        """Everything of one bucket; recorder: see `capture_bucket`."""
        parts = self._target, self._model, self._drafts, self._empty_round(rows), self._sampling.device
        return capture_bucket(*parts, self._extras, self._pool, recorder)

    # Before the captures, so that Triton compiles the kernels of all rounds in parallel.
    def _rehearse(self) -> None:
        """Launch all kernels of rounds once, also of sampled rows of rounds of any shape."""
        most, *others = self._fixed
        logits = self._captured(most, rehearse).logits
        rehearse_decisions(logits, most, self._query_len - 1, self._sampling.device, self._drawn)
        for n in others:
            self._captured(n, rehearse)

    def release(self) -> None:
        """Restore the model and the head, because another executor runs the rounds."""
        self._alterations.undo()

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """The state in which model and head are compiled and captured.

        The model's gate comes first and is held throughout: a forward of the user's own on another thread must not run
        experts in the form of a capture, nor half of its layers fused.
        """
        model = self._target.hf_model
        settings = compiler_settings(self._target.runner.batch_invariant)
        if self.before_capture is not None:
            self.before_capture()
        with gate_of(model.config).held(), torch.no_grad(), settings, using_capturable_experts(*self._modules):
            yield

    @property
    def transfers(self) -> int:
        return self._transfer.transfers + self._sent

    def send(self, draft: DraftInput | None, target: TargetArrays, sampling: SamplingRound | None) -> Round:
        """See `Executor.send`. `draft` is None: every round with a head drafts before it is read."""
        rows = self._bucket_of(target, sampling)
        if rows is None:
            return Round(target, self._transfer.send(target.inputs), None, sampling=sampling)
        # Send and plan a verification and the draft prefill after it.
        bucket = self._buckets[rows]
        batch, passes, _ = self._fixed[rows].send(target)
        self._sent += 1
        bucket.planner.replan(batch)
        if bucket.draft is not None and bucket.draft.prefill_planners:
            for planner, own in zip(bucket.draft.prefill_planners, passes, strict=True):
                planner.replan(own)
        return Round(target, None, rows, sampling=sampling)

    def draft(self, round_: Round, aux_hidden_states: Tensor) -> None:
        """See `Executor.draft`: the graphs have drafted."""

    def verify(self, round_: Round, draft: Drafted) -> Verification:
        """See `Executor.verify`. The draft prefill, if any, is launched after it."""
        if round_.bucket is None:
            return self._verify_ragged(round_, draft)
        bucket = self._buckets[round_.bucket]
        device = bucket.device
        extras = round_.target.extras
        draft = None if self._loop is None else Draft(self._loop.drafts, None)
        if round_.target.given is not None:
            self._give(round_.target, round_.target.given)
        early = read_early(self._extras, extras, partial(in_order, draft, device))
        bucket.verify.replay()
        logits = rewritten(self._extras, extras, bucket.logits, device, early)
        if logits is not bucket.logits:
            bucket.result.packed.copy_(self._decide(logits, device, draft, round_.sampling, device.sources).packed)
        elif round_.sampling is not None:
            self._send_sampling(round_.sampling)
            bucket.decide.replay()
        rows = round_.num_rows
        result = bucket.result.rows(round_.num_rows)
        decision = Decision(bucket.logits, logits, device.logit_index[:rows], result.tokens)
        read = self.reads.start(result, device.num_drafts[:rows], noted(self._extras, extras, decision))
        aux_hidden_states = self._target.aux_hidden_states(round_.bucket * self._query_len)
        if bucket.draft is None:
            return ChainedVerification(read, aux_hidden_states, partial(self.launch_next, round_))
        bucket.draft.prefill.of(round_.sampled).replay()
        return DraftedVerification(read, aux_hidden_states, partial(self._draft_on, round_))

    def _give(self, target: TargetArrays, given: np.ndarray) -> None:
        """Put drafts that the host knows where the verification reads the loop's."""
        assert self._loop is not None
        drafts = self._loop.drafts
        host = np.full(drafts.shape, -1)
        host[slice(len(given)) if target.sources is None else target.sources, : given.shape[1]] = given
        known = on_device(host, drafts.device)
        self._sent += 1
        torch.where(known >= 0, known, drafts, out=drafts)

    def _verify_ragged(self, round_: Round, draft: Drafted) -> Verification:
        """A round of any shape: the target and the draft prefill from graphs by segments, the rest by operators."""
        device = round_.sent
        assert device is not None
        if draft is not None and self._loop is not None:
            self._target.group.share(self._loop.drafts)
        token_ids = fill_from_loop(device, draft)
        sources = device.sources
        if round_.target.given is not None:
            draft = filled_drafts(device, token_ids, draft)
            device = replace(device, sources=None)
        extras = round_.target.extras
        early = read_early(self._extras, extras, partial(in_order, draft, device))
        logits = self._ragged.logits(token_ids, device.metadata, device.logits_indices)
        changed = rewritten(self._extras, extras, adjusted(self._extras, logits, device), device, early)
        result = self._decide(changed, device, draft, round_.sampling, sources)
        decision = Decision(logits, changed, device.logit_index, result.tokens)
        read = self.reads.start(result, device.num_drafts, noted(self._extras, extras, decision))
        aux_hidden_states = self._target.aux_hidden_states(len(device.token_ids))
        if self._prefill is None:
            return Verification(read, aux_hidden_states)
        ahead = ahead_inputs(round_.target, self._passes, self._prefill.num_rows)
        sent = self._transfer.send_ahead(ahead, device)
        accepted, chosen = self._prefill.run(result, sent)
        if round_.sampled and self._drawn is not None:
            self._drawn.choose(0, chosen, accepted)
        return DraftedVerification(read, aux_hidden_states, partial(self._draft_on, round_))

    def _decide(
        self,
        logits: Tensor,
        device: DeviceRound,
        draft: Drafted,
        sent: SamplingRound | None,
        sources: Tensor | None,
    ) -> PackedResult:
        """sources: [R] int64, rows of the loop's drafts, and of what they were drawn from, for the drafting rows."""
        greedy = greedy_ids(logits)
        result = judge_from_loop(greedy, device, draft)
        rows = result.num_rows
        if sent is not None:
            self._send_sampling(sent)
        if sent is not None and rows:
            sampling = self._sampling.device.first(rows)
            proposal = None if self._drawn is None else self._drawn.proposal_of(rows, sources)
            decide_sampled(logits, greedy, device.logit_index, device.num_drafts, sampling, result, proposal)
        return result

    def _send_sampling(self, sampling: SamplingRound) -> None:
        """While the device verifies: it takes the host as long as all else up to the next launch."""
        self._sampling.send(sampling)
        self._sent += 1

    def launch_next(
        self, round_: Round, target: TargetArrays, sampling: SamplingRound | None
    ) -> tuple[Round, Verification]:
        """Launch a round without drafts after another round, see `ChainedVerification.launch_next`."""
        assert round_.bucket is not None
        bucket = self._buckets[round_.bucket]
        after = self.send(None, target, sampling)
        bucket.device.token_ids.copy_(bucket.result.first_token)
        return after, self.verify(after, None)

    def _draft_on(self, round_: Round, num_accepted: np.ndarray) -> Draft:
        """Launch the steps after a draft prefill; each is planned while the one before runs."""
        assert self._loop is not None
        target = round_.target
        bucket = round_.bucket or self._fitting(len(target.start))
        graphs = self._buckets[bucket].draft
        assert graphs is not None
        rows = rows_after(target, accepted_by_row(target, num_accepted))
        num_drafts = int(rows.num_drafts.max(initial=1))
        if num_steps := self._loop.num_steps(num_drafts):
            batches, _ = self._steps[bucket].send(rows)
            self._sent += 1
            for step, host in zip(graphs.steps[:num_steps], batches, strict=False):
                step.planner.replan(host)
                step.run.of(round_.sampled).replay()
        return Draft(self._loop.drafts[: len(target.start), :num_drafts], None)

    def _bucket_of(self, target: TargetArrays, sampling: SamplingRound | None) -> int | None:
        """The smallest bucket that holds a round of verifications only; None for others.

        Before position M-1 a request has no rows yet for the later ones of M modules; a fixed shape has them all. By
        rejection, drafts that the host gives have distributions of their own, which a graph would take for the head's.
        """
        if not target.only_bonus_tokens:
            return None
        if target.given is not None and (self._loop is None or (sampling is not None and not self._keyed)):
            return None
        if self._passes.count > 1 and target.start.min() < self._passes.count - 1:
            return None
        return self._fitting(len(target.start))

    def _fitting(self, rows: int) -> int:
        """The smallest bucket that holds so many rows."""
        return self._sizes[bisect_left(self._sizes, rows)]

    def _empty_round(self, rows: int) -> EmptyRound:
        """A round without rows in the fixed shape, at the addresses that the graphs read."""
        target = self._nobody
        device, prefill, carried = self._fixed[rows].device(target)
        if not prefill:
            return EmptyRound(device)
        steps = self._steps[rows]
        batches, staged = steps.send(rows_after(target, target.start))
        return EmptyRound(device, prefill, steps.views(batches, staged), carried)

    def _fuse(self, rows: int, drafter: Drafter | None, drafts: DraftCapture | None) -> int:
        log.info("fusing sibling projections")
        round_ = self._empty_round(rows)
        target = self._target
        token_ids = round_.target.token_ids
        metadata = round_.target.metadata
        count = fuse_siblings(
            target.hf_model,
            lambda: target.forward(token_ids, target.runner.blank(metadata), round_.target.logits_indices),
            self._alterations,
        )
        if drafts is None or drafter is None or not isinstance(drafter.head, torch.nn.Module):
            return count
        result = PackedResult.zeros(rows, self._query_len - 1, target.hf_model.device)
        run = partial(drafts.run_plainly, result, round_)
        return count + fuse_siblings(drafter.head, run, self._alterations)


def _fixed_form(target: Target, drafter: Drafter, config: EngineConfig) -> FixedLoop:
    """The fixed-shape form of the head's loop, over the target's buffer of aux hidden states."""
    loop = drafter.loop
    if not isinstance(loop, GraphLoop):
        raise InvalidInputError(f"{loop.name} run without CUDA graphs; use cuda_graphs=False")
    aux = target.aux_hidden_states(config.max_num_batched_tokens)
    limits = loop_limits(config)
    limits = replace(limits, rows=graph_rows(config.max_num_seqs, config.num_speculative_tokens + 1)[0])
    return loop.fixed_form(drafter.runner, aux, limits, greedy_drafts, compiled)
