"""The engine. The body of `Engine.step` is the architecture.

Where a request's next token comes from: the verification in flight decides it, the round's one read brings it to the
host, the commit appends it, and it is the bonus token of the next verification. How far that one may be launched before
the commit is the pipeline that the round is in: see `lookahead`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from functools import partial

import torch

from attention.cache.pages import BlockTables, PageAllocator
from attention.hf.gate import gate_of
from specdec.acceptance.packed import Outcome
from specdec.config import EngineConfig
from specdec.engine.admission import Admission, admission_order
from specdec.engine.commit import Committed, commit
from specdec.engine.faults import Change, raised_twice, request_failed, rewound, round_failed
from specdec.engine.guests import Guests
from specdec.engine.launcher import LaunchedRound, Launcher, Lookahead, VerifyingRound
from specdec.engine.prefixes import Prefixes, prefix_cache
from specdec.engine.scheduler import Scheduler, Usage, windowed_tables
from specdec.engine.stats import Counters, EngineStats
from specdec.errors import InvalidInputError
from specdec.execution.base import DraftedVerification, Drafter, Executor
from specdec.execution.eager import EagerExecutor
from specdec.interrupts import is_from_signal
from specdec.requests.request import Request, RowRound, Update
from specdec.requests.sampling import SamplingParams
from specdec.requests.text import Tokenizer
from specdec.rounds.rows import RowTable
from specdec.user_warnings import warn_user
from specdec.wrapped.target import Target
from specdec.wrapped.versions import WeightVersions


class Engine:
    """Continuous batching over one target and, optionally, one draft head. For one thread at a time: `SharedEngine`.

    No speculation is the same path with no drafts.

    What a request brings along may fail: that ends the request alone. When a round fails, the requests that ran in it
    are ended. When a round is *interrupted* (KeyboardInterrupt, wherever it strikes) nobody is: the requests are the
    truth, rows and pages are made anew from them before the engine is used again, and every request goes on after the
    last token that was reported.

    Attributes:
        target: what it runs.
        config: its sizes and limits.
        meanwhile: what is to be done once, while the device runs a round, before that is read; may run twice.
        reported: what the last round reported. It is set in one assignment: the moment at which the round counts.
        executor: how rounds run on the device; `use` replaces it.
        inflight: the round that is launched and not yet committed; after one that only brought first tokens that one,
            until the next step.
        drafter: head and draft loop; None without a head.
        admission: checks requests before they are queued. change: around whatever changes rows, pages or the queue.
        table, scheduler: rows and pages of the running requests; new ones after an interrupt.
        guests: what an optional feature does with requests that enter or leave with their keys and values.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        tokenizer: Tokenizer,
        config: EngineConfig,
        eos_token_ids: Sequence[int],
        executor: Executor | None = None,
        versions: WeightVersions | None = None,
    ) -> None:
        """Make an engine with no requests.

        Args:
            executor: default operator by operator. versions: of target and head; default from now on.
        """
        self.config = config
        self.reported: list[Update] = []
        self._kept: list[Update] = []
        self.meanwhile: deque[Callable[[], None]] = deque()
        self.executor: Executor = executor or EagerExecutor(target, drafter, config)
        self.target = target
        self.drafter = drafter
        self._queue_verification = target.hf_model.device.type == "cuda"
        self._counters = Counters()
        self._counters.start_transfers(self.executor.transfers)
        self._requests: dict[int, Request] = {}
        self._next_id = 0
        self._weights: WeightVersions | None = None
        if config.enable_prefix_caching:
            head = None if drafter is None else drafter.head
            captured = not isinstance(self.executor, EagerExecutor)
            self._weights = versions or WeightVersions(target.hf_model, head, captured=captured)
        self._told = False
        self.change = Change(self._mend)
        self.guests = Guests()
        self._start([])
        pools = (self.scheduler.target_pages.capacity_tokens, self.scheduler.windowed_pages)
        self.admission = Admission(target, tokenizer, config, eos_token_ids, *pools)

    def _start(self, waiting: list[Request]) -> None:
        """Empty tables, all pages free, nothing cached, and these requests waiting."""
        c, drafter = self.config, self.drafter
        self.table = RowTable(c.max_num_seqs, c.max_model_len, (e.columns(c.max_num_seqs) for e in c.extras))
        num_head_pages = None if drafter is None else c.num_head_pages
        num_modules = 1 if drafter is None else drafter.loop.num_modules
        cache = prefix_cache(c, None if drafter is None else drafter.loop, num_head_pages)
        pages = self._pages(c.num_pages, None if cache is None else cache.pages)
        head_pages = None
        if num_head_pages is not None:
            head_pages = self._pages(num_head_pages, None if cache is None else cache.head_pages)
        allocators = [None] * len(c.windowed) if cache is None else cache.windowed
        windowed = [windowed_tables(c, pool, own) for pool, own in zip(c.windowed, allocators, strict=True)]
        prefixes = None if cache is None else Prefixes(cache, self.table, pages, head_pages, windowed)
        self.scheduler = Scheduler(
            *(c, self.table, pages, head_pages, num_modules, windowed),
            prefixes=prefixes,
            counters=self._counters,
            guests=self.guests,
        )
        self.scheduler.waiting.extend(waiting)
        self.inflight: LaunchedRound | None = None
        self._following: Callable[[], LaunchedRound | None] | None = None
        self.guests.keep(self.scheduler.pools(), waiting)
        self._connect()

    def _connect(self) -> None:
        c, scheduler, table = self.config, self.scheduler, self.table
        queue, group = self._queue_verification, self.target.group
        self._launcher = Launcher(self.executor, scheduler, table, c, self._counters, queue, group)
        num_drafts = 0 if self.drafter is None else c.num_speculative_tokens
        self._lookahead = Lookahead(self._launcher, scheduler, table, num_drafts)

    def _pages(self, num_pages: int, allocator: PageAllocator | None) -> BlockTables:
        c = self.config
        return BlockTables(num_pages, c.max_num_seqs, c.max_model_len, c.page_size, allocator)

    def host(self, guests: Guests) -> None:
        """Let a feature bring requests into the batch, and take them out. Between two rounds."""
        self.guests = self.scheduler.guests = guests

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine was made."""
        return self._counters.stats

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    def usage(self) -> Usage:
        """What requests hold now: see `Scheduler.usage`."""
        with self.change:
            self.guests.settle()
            return self.scheduler.usage(len(self._requests))

    @property
    def next_id(self) -> int:
        """The id that the next request gets; ids are given in order."""
        return self._next_id

    def use(self, executor: Executor, queue_verification: bool | None = None) -> None:
        """Run rounds by another executor from now on.

        Args:
            executor: over the same target, head and config.
            queue_verification: launch each verification right after its draft loop, before the host goes on; default
                as it is (on a GPU).

        Raises:
            InvalidInputError: the engine has requests, whose rounds are the other executor's.
        """
        if self.has_work:
            raise InvalidInputError(
                f"{len(self._requests)} requests are in the engine; finish or abort them before its executor changes"
            )
        if queue_verification is not None:
            self._queue_verification = queue_verification
        self.executor = executor
        self._counters.start_transfers(executor.transfers)
        self._connect()

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
        request = self.admission.request(self.take_id(), token_ids, params, limit, sample_index, eos_token_ids)
        return self.queue(request)

    def take_id(self) -> int:
        """An id for a new request."""
        self._next_id += 1
        return self._next_id - 1

    def queue(self, request: Request) -> int:
        """Queue a request that `admission` has made; its id."""
        with self.change:
            self._requests[request.id] = request
            request.turn = request.id
            self.scheduler.waiting.append(request)
        return request.id

    def arrange(self, request_ids: Sequence[int]) -> None:
        """Bring requests that were just queued, one after the other, into the order of `admission_order`.

        Lengths are new tokens: a request without drafts beside others with them takes longer than is counted here.
        """
        queued = [self._requests[request_id] for request_id in request_ids]
        lengths = [1 if r.leaves else r.limit - len(r.committed) for r in queued]
        with self.change:
            ordered = [queued[i] for i in admission_order(lengths, self.config.max_num_seqs)]
            for request, turn in zip(ordered, sorted(request_ids), strict=True):
                request.turn = turn
            self.scheduler.arrange(ordered)

    def add_wait(self, request_ids: Sequence[int], seconds: float) -> None:
        """Requests that were just queued had waited so long for the engine before."""
        for request_id in request_ids:
            self._requests[request_id].times.submitted -= seconds

    def check(self, token_ids: Sequence[int], params: SamplingParams) -> int:
        """Whether such a request can be served; nothing is queued. See `Admission.check`."""
        return self.admission.check(token_ids, params)

    @property
    def forgets_prefixes(self) -> str:
        """Why each call begins with an empty prefix cache, in words; "" where pages of earlier calls are kept."""
        if self._weights is None or not self._weights.unseen or self.config.keep_prefixes:
            return ""
        return f"{self._weights.unseen} may depend on what nobody can see"

    def check_weights(self) -> None:
        """Empty the prefix cache when weights, settings or hooks have changed since the last call, and at every call
        where that cannot be seen; a SpecdecWarning says so once. See `WeightVersions`."""
        if self._weights is None:
            return
        with gate_of(self.target.hf_model.config).held():  # forwards of ours change some settings while they run
            changed = self._weights.changed()
        if changed or self.forgets_prefixes:
            self.forget_prefixes()
        if self.forgets_prefixes and not self._told:
            self._told = True
            warn_user(
                f"pages of the prefix cache are kept within one call alone: {self.forgets_prefixes}. "
                "enable_prefix_caching=True keeps them if the hook always computes the same, False is silent"
            )

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, because weights have changed; what runs now leaves nothing in it."""
        with self.change:
            if self.scheduler.prefixes is not None:
                self.scheduler.prefixes.clear()

    def abort(self, request_ids: Sequence[int]) -> None:
        """Forget requests, wherever they are; their rows and pages are free at once."""
        with self.change:
            for request_id in request_ids:
                request = self._requests.pop(request_id, None)
                if request is not None:
                    self.scheduler.remove(request)
            self._settle()

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """One round: what is in flight is read and committed, and the next one launched. See `lookahead` for when.

        When a stage fails again as it is run once more, the requests of the round are reported with a RoundFailedError;
        those that waited still do.

        Raises:
            Exception: what a signal handler raised; or what a stage raised that went through as it was run once more:
                it came from outside, and is for the caller. No request is ended, and `reported` is to be read.
        """
        once, before = None, self.reported
        with self.change:
            try:
                self._round()
            except Exception as error:
                if is_from_signal(error):
                    raise
                once = self._run_again(error, [] if self.reported is before else self.reported)
        if once is not None:
            try:
                raise once
            finally:
                del once
        return self.reported

    def _run_again(self, error: Exception, reported: list[Update]) -> Exception | None:
        """Treat an exception of a round as an interrupt, and run what it struck once more: rounds, until every request
        that was in it has come further, and one more, which has one in flight before it. What is raised again ends
        the requests.

        Args:
            reported: by the round before it was struck, and handed out to nobody.

        Returns:
            The exception, where all went through.
        """
        struck = {request.id: request.progress for request in self._in_round()}
        self._mend()
        self._kept, over = reported, False
        try:
            while True:
                self._round()
                if over or not self._requests:
                    return error
                over = not any(struck.get(r.id) == r.progress for r in self.scheduler.running)
                self._kept = self.reported
        except Exception as again:
            if is_from_signal(again):
                raise
            self._fail_round(again, struck)
            return None
        finally:
            self._kept = []

    def _round(self) -> None:
        """What `step` does."""
        self.guests.begin_round()
        launched = self._launched() or self._launcher.first()  # first: fill the pipeline
        if launched is None:
            self.guests.idle()
            self._publish([])
            return
        current = self.inflight = self._launcher.verify(launched)
        upcoming = self._lookahead.before_read(current)  # without drafts only token ids are unknown
        while self.meanwhile:
            self.meanwhile[0]()
            self.meanwhile.popleft()  # only now: an interrupt must not skip one
        outcome = self._read(current)  # the round's one device-to-host read
        alone = upcoming is None and self._brings_first_tokens_alone(current)
        draft = None if alone else self._launcher.draft_steps(current, outcome)  # the draft prefill is done
        upcoming = upcoming or self._lookahead.before_commit(current, outcome, draft)  # every row goes on
        head_has_read = isinstance(current.verification, DraftedVerification)
        committed = commit(current.schedule, current.target, outcome, self.table, head_has_read)
        owners = self._retire(current, committed)
        if self.guests.leaving:
            self.guests.leave(owners, partial(self._launcher.drafts_of, current, committed, draft))
        if alone:  # whoever waits for a first token has it before the device goes on
            self._following = partial(self._after_first_tokens, current, committed, outcome)
        else:
            self.inflight = upcoming or self._launcher.after(current, committed, draft)  # who is in it is new
        self._report(committed, owners)  # text and stop strings, while the device drafts

    def _launched(self) -> LaunchedRound | None:
        """The round in flight; the one after first tokens is launched now."""
        following, self._following = self._following, None
        if following is not None:
            self.inflight = following()
        return self.inflight

    def _brings_first_tokens_alone(self, current: VerifyingRound) -> bool:
        """Whether a round, which is read, did nothing but decide the first tokens of its rows, and nobody waits for the
        device: it has the draft prefill to do while the tokens are handed out.

        To launch what follows takes the host as long as a tenth of what a short prompt on cached pages takes in all.
        """
        schedule, drafted = current.schedule, isinstance(current.verification, DraftedVerification)
        if not drafted or schedule.num_drafting or self.scheduler.waiting or self.guests.leaving:
            return False
        return len(current.target.decided) == len(schedule.rows)

    def _after_first_tokens(
        self, current: VerifyingRound, committed: Committed, outcome: Outcome
    ) -> LaunchedRound | None:
        draft = self._launcher.draft_steps(current, outcome)
        return self._launcher.after(current, committed, draft)

    def owners(self, round_: VerifyingRound) -> list[Request | None]:
        """The request of each decided row; None for one that was aborted or stopped meanwhile."""
        by_row = {request.row: request for request in self.scheduler.running}
        return [by_row.get(row) for row in round_.schedule.rows[round_.target.decided].tolist()]

    def _read(self, current: VerifyingRound) -> Outcome:
        self._counters.add_read()
        return self.executor.reads.finish(current.verification.packed, current.target.num_drafts)

    def _retire(self, current: VerifyingRound, committed: Committed) -> list[Request | None]:
        """Close the rows that an eos id or a limit ended; return the request of each decided row."""
        owners = self.owners(current)
        for j in (committed.at_eos | committed.at_limit).nonzero()[0].tolist():
            request = owners[j]
            if request is not None:
                request.finish_reason = "eos" if committed.at_eos[j] else "length"
                self.scheduler.remove(request)
        return owners

    def _report(self, committed: Committed, owners: Sequence[Request | None]) -> None:
        """Statistics, text and stop strings."""
        now = time.perf_counter()
        updates = []
        for request, share in zip(owners, committed.rounds, strict=True):
            if request is None:
                continue
            updates.append(self.guests.reported(request, _taken(request, share, now)))
        self._publish(updates)

    def _publish(self, updates: list[Update]) -> None:
        """Report updates, and the requests that were refused a row. From the assignment on they count as reported."""
        refused = self.scheduler.refused
        if refused:
            updates += [Update(r.id, [], "", error=request_failed(e, "its parameters")) for r, e in refused]
            refused.clear()
        self.reported = [*self._kept, *updates]
        for request in self._note(updates):
            self.scheduler.remove(request)
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
        if not self.scheduler.running:
            self.inflight = self._following = None

    def _mend(self) -> None:
        """After an interrupt or a failed round: every request goes on after what was reported.

        Rows, pages and launched rounds may be in any state then, so none of it is read: all are made anew.
        """
        self._note(self.reported)
        waiting, preempted = rewound(self._requests.values())
        self._counters.add_preemptions(preempted)
        self._start(waiting)

    def _in_round(self) -> list[Request]:
        """The requests of a round that has just failed: all but those that only waited."""
        spared = {r.id for r in self.scheduler.waiting} | {r.id for r, _ in self.scheduler.refused}
        return [request for request in self._requests.values() if request.id not in spared]

    def _fail_round(self, error: Exception, struck: Container[int] = ()) -> None:
        """End the requests of a failed round, and those that an exception struck before; all where nobody got in."""
        inside = {request.id for request in self._in_round()}
        failed = [r for r in self._requests.values() if r.id in inside or r.id in struck] or [*self._requests.values()]
        errors = [Update(request.id, [], "", error=round_failed(error, len(failed))) for request in failed]
        self.reported = [*self._kept, *errors]
        self._mend()


def _taken(request: Request, share: RowRound, now: float) -> Update:
    """What a round brings for a request: its error where its text or stop strings cannot be made."""
    taken: list[Update] = []
    undo = partial(request.give_back, len(request.new_tokens), len(request.rounds), request.finish_reason)
    fault = raised_twice(lambda: taken.append(request.take(share, now)), undo)
    if fault is not None:
        return Update(request.id, [], "", error=request_failed(fault, "its text or stop strings"))
    return taken[-1]
