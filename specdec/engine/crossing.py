"""Rows that cross from one engine to another: how they leave a scheduler's batch, and how they enter it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from attention.cache.pages import BlockTables
from attention.cache.prefix import NOTHING
from attention.cache.windowed import WindowedTables
from attention.checking import checking
from specdec.config import EngineConfig
from specdec.engine.aside import release_aside
from specdec.engine.faults import raised_twice
from specdec.engine.prefixes import Prefixes
from specdec.engine.waiting import WaitingRequests
from specdec.execution.moving import Arrived
from specdec.requests.moved import Pages
from specdec.requests.request import Request
from specdec.rounds.rows import RowTable, Schedule


class Crossing(ABC):
    """The part of a `Scheduler` that lets requests leave for other engines, and requests of others in.

    Attributes: see `specdec.engine.scheduler.Scheduler`.
    """

    _config: EngineConfig
    _table: RowTable
    prefixes: Prefixes | None
    target_pages: BlockTables
    head_pages: BlockTables | None
    windowed_pages: tuple[WindowedTables, ...]
    waiting: WaitingRequests
    running: list[Request]
    refused: list[tuple[Request, Exception]]
    arrived: list[Arrived]

    @abstractmethod
    def pools(self) -> tuple[BlockTables, ...]:
        """The block tables of all groups."""

    @abstractmethod
    def _drafts_at(
        self, positions: np.ndarray, drafts: np.ndarray, limit: np.ndarray, longest: np.ndarray
    ) -> np.ndarray: ...

    @abstractmethod
    def _variant(self, request: Request) -> int: ...

    @abstractmethod
    def _longest(self, request: Request) -> int: ...

    @abstractmethod
    def _reserve(self, rows: np.ndarray, tokens: np.ndarray, exactly: bool) -> None: ...

    @abstractmethod
    def _free_behind_windows(self, rows: np.ndarray) -> None: ...

    def take_arrived(self) -> list[Arrived]:
        """The requests from other engines that the last schedule let in, each once, in its order."""
        arrived, self.arrived = self.arrived, []
        return arrived

    def leaving_drafts(self, leaving: Sequence[Request]) -> tuple[Schedule, list[Request]]:
        """Those of some running requests that draft, which leave: the draft loop that is launched before they go.

        The head's pages are reserved for it; nothing of theirs is verified here, so the target needs none.
        """
        table, rows = self._table, np.array([r.row for r in leaving], np.int64)
        drafts = self._drafts_at(table.computed[rows], table.drafts[rows], table.limit[rows], table.longest[rows])
        if self.head_pages is None:
            drafts = np.zeros_like(drafts)
        own = drafts > 0
        rows, drafts = rows[own], drafts[own]
        if self.head_pages is not None:
            self.head_pages.extend(rows, table.computed[rows] + drafts)
        return Schedule(rows, np.ones_like(rows), drafts), [r for r, d in zip(leaving, own, strict=True) if d]

    def computed(self, request: Request) -> int:
        """Tokens of a running request that were read."""
        return int(self._table.computed[request.row])

    def leave(self, request: Request) -> Pages:
        """A running request goes out of the batch; its pages stay owned, by no row. Its row is free at once."""
        row, computed = request.row, self.computed(request)
        if checking():
            for columns in self._table.extras:
                columns.check_leaving(self._table, row)
        self._free_behind_windows(np.array([row]))
        for pool in self.pools():
            if pool.pages_of(row):  # else the head's, which it has none of
                pool.resize([row], [computed])
        if self.prefixes is not None:
            self.prefixes.leave(row)
        pages = tuple(tuple(pool.detach(row)) for pool in self.pools())
        self.running.remove(request)
        self._table.close(row)
        request.row = -1
        return pages

    def with_arrived(self, schedule: Schedule) -> Schedule:
        """Open rows for requests from other engines, before others: they hold pages already.

        Each verifies its bonus token at once, and the drafts that it has brought.
        """
        waiting = [request for request in self.waiting.arrived() if self._may_go_on(request)]
        if not waiting:
            return schedule
        tokens, promised = schedule.num_tokens, 0
        for request in waiting:
            computed = len(request.committed) - 1
            drafts = self._drafts_brought(request, computed)
            tokens += 1 + drafts
            more = self.target_pages.pages_for(computed + 1 + drafts) - self.target_pages.pages_for(computed)
            free = min(pool.allocator.num_free for pool in (self.target_pages, *self.windowed_pages))
            if not self._table.num_free or tokens > self._config.max_num_batched_tokens or promised + more > free:
                break
            self.waiting.remove(request)
            if self._enter(request, computed, drafts):
                promised += more
        new, old = self.arrived, schedule
        counts = np.array([one.num_drafts for one in new], np.int64)
        rows = np.array([one.row for one in new], np.int64)
        self._reserve(rows, self._table.computed[rows] + 1 + counts, False)
        return Schedule(
            np.concatenate([old.rows, rows]),
            np.concatenate([old.num_new, np.ones_like(rows)]),
            np.concatenate([old.num_drafts, counts]),
            int(np.count_nonzero(counts)),
        )

    def _may_go_on(self, request: Request) -> bool:
        """Whether a waiting request has come from another engine, with keys that its next tokens can go on from.

        Where all its tokens are read again at just this length, as a longrope model may, it waits like others.
        """
        if request.arrival is None or self._variant(request) == request.variant:
            return request.arrival is not None
        release_aside(self.pools(), request.arrival.pages)
        request.arrival = None
        return False

    def _drafts_brought(self, request: Request, computed: int) -> int:
        assert request.arrival is not None
        places = (computed, request.num_drafts, request.limit, self._longest(request))
        return min(request.arrival.num_drafts, int(self._drafts_at(*map(np.array, places))))

    def _enter(self, request: Request, computed: int, drafts: int) -> bool:
        """Open a row for a request from another engine, with its pages. False: its parameters do not fit."""
        table, arrival = self._table, request.arrival
        assert arrival is not None
        own = (request.limit, request.num_drafts, request.key, request.params, request.eos_token_ids)
        kind = (self._longest(request), request.variant)
        opened: list[int] = []
        fault = raised_twice(lambda: opened.append(table.open(request.committed, *own, computed, computed, *kind)))
        if fault is not None:
            release_aside(self.pools(), arrival.pages)
            self.refused.append((request, fault))
            return False
        (request.row,) = opened
        table.begin[request.row] = 0  # module m has read what stands before its rows: `Arrival.tensors` goes on there
        if self.prefixes is not None:
            self.prefixes.enter(request, NOTHING)
        for pool, pages in zip(self.pools(), arrival.pages, strict=True):
            if pages:
                pool.attach(request.row, pages, computed)
        request.arrival = None
        self.running.append(request)
        self.arrived.append(Arrived(request.row, computed, arrival, drafts, request.params))
        return True
