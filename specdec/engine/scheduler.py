"""Who is in the next verification, with how many drafts or prompt tokens; and who owns which pages."""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from attention.cache.pages import BlockTables
from attention.errors import OutOfPagesError
from drafters.loops.lengths import num_drafts_allowed
from specdec.config import EngineConfig
from specdec.requests.request import Request
from specdec.rounds.rows import RowTable
from specdec.rounds.schedule import Schedule


class Scheduler:
    """First come, first served, with continuous batching, chunked prompts, and preemption of the youngest."""

    def __init__(
        self, config: EngineConfig, table: RowTable, target_pages: BlockTables, head_pages: BlockTables | None
    ) -> None:
        self._config = config
        self._table = table
        self.target_pages = target_pages
        self.head_pages = head_pages
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self.waiting and not self.running

    def schedule(self) -> Schedule | None:
        """Decide the next batch and reserve its pages; None when there is nothing to run.

        Requests that lose their pages go back to the front of the queue with all their tokens; nobody is admitted in a
        round in which that happens.
        """
        schedule = self._running_rows()
        if self._reserved(schedule):
            schedule = self._with_admitted(schedule)
        else:
            while not self._reserved(schedule):
                self._preempt(self.running[-1])
                schedule = self._running_rows()
        return schedule if len(schedule.rows) else None

    def follow(self, schedule: Schedule) -> bool:
        """Reserve the round behind a launched one of roots, whatever that accepts: before anybody knows its verdict.

        Returns:
            False, and nothing is changed, where the rows behind may be others: a row is gone or may come to its limit,
            somebody could join, or pages are missing.
        """
        rows, table = schedule.rows, self._table
        if (self.waiting and table.num_free) or [r.row for r in self.running] != rows.tolist():
            return False
        most = schedule.num_new + schedule.num_drafts
        left = table.limit[rows] - table.length[rows] - most
        if (left <= 0).any():
            return False
        roots = table.computed[rows] + most
        drafts = num_drafts_allowed(table.drafts[rows], self._config.max_model_len, roots, left)
        return self._reserved(Schedule(rows, most + 1, drafts))

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is; its row and pages are free at once. Twice is once.

        A row of a launched round may be closed: its pages are handed out again only after that round was read.
        """
        if request in self.running:
            self.running.remove(request)
            self._close(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _running_rows(self) -> Schedule:
        table, rows = self._table, np.array([r.row for r in self.running], np.int64)
        pending = table.length[rows] - table.computed[rows]
        allowed = num_drafts_allowed(
            table.drafts[rows], self._config.max_model_len, table.computed[rows], table.limit[rows] - table.length[rows]
        )
        # Only a row that was in the last batch and now stands at a root of its own has states to draft from.
        drafts = np.where(~table.reading(rows) & (table.previous[rows] >= 0), allowed, 0)
        if drafts.all() and (pending == 1).all():
            return Schedule(rows, pending, drafts)
        budget = self._config.max_num_batched_tokens - int((pending == 1).sum() + drafts.sum())
        for i in np.flatnonzero(pending > 1):
            pending[i] = min(int(pending[i]), budget)
            budget -= int(pending[i])
        order = np.argsort(drafts == 0, kind="stable")
        order = order[pending[order] > 0]
        return Schedule(rows[order], pending[order], drafts[order])

    def _reserved(self, schedule: Schedule) -> bool:
        """Reserve what the rows will write; False, and nothing is changed, when there are too few pages."""
        tokens = self._table.computed[schedule.rows] + schedule.num_new + schedule.num_drafts
        for exactly in (False, True):
            try:
                self._reserve(schedule.rows, tokens, exactly)
            except OutOfPagesError:
                continue
            return True
        return False

    def _reserve(self, rows: np.ndarray, tokens: np.ndarray, exactly: bool) -> None:
        """Pages for `tokens` of each row, and on the head's side for K more: drafting may begin before the commit.

        Pages beyond, of drafts that were rejected, are given back only if they are needed: `exactly`.
        """
        size = BlockTables.resize if exactly else BlockTables.extend
        size(self.target_pages, rows, tokens)
        if self.head_pages is not None:
            drafts = self._table.drafts[rows]
            wanted = np.where(drafts > 0, np.minimum(tokens + drafts, self._config.max_model_len), 0)
            size(self.head_pages, rows, wanted)

    def _with_admitted(self, schedule: Schedule) -> Schedule:
        """Open rows for waiting requests while rows, tokens and pages last."""
        if not self.waiting:
            return schedule
        budget = self._config.max_num_batched_tokens - schedule.num_tokens
        rows, chunks, promised = [], [], 0
        while self.waiting and budget > 0 and self._table.num_free:
            request = self.waiting[0]
            promised += self.target_pages.pages_for(len(request.committed) + 1)
            if promised > self.target_pages.allocator.num_free:
                break
            self._open(self.waiting.popleft())
            rows.append(request.row)
            chunks.append(min(len(request.committed), budget))
            budget -= chunks[-1]
        self._reserve(np.array(rows, np.int64), np.array(chunks, np.int64), False)
        no_drafts = np.zeros(len(rows), np.int64)
        return Schedule(
            np.concatenate([schedule.rows, np.array(rows, np.int64)]),
            np.concatenate([schedule.num_new, np.array(chunks, np.int64)]),
            np.concatenate([schedule.num_drafts, no_drafts]),
        )

    def _open(self, request: Request) -> None:
        request.row = self._table.open(
            request.committed, request.limit, request.num_drafts, request.key, request.params
        )
        request.times.admitted = request.times.admitted or time.perf_counter()
        self.running.append(request)

    def _preempt(self, request: Request) -> None:
        request.committed = self._table.committed(request.row)
        request.preemptions += 1
        self.num_preemptions += 1
        self.running.remove(request)
        self._close(request)
        self.waiting.appendleft(request)

    def _close(self, request: Request) -> None:
        self.target_pages.release(request.row)
        if self.head_pages is not None:
            self.head_pages.release(request.row)
        self._table.close(request.row)
        request.row = -1
