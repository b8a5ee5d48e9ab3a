"""The engine. The body of `Engine.step` is the architecture.

Where a request's next token comes from: the verification in flight decides it, the round's one read brings it to the
host, the commit appends it, and it is the bonus token of the next verification. How far that one may be launched before
the commit is the pipeline that the round is in: see `Launcher.before_read` and `before_commit`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container, Sequence, Sized
from functools import partial

import torch

from attention.cache.pages import BlockTables
from specdec.config import EngineConfig
from specdec.engine.admission import Admission, admission_order
from specdec.engine.commit import Committed, commit
from specdec.engine.ends import Deadlines, rewound, round_failed
from specdec.engine.guests import Guests
from specdec.engine.launcher import LaunchedRound, Launcher, VerifyingRound
from specdec.engine.prefixes import Prefixes, PrefixValidity, prefix_cache
from specdec.engine.scheduler import Scheduler, Usage, windowed_tables
from specdec.engine.stats import Counters, EngineStats
from specdec.errors import InvalidInputError
from specdec.execution.base import ChainedVerification, DraftedVerification, Drafter, Executor
from specdec.execution.eager import EagerExecutor
from specdec.interrupts import is_from_signal
from specdec.requests.request import Request, RowRound, Update, request_failed, taken
from specdec.requests.sampling import SamplingParams
from specdec.requests.text import Tokenizer
from specdec.rounds.rows import RowTable
from specdec.values import IdSequence
from specdec.wrapped.changes import WeightVersions
from specdec.wrapped.target import Target


class Change:
    """A with-block around everything that changes rows, pages, the queue or launched rounds.

    An interrupt (KeyboardInterrupt, wherever it strikes) that leaves the block marks the state as torn; `mend` is
    called before the next block begins.
    """

    def __init__(self, mend: Callable[[], None]) -> None:
        self._mend = mend
        self._torn = False

    def __enter__(self) -> None:
        if self._torn:
            self._mend()
        self._torn = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._torn = kind is not None


class Engine:
    """Continuous batching over one target and, optionally, one draft head. Not thread-safe: see `SharedEngine`.

    Errors: when a request's tokenizer, stop strings or parameters fail, that request ends. When a round fails, the
    requests in it end. When a round is *interrupted* (KeyboardInterrupt, at any point) no request ends: rows and pages
    are rebuilt from the requests before the engine is used again, and each continues after its last reported token.

    Attributes:
        target, config: the target model; sizes and limits. drafter: head and draft loop or None. counters: see `stats`.
        coming: calls about to be queued. meanwhile: deferred, idempotent checks, run while the device computes a round.
        reported: updates of the last round. A single assignment sets it: from then on the round counts.
        executor: runs rounds on the device; `use` replaces it.
        inflight: the launched round that is not committed yet; the last one, until the next step, where that launches.
        next_id: id of the next request. admission: checks requests. change: guards changes of rows, pages or the queue.
        table, scheduler: rows and pages of the running requests; rebuilt after an interrupt. deadlines: early ends.
        guests: moves requests between engines with their keys and values; None where all begin and end here.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        tokenizer: Tokenizer,
        config: EngineConfig,
        eos_token_ids: IdSequence,
        executor: Executor | None = None,
        versions: WeightVersions | None = None,
    ) -> None:
        """executor: default `EagerExecutor`. versions: detects changes of target and head; default made now."""
        self.config = config
        self.reported: list[Update] = []
        self._kept: list[Update] = []
        self.coming: Sized = ()
        self.meanwhile = deque[Callable[[], None]]()
        self.executor: Executor = executor or EagerExecutor(target, drafter, config)
        self.target = target
        self.drafter = drafter
        self._queue_verification = target.hf_model.device.type == "cuda"
        self.counters = Counters(self.executor.transfers)
        self._requests: dict[int, Request] = {}
        self.deadlines = Deadlines()
        self.next_id = 0
        if versions is None and config.enable_prefix_caching:
            captured = not isinstance(self.executor, EagerExecutor)
            versions = WeightVersions(target.hf_model, drafter and drafter.head, captured=captured)
        self._validity = PrefixValidity(target, versions if config.enable_prefix_caching else None, config)
        self.change = Change(self._mend)
        self.guests: Guests | None = None
        self._start([])
        # After `_start`: only the scheduler knows the capacity of its page pools.
        pools = (self.scheduler.target_pages.capacity_tokens, self.scheduler.windowed_pages)
        self.admission = Admission(target, tokenizer, config, eos_token_ids, *pools)

    def _start(self, waiting: list[Request]) -> None:
        """Reset rows, pages and prefix cache; these requests wait."""
        c, drafter = self.config, self.drafter
        self.table = RowTable(c.max_num_seqs, c.max_model_len, (e.columns(c.max_num_seqs) for e in c.extras))
        loop = None if drafter is None else drafter.loop
        cache = prefix_cache(c, loop)
        size = c.max_num_seqs, c.max_model_len + c.block_size, c.page_size
        pages = BlockTables(c.num_pages, *size, None if cache is None else cache.pages)
        head_pages = None
        if loop is not None:
            head_pages = BlockTables(c.num_head_pages, *size, None if cache is None else cache.head_pages)
        allocators = [None] * len(c.windowed) if cache is None else cache.windowed
        windowed = [windowed_tables(c, pool, own) for pool, own in zip(c.windowed, allocators, strict=True)]
        prefixes = None if cache is None else Prefixes(cache, self.table, pages, head_pages, windowed)
        self.scheduler = Scheduler(
            *(c, self.table, pages, head_pages, 1 if loop is None else loop.num_modules, windowed),
            prefixes=prefixes,
            counters=self.counters,
            guests=self.guests,
        )
        self.scheduler.waiting.extend(waiting)
        self.inflight: LaunchedRound | None = None
        self._following: Callable[[], LaunchedRound | None] | None = None
        if self.guests is not None:
            self.guests.keep(self.scheduler.pools(), waiting)
        self._connect()

    def _connect(self) -> None:
        own = (self.executor, self.scheduler, self.table, self.config, self.counters)
        self._launcher = Launcher(*own, self._queue_verification, self.target.group)

    def host(self, guests: Guests) -> None:
        """Install the feature that moves requests between engines. Call between two rounds."""
        self.guests = self.scheduler.guests = guests

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine was made."""
        return self.counters.stats

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    def usage(self) -> Usage:
        """Rows and pages in use: see `Scheduler.usage`."""
        with self.change:
            if self.guests is not None:
                self.guests.settle()
            return self.scheduler.usage(len(self._requests))

    def use(self, executor: Executor, queue_verification: bool | None = None) -> None:
        """Replace the executor.

        Args:
            executor: over the same target, head and config.
            queue_verification: launch each verification right after its draft loop, before the host continues; default
                unchanged (True on a GPU).

        Raises:
            InvalidInputError: the engine has requests.
        """
        if self.has_work:
            raise InvalidInputError(
                f"{len(self._requests)} requests are in the engine; abort them, or let them end first"
            )
        if queue_verification is not None:
            self._queue_verification = queue_verification
        self.executor = executor
        self.counters.transfers = executor.transfers
        self._connect()

    def submit(
        self,
        token_ids: IdSequence,
        params: SamplingParams,
        sample_index: int = 0,
        eos_token_ids: IdSequence | None = None,
    ) -> int:
        """Queue a request, which joins the batch between two rounds; its id.

        Args:
            token_ids: the prompt. sample_index: its place among several samples of one prompt (with one seed).
            eos_token_ids: ids that end it unless params.ignore_eos is set; default the engine's.

        Raises:
            InvalidInputError, CacheTooSmallError: see `Admission.check`.
        """
        limit = self.admission.check(token_ids, params)
        return self.queue(self.admission.request(self.take_id(), token_ids, params, limit, sample_index, eos_token_ids))

    def take_id(self) -> int:
        """An id for a new request."""
        self.next_id += 1
        return self.next_id - 1

    def queue(self, request: Request) -> int:
        """Queue a request that `admission` has made; its id."""
        with self.change:
            self._requests[request.id] = request
            request.turn = request.id
            self.deadlines.add(request)
            self.scheduler.waiting.append(request)
        return request.id

    def arrange(self, request_ids: IdSequence) -> None:
        """Reorder the requests of one call, just queued, by `admission_order` of their numbers of new tokens."""
        queued = [self._requests[request_id] for request_id in request_ids]
        lengths = [1 if r.leaves else r.limit - len(r.committed) for r in queued]
        with self.change:
            ordered = [queued[i] for i in admission_order(lengths, self.config.max_num_seqs)]
            for request, turn in zip(ordered, sorted(request_ids), strict=True):
                request.turn, request.batch = turn, request_ids[0]
            self.scheduler.arrange(ordered)

    def add_wait(self, request_ids: IdSequence, seconds: float) -> None:
        """Add seconds that these requests, just queued, waited for the engine."""
        for request in [self._requests[request_id] for request_id in request_ids]:
            request.times.submitted -= seconds
            self.deadlines.add(request)

    def check_room(self, new: int) -> None:
        """Check that `new` more requests may be queued. Raises QueueFullError."""
        self.admission.check_room(len(self._requests), new)

    @property
    def forgets_prefixes(self) -> str:
        """Why each call begins with an empty prefix cache, in words; "" when pages of earlier calls are kept."""
        return self._validity.unseen

    def check_weights(self) -> None:
        """Drop cached prefixes and recorded steps if weights, settings or hooks may have changed since."""
        self.target.check_recordings()
        if self._validity.ended():
            self.forget_prefixes()
        self._validity.warn_once()

    def forget_prefixes(self) -> None:
        """Empty the prefix cache because weights have changed; running requests add no pages to it."""
        with self.change:
            if (prefixes := self.scheduler.prefixes) is not None:
                prefixes.clear()

    def abort(self, request_ids: IdSequence) -> None:
        """Remove requests, waiting or running; their rows and pages are free at once."""
        with self.change:
            for request_id in request_ids:
                request = self._requests.pop(request_id, None)
                if request is not None:
                    self.counters.ends["dropped"] += 1
                    self.deadlines.discard(request_id)
                    self.scheduler.remove(request)
            if not self.scheduler.running:  # no request is left in the launched round
                self.inflight = self._following = None

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """Run one round: read and commit the round in flight, and launch the next, perhaps earlier.

        A round that fails is run once more. If it fails again, its requests are reported with a RoundFailedError;
        waiting requests keep waiting. With calls in `coming` it may end before the verification, which they then join.

        Raises:
            Exception: raised by a signal handler, or by a round that succeeded when run once more: so it came from
                outside, and is for the caller. No request ends; read `reported`.
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
            # Without `del`, the exception's traceback would hold this frame, and the frame the exception: a cycle.
            finally:
                del once
        return self.reported

    def _run_again(self, error: Exception, reported: list[Update]) -> Exception | None:
        """Treat the exception of a round as an interrupt and run rounds until every request in it has progressed,
        and one more with a round in flight before it. A second exception ends the requests.

        reported: updates of the failed round that no caller has received. Returns the exception if all succeeded.
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
        """The body of `step`."""
        if self.guests is not None:
            self.guests.begin_round()
        following, self._following = self._following, None
        if following is not None:
            self.inflight = following()
        pauses = following is not None and bool(self.coming) and self._launcher.may_be_joined(self.inflight)
        launched = None if pauses else self.inflight or self._launcher.launch()  # nothing in flight: fill the pipeline
        if launched is None:
            if self.guests is not None:
                self.guests.idle()
            self._report([])
            return
        if not isinstance(launched, VerifyingRound):
            launched = self._launcher.joined(launched) if self.scheduler.waiting else launched
            verification = self.executor.verify(launched.device, launched.draft)
            launched = VerifyingRound(**vars(launched), verification=verification)
        current = self.inflight = launched
        verification, upcoming, draft, alone = current.verification, None, None, False
        drafted = isinstance(verification, DraftedVerification)  # its draft prefill is launched
        if drafted or isinstance(verification, ChainedVerification):
            upcoming = self._launcher.before_read(current)  # without drafts only token ids are unknown
        while self.meanwhile:
            self.meanwhile[0]()
            self.meanwhile.popleft()  # only now: an interrupt must not skip one
        self.counters.device_to_host += 1
        outcome = self.executor.reads.finish(verification.packed, current.target.num_drafts)
        if isinstance(verification, DraftedVerification):
            alone = self._launcher.is_first_tokens_alone(current)
            draft = None if alone else verification.launch_steps(outcome.num_accepted)
            upcoming = self._launcher.before_commit(current, outcome, draft)  # every row goes on
        committed = commit(current.schedule, current.target, outcome, self.table, drafted)
        owners = self._retire(committed)
        if self.guests is not None and self.guests.leaving:
            self.guests.leave(owners, partial(self._launcher.drafts_of, current, committed, draft))
        if alone:  # callers get first tokens before the next launch
            self._following = partial(self._launcher.after_first_tokens, current, committed, outcome)
        elif upcoming is None and not self._queue_verification:  # nothing runs meanwhile: who comes until then is in it
            self._following = partial(self._launcher.launch, current, committed, draft)
        else:
            self.inflight = upcoming or self._launcher.launch(current, committed, draft)  # who is in it is new
        shares = zip(owners, committed.rounds, strict=True)
        self._report([(request, share) for request, share in shares if request is not None])  # while the device drafts

    def _retire(self, committed: Committed) -> list[Request | None]:
        """Close the rows that an eos id or a limit ended.

        Returns:
            The request of each decided row; None if it was aborted or stopped meanwhile.
        """
        by_row = {request.row: request for request in self.scheduler.running}
        owners = [by_row.get(row) for row in committed.rows.tolist()]
        for j in (committed.at_eos | committed.at_limit).nonzero()[0].tolist():
            request = owners[j]
            if request is not None:
                request.finish_reason = "eos" if committed.at_eos[j] else "length"
                self.scheduler.remove(request)
        return owners

    def _report(self, shares: Sequence[tuple[Request, RowRound]]) -> None:
        """Text, stops and statistics of these requests, and those refused a row; counts once `reported` is assigned."""
        now = time.perf_counter()
        updates = [taken(request, share, now) for request, share in shares]
        if self.guests is not None:
            updates = [self.guests.reported(r, update) for (r, _), update in zip(shares, updates, strict=True)]
        if refused := self.scheduler.refused:
            updates += [Update(r.id, [], "", error=request_failed(e, "its parameters")) for r, e in refused]
            refused.clear()
        if self.deadlines.moments or self.deadlines.cancelled:
            updates += self.deadlines.updates(now, self._requests, updates)
        self.reported = self._kept + updates
        self.counters.add_reported(updates, now)
        for request in self._note(updates):
            self.scheduler.remove(request)
        if not self.scheduler.running:
            self.inflight = self._following = None

    def _note(self, updates: Sequence[Update]) -> list[Request]:
        """Record reported progress, forget ended requests and return them. Idempotent."""
        ended = []
        for update in updates:
            request = self._requests.get(update.request_id)
            if request is not None and update.last:
                ended.append(self._requests.pop(request.id))
                dropped = request.id in self.deadlines.dropped
                self.counters.add_finished(update, dropped, self.drafter is not None)
                self.deadlines.discard(request.id)
            elif request is not None:
                request.progress = update.progress
        return ended

    def _mend(self) -> None:
        """After an interrupt or a failed round: rebuild rows, pages and launched rounds from what was reported. They
        may be in any state, so none of them is read."""
        self._note(self.reported)
        waiting, struck = rewound(self._requests.values())
        self.counters.interrupted += struck
        self._start(waiting)

    def _in_round(self) -> list[Request]:
        """The requests of a round that has just failed: all but those that only waited."""
        spared = {r.id for r in self.scheduler.waiting} | {r.id for r, _ in self.scheduler.refused}
        return [request for request in self._requests.values() if request.id not in spared]

    def _fail_round(self, error: Exception, struck: Container[int] = ()) -> None:
        """End the requests of a failed round and of the failed round before it; all requests if the round had none."""
        inside = {request.id for request in self._in_round()}
        failed = [r for r in self._requests.values() if r.id in inside or r.id in struck] or [*self._requests.values()]
        self.reported = [*self._kept, *(Update(r.id, [], "", error=round_failed(error, len(failed))) for r in failed)]
        self._mend()
