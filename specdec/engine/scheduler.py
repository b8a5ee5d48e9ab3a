"""Scheduler: chooses the rows of the next verification, their drafts or prompt tokens, and reserves their pages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy import ndarray

from attention.cache.pages import BlockTables, PageAllocator
from attention.cache.prefix import NOTHING, Found
from attention.cache.windowed import WindowedTables
from attention.checking import CHECKS
from attention.errors import OutOfPagesError
from specdec.config import EngineConfig, WindowedPool
from specdec.engine.admission import WaitingRequests
from specdec.engine.guests import Guests
from specdec.engine.prefixes import Prefixes
from specdec.engine.stats import Counters
from specdec.interrupts import raised_twice
from specdec.requests.request import Request
from specdec.rounds.buckets import PromptBudget
from specdec.rounds.rows import RowTable, Schedule, draft_room, drafts_within


@dataclass(frozen=True)
class Usage:
    """Requests of an engine, and the rows and pages that they hold, at one moment; all 0 when it is idle.

    Attributes:
        requests: requests that have not ended.
        waiting: requests without a row.
        running: requests with a row.
        rows: used rows of the row table.
        target_pages: used pages of the target's KV cache, including pages that belong to no row.
        head_pages: used pages of the head's KV cache, counted likewise.
        windowed_pages: used pages of all the target's further cache groups.
    """

    requests: int = 0
    waiting: int = 0
    running: int = 0
    rows: int = 0
    target_pages: int = 0
    head_pages: int = 0
    windowed_pages: int = 0


def windowed_tables(config: EngineConfig, pool: WindowedPool, allocator: PageAllocator | None = None) -> WindowedTables:
    """Empty block tables of a windowed group, with an unused last row, and room for padding tokens after a row."""
    length = config.max_model_len + config.num_speculative_tokens + 1
    rows = config.max_num_seqs + 1
    return WindowedTables(pool.num_pages, rows, length, config.page_size, pool.reach, allocator)


class Scheduler:
    """First come, first served, with continuous batching, chunked prompts, and preemption of the last admitted request.

    Attributes:
        waiting, running: requests in order of their turns: by arrival, within one call as `arrange` left them.
        refused: requests whose row could not be opened, and why; the engine reports and removes them.
        guests: see `Engine.guests`.
        prefixes: pages that requests share through the prefix cache; None without one.
    """

    def __init__(
        self,
        config: EngineConfig,
        table: RowTable,
        target_pages: BlockTables,
        head_pages: BlockTables | None,
        num_modules: int = 1,
        windowed_pages: Sequence[WindowedTables] = (),
        *,
        prefixes: Prefixes | None = None,
        counters: Counters | None = None,
        guests: Guests | None = None,
    ) -> None:
        """num_modules: M of a drafter of several multi-token-prediction modules, else 1.

        windowed_pages: tables of the target's further cache groups. prefixes: the prefix cache of these rows and pages.
        counters: counts preemptions and prefix cache hits.
        """
        self._config = config
        self._table = table
        self._num_modules = num_modules
        self._rereads = any(extra.rereads for extra in config.extras)
        self.prefixes = prefixes
        self._counters = counters or Counters()
        self.target_pages = target_pages
        self.head_pages = head_pages
        self.windowed_pages = tuple(windowed_pages)
        self.waiting = WaitingRequests()
        self.running: list[Request] = []
        self.refused: list[tuple[Request, Exception]] = []
        self.guests = guests

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self.waiting and not self.running

    def usage(self, requests: int) -> Usage:
        """See `Usage`. Raises InvariantError, in check mode, when a page has no owner or two."""
        target = self.target_pages
        head = self.head_pages
        windowed = self.windowed_pages
        if CHECKS.on:
            for pages in self.pools():
                pages.validate()
            if self.prefixes is not None:
                self.prefixes.cache.validate()
        rows = self._config.max_num_seqs - self._table.num_free
        held = (target.num_used, 0 if head is None else head.num_used, sum(pages.num_used for pages in windowed))
        return Usage(requests, len(self.waiting), len(self.running), rows, *held)

    def pools(self) -> tuple[BlockTables, ...]:
        """The block tables of all groups."""
        return (self.target_pages, *self.windowed_pages, *(() if self.head_pages is None else (self.head_pages,)))

    def arrange(self, last: Sequence[Request]) -> None:
        """Move these waiting requests behind all others, in this order."""
        for request in last:
            self.waiting.move_to_end(request)

    def schedule(self) -> Schedule | None:
        """Decide the next batch and reserve its pages; None when nothing can run.

        Preempted requests return to the front of the queue with all their tokens; no request is admitted in a round
        with a preemption. A row's drafts depend on the row alone, never on its neighbours, and a resumed request drafts
        from the bonus token at which it was preempted: so its rounds do not depend on other requests in the batch.
        Sampled tokens rely on that: drawing, accepting and resampling use separate uniforms, so the drafts decide which
        uniform a token gets.
        """
        if self.windowed_pages:
            self.free_behind_windows(np.array([r.row for r in self.running], np.int64))
        if self._rereads:
            # Keys and values cannot serve the next token of these rows: they are read again from the start.
            table = self._table
            for request in [r for r in self.running if table.length[r.row] > table.longest[r.row]]:
                self._requeue(request)
        schedule = self._running_rows()
        if self._reserved(schedule):
            if self.prefixes is not None and self.prefixes.owing:
                self.prefixes.register_read(schedule)
            if self.waiting:
                schedule = self._with_admitted(schedule if self.guests is None else self.guests.enter(schedule))
        else:
            while not self._reserved(schedule):
                self._preempt(self.running[-1])
                schedule = self._running_rows()
        if not len(schedule.rows):
            return None
        return schedule if schedule.num_drafts.all() else self._decided_first(schedule)

    def joined(self, schedule: Schedule) -> Schedule:
        """A scheduled batch with waiting requests, if there is room. None joins after a preemption, or once one of its
        rows has been closed: pages and number of that row would be another's in the same round."""
        closed = {*schedule.rows.tolist()} - {request.row for request in self.running}
        if closed or self.waiting.first.times.admitted:
            return schedule
        return self._decided_first(self._with_admitted(schedule))

    def _decided_first(self, schedule: Schedule) -> Schedule:
        """Rows with drafts, then others whose token the round decides, then those that go on reading."""
        reads = self._table.computed[schedule.rows] + schedule.num_new < self._table.length[schedule.rows]
        order = np.argsort(np.where(schedule.num_drafts > 0, 0, 1 + reads), kind="stable")
        return Schedule(schedule.rows[order], schedule.num_new[order], schedule.num_drafts[order], schedule.num_arrived)

    def reserve_next(self, schedule: Schedule) -> bool:
        """Reserve pages for the round after a launched round of verifications, for any number of accepted drafts.

        Returns:
            False, and nothing is changed, where the rows after it may be others, or no verifications: a row is gone or
            may come to its limit, reads its prompt, is too short for M modules to make all drafts that its limits
            allow (`drafts_at`), somebody could join, or pages are missing.
        """
        rows = schedule.rows
        table = self._table
        if (self.waiting and table.num_free) or [r.row for r in self.running] != rows.tolist():
            return False
        if table.prefilling(rows).any():
            return False
        if self._num_modules > 1 and table.computed[rows].min() + 1 < self._num_modules:
            return False
        most = schedule.num_new + schedule.num_drafts
        left = np.minimum(table.limit[rows], table.longest[rows]) - table.length[rows] - most
        if (left <= 0).any():
            return False
        bonus = table.computed[rows] + most
        drafts = drafts_within(table.drafts[rows], draft_room(table.longest[rows], bonus, left))
        self.free_behind_windows(rows)
        return self._reserved(Schedule(rows, most + 1, drafts))

    def remove(self, request: Request) -> None:
        """Remove a request, waiting or running; its row and pages are free at once. Idempotent.

        A row of a launched round may be closed: its pages go to later rounds, which the device runs after that one.
        """
        if self.guests is not None:
            self.guests.discard(request)
        if request in self.waiting:
            del self.waiting[request]
        elif request in self.running:
            self.running.remove(request)
            self._close(request)

    def _running_rows(self) -> Schedule:
        table = self._table
        rows = np.array([r.row for r in self.running], np.int64)
        if not self.running:
            return Schedule(rows, rows, rows)
        pending = table.pending(rows)
        allowed = self.drafts_at(table.computed[rows], *table.bounds[:, rows])
        # A row whose bonus token alone is pending was in the last batch, whose aux hidden states the head starts from.
        prefilling = table.computed[rows] < table.prefill[rows]
        if self.head_pages is None:
            allowed = np.minimum(allowed, table.num_given[rows])
        drafts = np.where(prefilling, 0, allowed)
        if drafts.all():
            return Schedule(rows, pending, drafts)
        budgets = PromptBudget(self._config, self.running, prefilling, int((pending + drafts)[~prefilling].sum()))
        read: list[tuple[int, int]] = []
        for i in np.flatnonzero(prefilling):
            budget = budgets.of(self.running[i], read)
            pending[i] = table.chunk(int(rows[i]), min(int(pending[i]), budget), read)
            read.append((int(rows[i]), int(pending[i])))
        order = np.argsort(drafts == 0, kind="stable")
        order = order[pending[order] > 0]
        return Schedule(rows[order], pending[order], drafts[order])

    def drafts_at(self, positions: ndarray, drafts: ndarray, limit: ndarray, longest: ndarray) -> ndarray:
        """[B] drafts from bonus tokens at these positions, of rows with K `drafts` and at most `limit` tokens.

        longest: see `RowTable`.

        At the first M - 1 positions a request is too short for the later ones of M > 1 modules
        (`drafters.loops.chain`).
        """
        allowed = drafts_within(drafts, draft_room(longest, positions, limit - positions - 1))
        if self._num_modules == 1:
            return allowed
        return np.where(positions < self._num_modules, np.minimum(allowed, positions + 1), allowed)

    def _reserved(self, schedule: Schedule) -> bool:
        """Reserve pages for the tokens of these rows; False, without any change, if pages are missing."""
        if not len(schedule.rows):
            return True
        tokens = self._table.computed[schedule.rows] + schedule.num_new + schedule.num_drafts
        # First keep the surplus pages of rejected drafts, which rows soon need again; free them if pages run out.
        for exactly in (False, True):
            try:
                self.reserve(schedule.rows, tokens, exactly)
            except OutOfPagesError:
                continue
            return True
        return False

    def free_behind_windows(self, rows: ndarray) -> None:
        """Free pages behind the windows and before the chunks of these rows, by their committed tokens.

        A round in flight may list such pages, and masks their keys; they are written again by later rounds only.
        """
        if self.prefixes is not None and self.windowed_pages:
            self.prefixes.keep_windowed(rows)
        for pages in self.windowed_pages:
            pages.free_behind(rows, self._table.computed[rows])

    def reserve(self, rows: ndarray, tokens: ndarray, exactly: bool) -> None:
        """Pages for `tokens` of each row, and of the head's for K more or a block: drafts may come before the commit.

        Surplus pages, of rejected drafts, are freed only with `exactly`, when other rows need them. When a later group
        has too few, earlier groups keep their reserved pages as surplus.
        """
        size = BlockTables.resize if exactly else BlockTables.extend
        size(self.target_pages, rows, tokens)
        for pages in self.windowed_pages:
            size(pages, rows, tokens)
        if self.head_pages is not None:
            drafts = self._table.drafts[rows]
            block = self._config.block_size
            more = np.minimum(tokens + np.maximum(drafts, block), self._config.max_model_len + block)
            size(self.head_pages, rows, np.where(drafts > 0, more, 0))
        if CHECKS.on and self.prefixes is not None:
            self.prefixes.check_writable(rows)

    def _with_admitted(self, schedule: Schedule) -> Schedule:
        """Open rows for waiting requests while rows, tokens and pages last."""
        table, waiting = self._table, self.waiting
        if not table.num_free:
            return schedule
        prefilling = table.prefilling(schedule.rows)
        read = [*zip(schedule.rows[prefilling].tolist(), schedule.num_new[prefilling].tolist(), strict=True)]
        reading = table.prefilling(np.array([r.row for r in self.running], np.int64))
        budgets = PromptBudget(self._config, self.running, reading, schedule.num_tokens - sum(n for _, n in read))
        later, first = list[Request](), len(read)
        promised = np.zeros(1 + len(self.windowed_pages), np.int64)
        while waiting and table.num_free and len(later) < self._config.max_num_seqs:
            request = waiting.first
            if not (budget := budgets.of(request, read)):
                break
            if request.has_pages:  # `Guests.enter` found no place for it in this round
                later.append(waiting.popleft())
                continue
            request.variant = self.variant(request)
            prefill, drafts = self._entry(request)
            found = NOTHING if self.prefixes is None else self.prefixes.find(request, prefill)
            if self.prefixes is not None and self.prefixes.worth_waiting(request, prefill, found):
                later.append(waiting.popleft())
                continue
            own = self._pages_of_entry(len(request.committed) + max(drafts, 1), min(prefill, budget))
            for group, pages in enumerate((found.pages, *found.windowed)):
                own[group] -= len(pages)
            if (promised + own > self._free_besides(found)).any():
                break
            fault = raised_twice(partial(self._open, request, prefill, found))
            waiting.popleft()
            if fault is not None:
                self.refused.append((request, fault))
                continue
            promised += own
            pending = min(int(table.pending(np.array([request.row]))[0]), budget)
            read.append((request.row, table.chunk(request.row, pending, read)))
        for request in reversed(later):
            waiting.appendleft(request)
        rows, lens = np.array([each for each in read[first:] if each[1]], np.int64).reshape(-1, 2).T
        self.reserve(rows, table.computed[rows] + lens, False)
        return Schedule(
            np.concatenate([schedule.rows, rows]),
            np.concatenate([schedule.num_new, lens]),
            np.concatenate([schedule.num_drafts, np.zeros_like(rows)]),
            schedule.num_arrived,
        )

    def _free_besides(self, found: Found) -> list[int]:
        """Free pages of each of the target's groups once `found` is held: until then idle pages of it count as free."""
        free = [pages.allocator.num_free for pages in (self.target_pages, *self.windowed_pages)]
        if self.prefixes is not None:
            for group, idle in enumerate(self.prefixes.cache.num_idle(found)):
                free[group] -= idle
        return free

    def _pages_of_entry(self, num_tokens: int, chunk: int) -> ndarray:
        """Pages of each of the target's groups for a request of `num_tokens` that first reads `chunk` of them."""
        query_len = max(chunk, self._config.num_speculative_tokens + 1)
        windowed = (pages.most_pages(num_tokens, query_len) for pages in self.windowed_pages)
        return np.array([self.target_pages.pages_for(num_tokens), *windowed], np.int64)

    def _entry(self, request: Request) -> tuple[int, int]:
        """(tokens that a waiting request prefills, drafts of its first verification after that).

        A new one prefills its prompt, whose last position gives the first token. One that was preempted at a bonus
        token with drafts prefills all before it, drafts from it and verifies as it would have. Without drafts there,
        the bonus token's position gives the next token as a prompt's last one does, and no round more is needed.
        """
        length = len(request.committed)
        if length == request.prompt_len:
            return length, 0
        drafts = self.drafts_of(request, length - 1)
        return (length - 1, drafts) if drafts else (length, 0)

    def drafts_of(self, request: Request, position: int) -> int:
        """Drafts of the verification of a waiting request's bonus token at this position."""
        places = (position, request.num_drafts, request.limit, self._longest(request))
        return int(self.drafts_at(*map(np.array, places)))

    def open_row(self, request: Request, prefill: int, begin: int) -> None:
        """Open a row for a waiting request, see `RowTable.open`."""
        request.row = self._table.open(
            request.committed,
            request.limit,
            request.num_drafts,
            request.key,
            request.params,
            request.eos_token_ids,
            prefill,
            begin,
            self._longest(request),
            request.variant,
            request.prompt_len,
        )

    def _open(self, request: Request, prefill: int, found: Found) -> None:
        page_size = self._config.page_size
        self.open_row(request, prefill, len(found.pages) * page_size)
        if self.prefixes is not None:
            self.prefixes.enter(request, found)
        if not request.times.admitted:
            request.times.admitted = time.perf_counter()
            request.prefix_hit_tokens = found.num_pages * page_size
            request.cached_tokens = len(found.pages) * page_size
            if self.prefixes is not None and request.params.cache_prefix:
                self._counters.add_prefix(request.prompt_len, request.prefix_hit_tokens, request.cached_tokens)
        self.running.append(request)

    def variant(self, request: Request) -> int:
        """Which keys and values a request's tokens would have, were it read now: see `RoundExtra.variant`."""
        found = 0
        for extra in self._config.extras:
            found |= extra.variant(request.prompt_len, len(request.committed))
        return found

    def _longest(self, request: Request) -> int:
        """Positions that its rounds may reach until it is read again, see `RowTable.longest`."""
        reaches = (extra.reach(request.variant) for extra in self._config.extras)
        return min((self._config.max_model_len, *(reach for reach in reaches if reach is not None)))

    def _preempt(self, request: Request) -> None:
        request.preemptions += 1
        self._counters.preemptions += 1
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        """Take a request's row and pages; it waits, before all others, with all its tokens."""
        request.committed = self._table.committed(request.row)
        self.running.remove(request)
        self._close(request)
        self.waiting.appendleft(request)

    def _close(self, request: Request) -> None:
        if self.prefixes is not None:
            self.prefixes.leave(request.row)
        for pages in self.pools():
            pages.release(request.row)
        self._table.close(request.row)
        request.row = -1
