"""Pages behind a window or before a chunk are freed, no other; every page has one owner all the while."""

from __future__ import annotations

import doctest

import hypothesis.strategies as st
import numpy as np
import pytest
from fakes import examples, free_pages
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import attention.cache.windowed
import attention.groups
import attention.spec
from attention.cache.pages import NULL_PAGE
from attention.cache.windowed import WindowedTables, most_owned_pages
from attention.errors import InvariantError, OutOfPagesError
from attention.spec import Reach

ROWS, PAGE, NUM_PAGES, MOST, WINDOW, CHUNK = 4, 4, 14, 60, 10, 12


def first_seen(reach: Reach, position: int) -> int:
    """The first position that a query sees, by the definition of each kind."""
    return max(position - WINDOW + 1, 0) if reach.step == 1 else CHUNK * (position // CHUNK)


class WindowedMachine(RuleBasedStateMachine):
    """The model: how many tokens each row has pages for, and the first page that it still owns."""

    reach = Reach(WINDOW)

    def __init__(self) -> None:
        super().__init__()
        self.tables = WindowedTables(NUM_PAGES, ROWS, MOST, PAGE, self.reach)
        self.pages, self.first, self.computed = [0] * ROWS, [0] * ROWS, [0] * ROWS

    def owned(self) -> int:
        return sum(self.pages) - sum(self.first)

    @rule(row=st.integers(0, ROWS - 1), more=st.integers(1, 14), exactly=st.booleans())
    def reserve(self, row: int, more: int, exactly: bool) -> None:
        """A chunk, or a verification."""
        tokens = min(self.computed[row] + more, MOST)
        wanted = -(-tokens // PAGE)
        wanted = wanted if exactly else max(wanted, self.pages[row])
        size = self.tables.resize if exactly else self.tables.extend
        before = self.tables.table.copy()
        if self.owned() - self.pages[row] + wanted > NUM_PAGES - 1:
            with pytest.raises(OutOfPagesError):
                size([row], [tokens])
            assert np.array_equal(self.tables.table, before)
            return
        size([row], [tokens])
        if not exactly or wanted > self.pages[row]:
            self.pages[row] = wanted
        else:  # as in block tables of whole rows, surplus pages go back only where a row of the call grows
            held = np.flatnonzero(self.tables.table[row])
            self.pages[row] = int(held[-1]) + 1 if len(held) else self.first[row]
        kept = slice(self.first[row], min(wanted, self.pages[row], before.shape[1]))
        old = before[row, kept][before[row, kept] != NULL_PAGE]
        assert self.tables.table[row, kept][: len(old)].tolist() == old.tolist(), "kept pages never move"

    @rule(row=st.integers(0, ROWS - 1), accepted=st.integers(0, 14))
    def commit(self, row: int, accepted: int) -> None:
        """Some of what was reserved is committed, and what is seen moves."""
        self.computed[row] = min(self.computed[row] + accepted, self.pages[row] * PAGE)
        self.tables.free_behind(np.arange(ROWS), np.array(self.computed))
        seen = [first_seen(self.reach, n) // PAGE for n in self.computed]
        self.first = [max(pair) for pair in zip(self.first, seen, strict=True)]

    @rule(row=st.integers(0, ROWS - 1))
    def release(self, row: int) -> None:
        self.tables.release(row)
        self.pages[row] = self.first[row] = self.computed[row] = 0

    @invariant()
    def rows_own_what_the_next_query_and_later_tokens_need(self) -> None:
        self.tables.validate()
        for row, (first, pages, computed) in enumerate(zip(self.first, self.pages, self.computed, strict=True)):
            own = np.flatnonzero(self.tables.table[row])
            assert own.tolist() == list(range(first, pages))
            seen = np.arange(first_seen(self.reach, computed), computed)  # what the next query sees beside itself
            assert set((seen // PAGE).tolist()) <= set(own.tolist())
        assert self.tables.num_used == self.owned() == NUM_PAGES - 1 - self.tables.allocator.num_free


class ChunkedMachine(WindowedMachine):
    """The same where rows attend in chunks of three pages."""

    reach = Reach(CHUNK, CHUNK)


TestWindowedTables, TestChunkedTables = WindowedMachine.TestCase, ChunkedMachine.TestCase
for _case in (TestWindowedTables, TestChunkedTables):
    _case.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(("window", "query_len", "page"), [(10, 1, 4), (1, 1, 4), (1, 5, 3), (16, 6, 16), (7, 9, 1)])
def test_most_pages_is_what_the_worst_position_needs(window: int, query_len: int, page: int) -> None:
    needed = 0
    for computed in range(window, window + 3 * page):
        first = (computed - window + 1) // page
        needed = max(needed, -(-(computed + query_len) // page) - first)
    assert most_owned_pages(Reach(window), query_len, page) == needed


@pytest.mark.parametrize(("chunk", "query_len", "page"), [(12, 1, 4), (12, 7, 4), (4, 1, 4), (4, 6, 4), (6, 5, 4)])
def test_most_pages_in_chunks_is_what_the_worst_position_needs(chunk: int, query_len: int, page: int) -> None:
    ends = {n: -(-(n + query_len) // page) for n in range(4 * chunk * page)}
    needed = max(end - n // chunk * chunk // page for n, end in ends.items())
    assert most_owned_pages(Reach(chunk, chunk), query_len, page) == needed


def filled() -> WindowedTables:
    tables = WindowedTables(NUM_PAGES, ROWS, MOST, PAGE, Reach(WINDOW))
    tables.resize([0, 1], [30, 9])
    tables.free_behind(np.array([0, 1]), np.array([30, 9]))
    assert tables.table[0].astype(bool).tolist() == [False] * 5 + [True] * 3 + [False] * 7
    return tables


def test_the_checker_finds_pages_that_are_owned_twice_or_lost() -> None:
    tables = filled()
    tables.table[1, 0] = tables.table[0, 6]
    with pytest.raises(InvariantError, match="owned twice"):
        tables.validate()
    tables = filled()
    tables.allocator.allocate(1)
    with pytest.raises(InvariantError, match="1 pages are lost"):
        tables.validate()


def test_the_checker_finds_a_freed_page_that_its_row_still_lists() -> None:
    tables = filled()
    tables.table[0, 2] = 7
    with pytest.raises(InvariantError, match="its row does not own"):
        tables.validate()
    tables = filled()
    tables.table[0, 6] = NULL_PAGE
    with pytest.raises(InvariantError, match="the null page has an owner"):
        tables.validate()


def test_the_examples_in_the_docstrings() -> None:
    outcomes = [doctest.testmod(m) for m in (attention.cache.windowed, attention.spec, attention.groups)]
    assert [outcome.failed for outcome in outcomes] == [0, 0, 0] and min(o.attempted for o in outcomes) >= 2


@pytest.mark.parametrize("tokens", [0, 8, 20, 24])
def test_a_row_that_shrinks_behind_its_window_frees_each_page_once(tokens: int) -> None:
    """Eight pages, the first five of them freed before: those are the null page, which nobody owns."""
    tables = filled()
    own = tables.pages_of(0)[5:]
    tables.resize([0], [tokens])
    kept = max(tokens // PAGE - 5, 0)
    assert NULL_PAGE not in free_pages(tables.allocator)
    assert set(own[kept:]) <= set(free_pages(tables.allocator)) and tables.num_used == kept + 3
    tables.validate()
    tables.release(0)
    tables.resize([0], [30])
    assert tables.table[0, :8].all(), "the next request of the row begins at its first page"


def test_a_row_that_left_gives_the_next_one_its_first_page() -> None:
    tables = filled()
    pages = tables.detach(0)
    assert len(pages) == 3 and tables.pages_of(0) == []
    tables.resize([0], [9])
    assert tables.table[0, :3].all()
    tables.validate()


def test_what_will_be_freed_is_freed() -> None:
    """Row 0 owns its pages from the sixth on: a query at 33 sees 24 … 33."""
    tables = filled()
    tables.extend([0], [40])
    for computed in (30, 32, 33, 37):
        first, pages = tables.to_be_freed(0, computed)
        before = tables.allocator.num_free
        tables.free_behind(np.array([0]), np.array([computed]))
        assert len(pages) == tables.allocator.num_free - before and set(pages) <= set(free_pages(tables.allocator))
        assert first + len(pages) == np.flatnonzero(tables.table[0])[0] == max((computed - WINDOW + 1) // PAGE, 5)


def test_pages_before_a_chunk_are_freed_when_the_next_query_begins_it() -> None:
    """Three pages each: at 23 the second chunk still lacks a token, at 24 and at 35 the third is the next query's."""
    for computed, first in ((0, 0), (11, 0), (12, 3), (23, 3), (24, 6), (35, 6), (36, 9)):
        tables = WindowedTables(NUM_PAGES, ROWS, MOST, PAGE, Reach(CHUNK, CHUNK))
        tables.resize([0], [40])
        tables.free_behind(np.array([0]), np.array([computed]))
        assert np.flatnonzero(tables.table[0]).tolist() == list(range(first, 10)), computed
        assert tables.first_needed(computed) == first and tables.num_used == 10 - first


def test_pages_of_one_row_are_freed_whatever_others_need() -> None:
    tables = filled()
    tables.extend([0, 1], [40, 12])
    tables.free_behind(np.array([1, 0]), np.array([0, 40]))
    assert (np.flatnonzero(tables.table[0])[0], np.flatnonzero(tables.table[1])[0]) == (7, 0)
