"""Requests that enter an engine's batch with keys and values of another engine, or leave it with their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any

import numpy as np

from attention.cache.pages import BlockTables
from attention.cache.prefix import NOTHING
from attention.checking import CHECKS
from attention.errors import HandoffMismatchError, OutOfPagesError
from drafters.checkpoints.tensor_files import StateDict
from specdec.acceptance.judge import Drafted
from specdec.engine.admission import Admission
from specdec.engine.engine import Engine
from specdec.engine.guests import DraftsOf, Guests
from specdec.execution.base import Executor, Round
from specdec.extensions.handoff.held import ROUNDS_IN_VAIN, HeldPages, Settled, release_pages
from specdec.extensions.handoff.moved import (
    Arrival,
    Departed,
    Handoff,
    Leaving,
    MovedRequest,
    Pages,
    same_fields,
)
from specdec.extensions.handoff.tensors import Arrived, RowTensors, row_tensors
from specdec.interrupts import raised_twice
from specdec.requests.request import Request, Times, Update
from specdec.requests.text import TextStream
from specdec.rounds.rows import Schedule


class MovingRequests(Guests):
    """The requests of one engine that come from other engines or leave for them. Not thread-safe.

    held: their pages while they have no row.
    """

    def __init__(self, engine: Engine) -> None:
        """For an engine, which starts to use it with `Engine.host`."""
        self._engine = engine
        self.held = HeldPages(engine.scheduler.pools())
        self._waiting: dict[Request, Arrival] = {}
        self._entered: list[Arrived] = []
        self._seconds: dict[Request, float] = {}
        self._leaving: dict[Request, tuple[str, Pages, StateDict]] = {}
        self._tensors: tuple[Executor, RowTensors] | None = None

    @property
    def tensors(self) -> RowTensors:
        """Access to what rows carry on the device besides pages, for the engine's present executor."""
        executor = self._engine.executor
        if self._tensors is None or self._tensors[0] is not executor:
            self._tensors = executor, row_tensors(self._engine)
        return self._tensors[1]

    @property
    def leaving(self) -> bool:
        return bool(self._seconds)

    def expect(self, request: Request, arrival: Arrival) -> None:
        """Note a queued request that has pages."""
        self._waiting[request] = arrival
        request.has_pages = True

    def keep(self, pools: Sequence[BlockTables], waiting: Sequence[Request]) -> None:
        """See `Guests.keep`: all requests read their tokens again, and those that were leaving will leave again."""
        self._waiting = {}
        self._entered = []
        self._leaving = {}
        self._seconds = {request: self._seconds[request] for request in waiting if request in self._seconds}
        self.held.keep(pools)

    def discard(self, request: Request) -> None:
        self._seconds.pop(request, None)
        arrival = self._waiting.pop(request, None)
        request.has_pages = False
        if arrival is not None:
            release_pages(self._engine.scheduler.pools(), arrival.pages)

    def join(self, round_: Round, draft: Drafted) -> Drafted:
        """See `Guests.join`: put the tensors of each request that has just entered into its row, once."""
        entered, self._entered = self._entered, []
        return self.tensors.receive(round_, draft, entered) if entered else draft

    def enter(self, schedule: Schedule) -> Schedule:
        """See `Guests.enter`. Open rows before other requests get theirs, since these hold pages already.

        Each verifies its bonus token at once, and the drafts that it has brought, or that it is given here.
        """
        in_turn = sorted(self._waiting, key=lambda request: request.turn)
        waiting = [request for request in in_turn if self._may_go_on(request)]
        if not waiting:
            return schedule
        batch = self._engine
        scheduler = batch.scheduler
        table = batch.table
        config = batch.config
        tokens = schedule.num_tokens
        promised = 0
        pages = scheduler.target_pages
        for request in waiting:
            computed = len(request.committed) - 1
            most = scheduler.drafts_of(request, computed)
            drafts = min(self._waiting[request].num_drafts, most)
            if scheduler.head_pages is not None:
                most = drafts
            tokens += 1 + most
            more = pages.pages_for(computed + 1 + most) - pages.pages_for(computed)
            free = min(pool.allocator.num_free for pool in (pages, *scheduler.windowed_pages))
            if not table.num_free or tokens > config.max_num_batched_tokens or promised + more > free:
                break
            del scheduler.waiting[request]
            if self._open(request, computed, drafts):
                promised += more
        counts = np.array([one.num_drafts for one in self._entered], np.int64)
        rows = np.array([one.row for one in self._entered], np.int64)
        arrived = int(np.count_nonzero(counts))
        places = self.tensors.places(table.previous[schedule.rows[schedule.num_drafts > 0]], arrived)
        if places is not None:
            table.previous[rows[counts > 0]] = places
        if scheduler.head_pages is None:
            allowed = scheduler.drafts_at(table.computed[rows], *table.bounds[:, rows])
            counts = np.minimum(allowed, table.num_given[rows])
        scheduler.reserve(rows, table.computed[rows] + 1 + counts, False)
        return Schedule(
            np.concatenate([schedule.rows, rows]),
            np.concatenate([schedule.num_new, np.ones_like(rows)]),
            np.concatenate([schedule.num_drafts, counts]),
            arrived,
        )

    def _may_go_on(self, request: Request) -> bool:
        """Whether a request's next tokens can use the keys that arrived with it.

        They cannot if all its tokens must be read again at just this length (longrope models). Then its pages are freed
        and it waits like other requests.
        """
        if self._engine.scheduler.variant(request) == request.variant:
            return True
        self.discard(request)
        return False

    def _open(self, request: Request, computed: int, drafts: int) -> bool:
        """Open a row for a request, with its pages. False: its parameters do not fit."""
        scheduler = self._engine.scheduler
        fault = raised_twice(partial(scheduler.open_row, request, computed, computed))
        if fault is not None:
            self.discard(request)
            scheduler.refused.append((request, fault))
            return False
        arrival = self._waiting.pop(request)
        request.has_pages = False
        self._engine.table.begin[request.row] = 0  # modules have read what is before; see `Arrival.tensors`
        if scheduler.prefixes is not None:
            scheduler.prefixes.enter(request, NOTHING)
        for pool, pages in zip(scheduler.pools(), arrival.pages, strict=True):
            if pages:
                pool.attach(request.row, pages, computed)
        scheduler.running.append(request)
        self._entered.append(Arrived(request.row, computed, arrival, drafts, request.params))
        return True

    def leave(self, owners: Sequence[Request | None], drafts_of: DraftsOf) -> None:
        """See `Guests.leave`; their next drafts leave with them."""
        leaving = [r for r in owners if r is not None and r.leaves and r.row >= 0]
        if not leaving:
            return
        batch = self._engine
        tensors = self.tensors
        made = _next_drafts(batch, leaving, tensors, drafts_of)
        granted = {}
        for request in leaving:
            own = made.get(request, {})
            computed = int(batch.table.computed[request.row])
            carried = tensors.pack(request.row, computed, bool(own))  # after the draft prefill, which carries on
            pages = take_out(batch, request)
            lease = self.held.hold(pages, self._seconds[request])
            self._leaving[request] = lease, pages, carried | own
            granted[lease] = pages
        self.held.confirm(granted)

    def reported(self, request: Request, update: Update) -> Update:
        """See `Guests.reported`: its departure if it leaves, unless its first token ends it."""
        if request not in self._leaving:
            return update
        lease, pages, tensors = self._leaving.pop(request)
        if update.last:
            self.held.end(lease)
            return update
        own = {name: tensor.cpu() for name, tensor in tensors.items()}
        return Departed(**vars(update), moved=MovedRequest.of(request), lease=lease, pages=pages, tensors=own)

    def begin_round(self) -> None:
        if self.held.active:
            self.held.begin_round()
            self.settle()

    def idle(self) -> None:
        """See `Guests.idle`: requests may wait for pages that only a peer or the end of a lease frees."""
        self.held.pause(bool(self._engine.scheduler.waiting))

    def settle(self) -> None:
        if self.held.active:
            self.held.settle(self.held.due())

    def submit_leaving(self, request: Leaving) -> int:
        """As `Engine.submit`, but the request leaves with its first token, for another engine."""
        limit = self.check_leaving(request)
        engine = self._engine
        own = (request.token_ids, request.params, limit, request.sample_index, request.eos_token_ids)
        queued = engine.admission.request(engine.take_id(), *own)
        request_id = engine.queue(queued)
        self._seconds[queued] = request.seconds
        queued.leaves = True
        return request_id

    def check_leaving(self, request: Leaving) -> int:
        """As `Engine.check`, for a request of which only the prompt is read here.

        Raises:
            HandoffMismatchError: the rounds have state that cannot move, see `RoundExtra.refuses_handoff`.
        """
        _check_extras(self._engine.admission)
        params = request.params
        if params.user_code:
            raise HandoffMismatchError(
                f"{', '.join(params.user_code)}: code of the caller's does not move to another engine; "
                "generate such requests where they are submitted"
            )
        if params.grammar is not None:
            raise HandoffMismatchError(
                "grammar: where a request stands in it does not move to another engine; generate such requests where "
                "they are submitted"
            )
        if params.told:
            raise HandoffMismatchError(
                f"{', '.join(params.told)}: what the first round tells does not move to another engine; leave them out"
            )
        return self._engine.admission.check(request.token_ids, params, prompt_alone=True)

    def check_moved(self, moved: MovedRequest) -> None:
        """Check that a request from another engine can be served as it would have been there.

        Raises:
            InvalidInputError, CacheTooSmallError: as in `Admission.check`; or its limits exceed this engine's.
        """
        admission = self._engine.admission
        _check_extras(admission)
        longest = admission.config.max_model_len
        num_drafts = admission.config.num_speculative_tokens
        if moved.limit > longest or moved.num_drafts > num_drafts:
            raise HandoffMismatchError(
                f"the request may have {moved.limit} tokens and {moved.num_drafts} drafts a round; this model was "
                f"loaded for max_model_len={longest} and num_speculative_tokens={num_drafts}; "
                "load it for as much, or give SamplingParams(max_new_tokens=…, num_speculative_tokens=…) to prefill"
            )
        admission.check_prompt(moved.prompt_token_ids)
        admission.check_ids("new tokens: ", moved.new_token_ids)
        admission.check_ids("stop_token_ids: ", moved.params.stop_token_ids)
        if not moved.new_token_ids or len(moved.prompt_token_ids) + len(moved.new_token_ids) >= moved.limit:
            raise HandoffMismatchError(
                f"a moved request has {len(moved.prompt_token_ids)} prompt tokens, {len(moved.new_token_ids)} new ones "
                f"and a limit of {moved.limit}: at least one new token, and room for one more, are needed"
            )
        admission.check_cache(len(moved.prompt_token_ids), moved.limit)

    def reserve(self, moved: MovedRequest) -> int | OutOfPagesError:
        """Take pages for a request from another engine, to be filled and then given to `resume`; returns their number,
        or the error where too few are free now: raised in here, it would make the engine renew its rows.

        moved: a request that `check_moved` has found served here.
        """
        engine = self._engine
        with engine.change:
            self.settle()
            without_head = engine.scheduler.head_pages is not None and not moved.num_drafts
            rounds = 0 if engine.inflight is None else ROUNDS_IN_VAIN
            return self.held.reserve(moved, without_head, rounds)

    def may_fill(self, number: int) -> bool:
        """Whether reserved pages may be written to, see `HeldPages.may_fill`."""
        return self._engine.inflight is None or self.held.may_fill(number)

    def resume(self, handoff: Handoff, number: int | None) -> int:
        """Queue a request from another engine; it continues as if it had always been here.

        handoff: with a request that `check_moved` has found served here. number: of its filled pages; None to read its
            tokens again.
        """
        moved = handoff.moved
        assert moved is not None
        # A waiting request that was begun in another engine. Its text and first tokens are reported here; its times
        # are set back by the seconds spent there.
        now = time.perf_counter()
        new = list(moved.new_token_ids)
        stream = TextStream(self._engine.admission.vocabulary, moved.params.stop)
        stream.push(new, len(new))
        request = Request(
            id=self._engine.take_id(),
            prompt_len=len(moved.prompt_token_ids),
            committed=moved.committed,
            stream=stream,
            times=Times(now - moved.queue_s - moved.prefill_s, now - moved.prefill_s, now),
            new_tokens=new,
            **same_fields(moved),
        )
        request_id = self._engine.queue(request)  # first: it repairs what an interrupt has left, and keeps held pages
        if number is not None:
            with self._engine.change:
                self.expect(request, Arrival(self.held.take(number), handoff.tensors))
        return request_id

    def release(self, leases: Sequence[str]) -> None:
        """Free pages held for requests that left and will not be read. Unknown leases have ended already."""
        with self._engine.change:
            self.held.release(leases)

    def drop(self, number: int, settled: Settled) -> None:
        """Give up reserved pages because the request does not arrive, see `HeldPages.drop`."""
        with self._engine.change:
            self.held.drop(number, settled)


