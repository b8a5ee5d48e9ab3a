"""The engine. The body of `Engine.step` is the architecture."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from attention.cache.pages import BlockTables
from drafters.loops.base import Draft
from specdec.acceptance.packed import Outcome, unpack_outcome
from specdec.config import EngineConfig
from specdec.engine.commit import Committed, commit, ending_tokens
from specdec.engine.faults import Isolated, request_failed, round_failed
from specdec.engine.scheduler import Scheduler, Usage
from specdec.errors import CacheTooSmallError, InvalidInputError
from specdec.execution.base import Drafter, Executor, Round, Verification
from specdec.execution.eager import EagerExecutor
from specdec.requests.request import Request, Times, Update
from specdec.requests.sampling import SamplingParams
from specdec.requests.text import TextStream, Tokenizer, Vocabulary
from specdec.rounds.buckets import power_of_two
from specdec.rounds.drafting import draft_input, drafts_after
from specdec.rounds.randomness import sampling_round
from specdec.rounds.rows import RowTable
from specdec.rounds.schedule import Schedule
from specdec.rounds.uniforms import request_key
from specdec.rounds.verification import TargetArrays, Verified, target_after, target_arrays
from specdec.target.target import Target

ReadOutcome = Callable[[np.ndarray, np.ndarray], Outcome]


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made."""

    rounds: int = 0
    target_tokens: int = 0
    host_to_device: int = 0
    device_to_host: int = 0
    preemptions: int = 0


@dataclass(frozen=True)
class _Inflight:
    """A round that is launched. `device` is the executor's own; `verification` is None while the draft loop runs."""

    schedule: Schedule
    target: TargetArrays
    device: Round
    draft: Draft | None
    verification: Verification | None


