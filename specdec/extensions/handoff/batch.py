"""How requests enter an engine's batch with keys and values of another engine, and leave it with their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from attention.cache.prefix import NOTHING
from attention.checking import CHECKS
from drafters.loops.base import Draft
from specdec.engine.engine import Engine
from specdec.engine.guests import DraftsOf
from specdec.execution.base import Round
from specdec.extensions.handoff.held import HeldPages, release_pages
from specdec.extensions.handoff.moved import Arrival, Departed, Departure, MovedRequest, Pages
from specdec.extensions.handoff.tensors import Arrived, RowTensors
from specdec.interrupts import raised_twice
from specdec.requests.request import Request, Update
from specdec.rounds.rows import Schedule


class Arrivals:
    """Requests from other engines that wait for a row in this one, with their pages."""

    def __init__(self) -> None:
        self._waiting: dict[Request, Arrival] = {}
        self._entered: list[Arrived] = []

    def add(self, request: Request, arrival: Arrival) -> None:
        """Note a queued request that has pages."""
        self._waiting[request] = arrival
        request.has_pages = True

    def forget(self) -> None:
        """Forget all arrivals: rows are made anew, and all requests read their tokens again."""
        self._waiting, self._entered = {}, []

    def discard(self, batch: Engine, request: Request) -> None:
        """Free the pages of a request that waits no longer. Idempotent."""
        arrival = self._waiting.pop(request, None)
        request.has_pages = False
        if arrival is not None:
            release_pages(batch.scheduler.pools(), arrival.pages)

    def join(self, round_: Round, draft: Draft | None, tensors: RowTensors) -> Draft | None:
        """See `Guests.join`: put the tensors of each request that has just entered into its row, once."""
        entered, self._entered = self._entered, []
        return tensors.receive(round_, draft, entered) if entered else draft

    def enter(self, batch: Engine, schedule: Schedule, tensors: RowTensors) -> Schedule:
        """See `Guests.enter`. Open rows before other requests get theirs, since these hold pages already.

        Each verifies its bonus token at once, and the drafts that it has brought, or that it is given here.
        """
        in_turn = sorted(self._waiting, key=lambda request: request.turn)
        waiting = [request for request in in_turn if self._may_go_on(batch, request)]
        if not waiting:
            return schedule
        scheduler, table, config = batch.scheduler, batch.table, batch.config
        tokens, promised, pages = schedule.num_tokens, 0, scheduler.target_pages
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
            scheduler.waiting.remove(request)
            if self._open(batch, request, computed, drafts):
                promised += more
        new, old = self._entered, schedule
        counts = np.array([one.num_drafts for one in new], np.int64)
        rows = np.array([one.row for one in new], np.int64)
        arrived = int(np.count_nonzero(counts))
        places = tensors.places(table.previous[old.rows[old.num_drafts > 0]], arrived)
        if places is not None:
            table.previous[rows[counts > 0]] = places
        if scheduler.head_pages is None:
            limits = table.drafts[rows], table.limit[rows], table.longest[rows]
            counts = np.minimum(scheduler.drafts_at(table.computed[rows], *limits), table.num_given[rows])
        scheduler.reserve(rows, table.computed[rows] + 1 + counts, False)
        return Schedule(
            np.concatenate([old.rows, rows]),
            np.concatenate([old.num_new, np.ones_like(rows)]),
            np.concatenate([old.num_drafts, counts]),
            arrived,
        )

    def _may_go_on(self, batch: Engine, request: Request) -> bool:
        """Whether a request's next tokens can use the keys that arrived with it.

        They cannot if all its tokens must be read again at just this length (longrope models). Then its pages are freed
        and it waits like other requests.
        """
        if batch.scheduler.variant(request) == request.variant:
            return True
        self.discard(batch, request)
        return False

    def _open(self, batch: Engine, request: Request, computed: int, drafts: int) -> bool:
        """Open a row for a request, with its pages. False: its parameters do not fit."""
        scheduler = batch.scheduler
        fault = raised_twice(partial(scheduler.open_row, request, computed, computed))
        if fault is not None:
            self.discard(batch, request)
            scheduler.refused.append((request, fault))
            return False
        arrival = self._waiting.pop(request)
        request.has_pages = False
        batch.table.begin[request.row] = 0  # modules have read all earlier positions; `Arrival.tensors` continues them
        if scheduler.prefixes is not None:
            scheduler.prefixes.enter(request, NOTHING)
        for pool, pages in zip(scheduler.pools(), arrival.pages, strict=True):
            if pages:
                pool.attach(request.row, pages, computed)
        scheduler.running.append(request)
        self._entered.append(Arrived(request.row, computed, arrival, drafts, request.params))
        return True


class Departures:
    """The requests that leave this engine with their first token."""

    def __init__(self, held: HeldPages) -> None:
        self._held = held
        self._seconds: dict[Request, float] = {}
        self._leaving: dict[Request, Departure] = {}

    @property
    def expected(self) -> bool:
        """Whether any queued or running request is to leave."""
        return bool(self._seconds)

    def expect(self, request: Request, seconds: float) -> None:
        """Note a queued request that is to leave. seconds: how long its pages are held afterwards."""
        self._seconds[request] = seconds
        request.leaves = True

    def expect_no_more(self, request: Request) -> None:
        """Forget a request that has ended. Idempotent."""
        self._seconds.pop(request, None)

    def forget(self, waiting: Sequence[Request]) -> None:
        """Called when rows were made anew and these requests wait: requests that were leaving will leave again."""
        self._leaving = {}
        self._seconds = {request: self._seconds[request] for request in waiting if request in self._seconds}

    def leave(self, batch: Engine, owners: Sequence[Request | None], tensors: RowTensors, drafts_of: DraftsOf) -> None:
        """Take requests with a first token out of the batch, with their next drafts; see `Guests.leave`."""
        leaving = [r for r in owners if r is not None and r.leaves and r.row >= 0]
        if not leaving:
            return
        schedule, drafting = leaving_drafts(batch, leaving)
        drafts = _copies(batch, schedule, tensors, drafts_of) if drafting else []
        made = dict(zip(drafting, drafts, strict=True))
        granted: dict[str, Pages] = {}
        for request in leaving:
            own, computed = made.get(request, {}), int(batch.table.computed[request.row])
            carried = tensors.pack(request.row, computed, bool(own))  # after the draft prefill, which carries on
            pages = take_out(batch, request)
            lease = self._held.hold(pages, self._seconds[request])
            self._leaving[request] = Departure(MovedRequest.of(request), lease, pages, carried | own)
            granted[lease] = pages
        self._held.confirm(granted)

    def reported(self, request: Request, update: Update) -> Update:
        """The update of a request; its departure if it leaves, unless its first token ends it."""
        departure = self._leaving.pop(request, None)
        if departure is None:
            return update
        if update.last:
            self._held.end(departure.lease)
            return update
        tensors = {name: tensor.cpu() for name, tensor in departure.tensors.items()}
        return Departed(**vars(update), departure=replace(departure, moved=MovedRequest.of(request), tensors=tensors))


def _copies(
    batch: Engine, schedule: Schedule, tensors: RowTensors, drafts_of: DraftsOf
) -> list[dict[str, torch.Tensor]]:
    """Copies of each row's drafts, and of the distributions they were drawn from."""
    draft, places = drafts_of(schedule)
    sampled = batch.table.sampling(schedule.rows).temperature > 0
    each = zip(places.tolist(), schedule.num_drafts.tolist(), sampled.tolist(), strict=True)
    return [tensors.drafts_of(draft, place, count, drawn) for place, count, drawn in each]


def leaving_drafts(batch: Engine, leaving: Sequence[Request]) -> tuple[Schedule, list[Request]]:
    """The leaving requests that draft, and the schedule of the draft loop that is launched before they go.

    Only pages of the head are reserved for it, since no draft of these requests is verified here.
    """
    scheduler, table = batch.scheduler, batch.table
    rows = np.array([r.row for r in leaving], np.int64)
    drafts = scheduler.drafts_at(table.computed[rows], table.drafts[rows], table.limit[rows], table.longest[rows])
    if scheduler.head_pages is None:
        drafts = np.zeros_like(drafts)
    own = drafts > 0
    rows, drafts = rows[own], drafts[own]
    if scheduler.head_pages is not None:
        scheduler.head_pages.extend(rows, table.computed[rows] + drafts)
    return Schedule(rows, np.ones_like(rows), drafts), [r for r, d in zip(leaving, own, strict=True) if d]


def take_out(batch: Engine, request: Request) -> Pages:
    """Take a running request out of the batch; returns its pages, which no row owns now. Its row is free at once."""
    scheduler, table, row = batch.scheduler, batch.table, request.row
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