def _next_drafts(
    batch: Engine, leaving: Sequence[Request], tensors: RowTensors, drafts_of: DraftsOf
) -> dict[Request, StateDict]:
    """Copies of the drafts of those leaving requests that draft, and of the distributions they were drawn from.

    Only pages of the head are reserved for the draft loop, since no draft of these requests is verified here.
    """
    scheduler = batch.scheduler
    table = batch.table
    rows = np.array([r.row for r in leaving], np.int64)
    drafts = scheduler.drafts_at(table.computed[rows], *table.bounds[:, rows])
    own = drafts > 0
    if scheduler.head_pages is None or not own.any():
        return {}
    rows = rows[own]
    drafts = drafts[own]
    scheduler.head_pages.extend(rows, table.computed[rows] + np.maximum(drafts, batch.config.block_size))
    draft, places = drafts_of(Schedule(rows, np.ones_like(rows), drafts))
    each = zip(compress(leaving, own), places, drafts, table.sampling(rows).temperature > 0, strict=True)
    return {request: tensors.drafts_of(draft, place, count, drawn) for request, place, count, drawn in each}


def take_out(batch: Engine, request: Request) -> Pages:
    """Take a running request out of the batch; returns its pages, which no row owns now. Its row is free at once."""
    scheduler = batch.scheduler
    table = batch.table
    row = request.row
    computed = int(table.computed[row])
    if CHECKS.on:
        for columns in table.extras:
            columns.check_leaving(table, row)
    scheduler.free_behind_windows(np.array([row]))
    for pool in scheduler.pools():
        if pool.pages_of(row):  # else the head's pool, of which a request without drafts has no pages
            pool.resize([row], [computed])
    if scheduler.prefixes is not None:
        scheduler.prefixes.leave(row)
    pages = tuple(tuple(pool.detach(row)) for pool in scheduler.pools())
    scheduler.running.remove(request)
    table.close(row)
    request.row = -1
    return pages


def moving_requests(engine: Engine, make: Callable[[Any], MovingRequests] = MovingRequests) -> MovingRequests:
    """The moving requests of an engine, made at first use. Called between two rounds.

    make: makes them; on one of several ranks see `specdec.extensions.parallel.among_ranks`.
    """
    if not isinstance(engine.guests, MovingRequests):
        engine.host(make(engine))
    assert isinstance(engine.guests, MovingRequests)
    return engine.guests


def _check_extras(admission: Admission) -> None:
    for extra in admission.config.extras:
        if extra.refuses_handoff:
            raise HandoffMismatchError(f"requests do not move between engines: {extra.refuses_handoff}")