class Engine:
    """Continuous batching over one target and, optionally, one draft head. For one thread at a time: `SharedEngine`.

    No speculation is the same road with no drafts.

    What a request brings along may fail: that ends the request alone. When a round fails, the requests that ran in it
    are ended. When a round is *interrupted* (KeyboardInterrupt, wherever it strikes) nobody is: the requests are the
    truth, rows and pages are made anew from them before the engine is used again, and every request goes on behind the
    last token that was reported.

    Attributes:
        reported: what the last round reported. It is set in one assignment: the moment at which the round counts.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        tokenizer: Tokenizer,
        config: EngineConfig,
        eos_token_ids: Sequence[int],
        executor: Executor | None = None,
        read: ReadOutcome = unpack_outcome,
    ) -> None:
        """Make an engine with no requests.

        Args:
            executor: how rounds run on the device; default operator by operator.
            read: what the round's device-to-host read says, (packed verdict, num_drafts [J]) -> Outcome. One with a
                true attribute `alters_tokens` says other tokens than the device has.
        """
        self.config = config
        self.stats = EngineStats()
        self.reported: list[Update] = []
        self._target = target
        self._drafter = drafter
        self._vocabulary = Vocabulary(tokenizer)
        self._eos = tuple(eos_token_ids)
        self._executor: Executor = executor or EagerExecutor(target, drafter, config)
        self._foresees = not getattr(read, "alters_tokens", False)
        self._transfers = self._executor.transfers
        self._read = read
        self._steps_ahead = config.num_speculative_tokens if drafter else 0
        self._launch_ahead = target.hf_model.device.type == "cuda"
        self._requests: dict[int, Request] = {}
        self._next_id = 0
        self._start([])

    def _start(self, waiting: list[Request]) -> None:
        """Empty tables, all pages free, and these requests waiting."""
        config = self.config
        self._table = RowTable(config.max_num_seqs, config.max_model_len)
        head_pages = None if self._drafter is None else self._pages(config.num_head_pages)
        num_modules = 1 if self._drafter is None else self._drafter.loop.num_modules
        self._scheduler = Scheduler(config, self._table, self._pages(config.num_pages), head_pages, num_modules)
        self._scheduler.waiting.extend(waiting)
        self._inflight: _Inflight | None = None
        self._consistent = True

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    def usage(self) -> Usage:
        """What requests hold now: see `Scheduler.usage`."""
        return self._scheduler.usage(len(self._requests))

    @property
    def next_id(self) -> int:
        """The id that the next request gets; ids are given in order."""
        return self._next_id

    def submit(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        sample_index: int = 0,
        eos_token_ids: Sequence[int] | None = None,
    ) -> int:
        """Queue a request; it joins the batch between two rounds.

        Args:
            token_ids: prompt ids; sample_index: which of several samples of one prompt (with one seed) this is.
            eos_token_ids: the ids that end it, unless params.ignore_eos is set; default the engine's.

        Returns:
            The request's id.

        Raises:
            InvalidInputError, CacheTooSmallError: see `check`.
        """
        limit = self.check(token_ids, params)
        prompt = np.asarray(token_ids, np.int64)
        eos = self._eos if eos_token_ids is None else tuple(eos_token_ids)
        self._mend()
        request_id, self._next_id = self._next_id, self._next_id + 1
        seed, index = (self.config.seed, request_id) if params.seed is None else (params.seed, sample_index)
        request = Request(
            id=request_id,
            params=params,
            prompt_len=len(prompt),
            limit=limit,
            num_drafts=self._num_drafts(params),
            key=request_key(seed, index),
            committed=prompt.astype(np.int32),
            stream=TextStream(self._vocabulary, params.stop),
            sample_index=sample_index,
            eos_token_ids=() if params.ignore_eos else eos,
            times=Times(time.perf_counter()),
        )
        self._consistent = False
        self._requests[request_id] = request
        self._scheduler.waiting.append(request)
        self._consistent = True
        return request_id

    def check(self, token_ids: Sequence[int], params: SamplingParams) -> int:
        """Whether such a request can be served; nothing is queued.

        Returns:
            Its most tokens, the prompt's and new ones together.

        Raises:
            InvalidInputError: empty or too long prompt, an id outside the vocabulary, K larger than the engine's.
            CacheTooSmallError: the KV cache could not hold the request even alone.
        """
        self._check_prompt(token_ids)
        self._check_ids("stop_token_ids: ", params.stop_token_ids)
        self._check_num_drafts(params)
        limit = min(len(token_ids) + params.max_new_tokens, self.config.max_model_len)
        self._check_cache(len(token_ids), limit)
        return limit

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """One round: verify what was drafted, commit, and launch the next round.

        When a stage fails, the requests of the round are reported with a RoundFailedError; those that waited still do.
        """
        self._mend()
        self._consistent = False
        with Isolated() as fault:
            self._round()
        if fault.error is not None:
            self._fail_round(fault.error)
        self._consistent = True
        return self.reported

    def _round(self) -> None:
        if self._inflight is None:
            self._inflight = self._launch(None)
        if self._inflight is None:
            self._publish([])
            return
        inflight = self._inflight
        verification = inflight.verification or self._executor.verify(inflight.device, inflight.draft)
        ahead = self._reserve_ahead(inflight.schedule, verification)
        follower = self._follow(inflight, verification, ahead)
        self._count(device_to_host=1)
        outcome = self._read(verification.packed.wait(), inflight.target.num_drafts)
        drafted = None if verification.draft_on is None else verification.draft_on(outcome.num_accepted)
        if ahead is not None and drafted is not None:
            follower = self._go_on(inflight, ahead, outcome, drafted)
        owners = self._owners()
        committed, verified = commit(inflight.schedule, inflight.target, outcome, self._table)
        self._retire(committed, owners)
        if follower is None:
            undrafted = self._executor.verified(verified, inflight.device) if drafted is None else None
            follower = self._launch(undrafted, verification, drafted)
        self._inflight = follower
        self._report(committed, owners)

    def abort(self, request_ids: Sequence[int]) -> None:
        """Forget requests, wherever they are; their rows and pages are free at once."""
        self._mend()
        self._consistent = False
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is not None:
                self._scheduler.remove(request)
        self._settle()
        self._consistent = True

    def _mend(self) -> None:
        """After an interrupt: put every request back behind what was reported, with all rows and pages made anew.

        Rows, pages and launched rounds may be in any state then, so none of it is read.
        """
        if self._consistent:
            return
        self._note(self.reported)
        waiting = sorted(self._requests.values(), key=lambda request: request.id)
        ran = [request for request in waiting if request.row >= 0]
        for request in waiting:
            request.rewind()
        for request in ran:
            request.preemptions += 1
        self._count(preemptions=len(ran))
        self._start(waiting)

    def _fail_round(self, error: Exception) -> None:
        """End the requests of a failed round: all but those that only waited."""
        spared = {r.id for r in self._scheduler.waiting} | {r.id for r, _ in self._scheduler.refused}
        failed = [request for request in self._requests.values() if request.id not in spared]
        self.reported = [Update(request.id, [], "", error=round_failed(error, len(failed))) for request in failed]
        self._mend()

    def _launch(
        self, verified: Verified | None, last: Verification | None = None, drafted: Draft | None = None
    ) -> _Inflight | None:
        """Schedule, pages, the draft loop, and the next verification's arrays.

        verified: the last verification, None where there is none or it is `drafted` from already.
        """
        preempted = self._scheduler.num_preemptions
        schedule = self._scheduler.schedule()
        self._count(preemptions=self._scheduler.num_preemptions - preempted)
        if schedule is None:
            return None
        tables = self._block_tables(schedule, self._steps_ahead)
        page_size, ahead = self.config.page_size, drafted is not None
        draft = None
        if verified is not None and tables.head is not None:
            draft = draft_input(verified, schedule, self._table, tables.head, page_size)
        target = target_arrays(schedule, self._table, tables.target, page_size, tables.head, ahead)
        sampling = sampling_round(target, schedule, self._table)
        device = self._executor.send(draft, target, sampling)
        self._table.mark_batch(schedule.rows)
        if draft is not None and last is not None:
            drafted = self._executor.draft(device, last.tapped)
        return self._launched(schedule, target, device, drafted)

    def _reserve_ahead(self, schedule: Schedule, verification: Verification) -> _Tables | None:
        """Block tables [B, P] of the round behind a launched one, which may be launched before that one's commit."""
        early = verification.follow is not None or verification.draft_on is not None
        if not early or not self._scheduler.follow(schedule):
            return None
        tables = self._block_tables(schedule, 1 + 2 * self._steps_ahead)
        return _Tables(tables.target[schedule.rows], None if tables.head is None else tables.head[schedule.rows])

    def _follow(self, inflight: _Inflight, verification: Verification, ahead: _Tables | None) -> _Inflight | None:
        """The round behind a launched one, launched before that is read: where only its tokens are open.

        A row that the read ends is in that round in vain. Its pages are handed out again after it.
        """
        if verification.follow is None or ahead is None or not self._foresees:
            return None
        schedule, nothing = inflight.schedule, np.zeros_like(inflight.schedule.rows)
        target = target_after(inflight.target, nothing, nothing, nothing, ahead.target, ahead.head)
        device, behind = verification.follow(target)
        self._count_round(target)
        return _Inflight(schedule, target, device, None, behind)

    def _go_on(self, inflight: _Inflight, ahead: _Tables, outcome: Outcome, drafted: Draft) -> _Inflight | None:
        """The round behind one that was read and has drafted on, launched before the commit: where all rows go on."""
        rows, accepted = inflight.schedule.rows, outcome.num_accepted
        drafts = drafts_after(inflight.target, accepted)
        ending = ending_tokens(outcome.tokens, accepted + 1, self._table.eos[rows])
        if not drafts.all() or ending.any():
            return None
        roots = outcome.tokens[np.arange(len(rows)), accepted]
        target = target_after(inflight.target, accepted, roots, drafts, ahead.target, ahead.head)
        device = self._executor.send(None, target, None)
        return self._launched(Schedule(rows, inflight.schedule.num_new, drafts), target, device, drafted)

    def _launched(self, schedule: Schedule, target: TargetArrays, device: Round, drafted: Draft | None) -> _Inflight:
        """A sent round; on a GPU its verification is queued behind the draft loop, on a CPU it would only delay what
        follows."""
        verification = self._executor.verify(device, drafted) if self._launch_ahead else None
        self._count_round(target)
        return _Inflight(schedule, target, device, drafted, verification)

    def _owners(self) -> list[Request | None]:
        """The request of each judged row; None for one that was aborted or stopped meanwhile."""
        assert self._inflight is not None
        by_row = {request.row: request for request in self._scheduler.running}
        rows = self._inflight.schedule.rows[self._inflight.target.judged]
        return [by_row.get(row) for row in rows.tolist()]

    def _retire(self, committed: Committed, owners: Sequence[Request | None]) -> None:
        """Close the rows that an eos id or a limit ended."""
        for j in np.flatnonzero(committed.at_eos | committed.at_limit).tolist():
            request = owners[j]
            if request is not None:
                request.finish_reason = "eos" if committed.at_eos[j] else "length"
                self._scheduler.remove(request)

    def _report(self, committed: Committed, owners: Sequence[Request | None]) -> None:
        """Meanwhile: statistics, text and stop strings, while the device drafts."""
        now = time.perf_counter()
        updates = []
        for j, request in enumerate(owners):
            if request is None:
                continue
            with Isolated() as fault:
                update = request.take(committed.round_of(j), now)
            if fault.error is not None:
                update = Update(request.id, [], "", error=request_failed(fault.error, "its text or stop strings"))
            updates.append(update)
        self._publish(updates)

    def _publish(self, updates: list[Update]) -> None:
        """Report updates, and the requests that were refused a row. From the assignment on they count as reported."""
        refused = self._scheduler.refused
        if refused:
            updates += [Update(r.id, [], "", error=request_failed(e, "its parameters")) for r, e in refused]
            refused.clear()
        self.reported = updates
        for request in self._note(updates):
            self._scheduler.remove(request)
        self._settle()

    def _note(self, updates: Sequence[Update]) -> list[Request]:
        """Note what was reported and forget the requests that are ended; returns those. Idempotent."""
        ended = []
        for update in updates:
            request = self._requests.get(update.request_id)
            if request is not None and update.last:
                ended.append(self._requests.pop(request.id))
            elif request is not None:
                request.progress = update.progress
        return ended

    def _settle(self) -> None:
        """Drop a launched round when nobody is left in it."""
        if not self._scheduler.running:
            self._inflight = None

    def _block_tables(self, schedule: Schedule, more: int) -> _Tables:
        """Both block tables, as wide as the longest row with `more` tokens needs (a power of two of pages)."""
        longest = int((self._table.length[schedule.rows] + schedule.num_drafts).max()) + more
        pages = self._scheduler.target_pages
        width = min(power_of_two(pages.pages_for(longest)), pages.table.shape[1])
        head = self._scheduler.head_pages
        return _Tables(pages.table[:, :width], None if head is None else head.table[:, :width])

    def _count_round(self, target: TargetArrays) -> None:
        transfers, self._transfers = self._executor.transfers - self._transfers, self._executor.transfers
        self._count(rounds=1, target_tokens=target.num_tokens, host_to_device=transfers)

    def _count(self, **increments: int) -> None:
        self.stats = replace(self.stats, **{k: getattr(self.stats, k) + n for k, n in increments.items()})

    def _pages(self, num_pages: int) -> BlockTables:
        c = self.config
        return BlockTables(num_pages, c.max_num_seqs, c.max_model_len, c.page_size)

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if not len(prompt):
            raise InvalidInputError("the prompt is empty; at least one token is needed")
        if len(prompt) >= self.config.max_model_len:
            raise InvalidInputError(
                f"the prompt has {len(prompt)} tokens; with max_model_len={self.config.max_model_len} at most "
                f"{self.config.max_model_len - 1} are allowed (one place is kept for a new token)"
            )
        self._check_ids("", prompt)

    def _check_ids(self, where: str, token_ids: Sequence[int]) -> None:
        largest = self._target.num_embeddings - 1
        bad = [t for t in token_ids if not 0 <= t <= largest][:1]
        if bad:
            raise InvalidInputError(
                f"{where}token id {bad[0]} is outside the vocabulary 0 … {largest}; if a tokenizer made it, it does "
                "not belong to this model (tokens added without model.resize_token_embeddings?)"
            )

    def _check_num_drafts(self, params: SamplingParams) -> None:
        asked, most = params.num_speculative_tokens, self.config.num_speculative_tokens
        if asked is not None and asked > most:
            raise InvalidInputError(f"num_speculative_tokens={asked}: this model was loaded for at most {most}")

    def _num_drafts(self, params: SamplingParams) -> int:
        asked = params.num_speculative_tokens
        return self.config.num_speculative_tokens if asked is None else asked

    def _check_cache(self, prompt_len: int, limit: int) -> None:
        capacity = self._scheduler.target_pages.capacity_tokens
        if limit > capacity:
            raise CacheTooSmallError(
                f"{prompt_len} prompt tokens and {limit - prompt_len} new ones need {limit} cache places; the KV cache "
                f"has {capacity}; lower max_new_tokens or load the model with a larger kv_cache_tokens"
            )


@dataclass(frozen=True)
class _Tables:
    """Block tables of one round: target and head."""

    target: np.ndarray
    head: np.ndarray | None
