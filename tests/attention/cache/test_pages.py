"""Every page has one owner, whatever is asked for; a request that does not fit changes nothing."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from fakes import examples, free_pages
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from attention.cache.pages import NULL_PAGE, BlockTables, PageAllocator
from attention.errors import InvalidInputError, InvariantError, OutOfPagesError

ROWS, PAGE_SIZE, NUM_PAGES, MOST = 4, 4, 12, 26


def snapshot(tables: BlockTables) -> tuple[list[list[int]], list[int]]:
    return tables.table.tolist(), sorted(free_pages(tables.allocator))


class PagesMachine(RuleBasedStateMachine):
    """The model is one list of lengths; the table must follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = BlockTables(NUM_PAGES, ROWS, MOST, PAGE_SIZE)
        self.lengths = [0] * ROWS

    @rule(asked=st.dictionaries(st.integers(0, ROWS - 1), st.integers(0, MOST), min_size=1))
    def resize(self, asked: dict[int, int]) -> None:
        before, table = snapshot(self.tables), self.tables.table.copy()
        wanted = [asked.get(row, length) for row, length in enumerate(self.lengths)]
        needed = sum(-(-n // PAGE_SIZE) for n in wanted)
        if needed > NUM_PAGES - 1:
            with pytest.raises(OutOfPagesError):
                self.tables.resize(list(asked), list(asked.values()))
            assert snapshot(self.tables) == before
            return
        self.tables.resize(list(asked), list(asked.values()))
        for row, new in enumerate(wanted):
            kept = -(-min(new, self.lengths[row]) // PAGE_SIZE)
            assert self.tables.table[row, :kept].tolist() == table[row, :kept].tolist(), "kept pages never move"
        self.lengths = wanted

    @rule(asked=st.dictionaries(st.integers(0, ROWS - 1), st.integers(0, MOST), min_size=1))
    def extend(self, asked: dict[int, int]) -> None:
        """Rows only get longer."""
        before, table = snapshot(self.tables), self.tables.table.copy()
        wanted = [max(asked.get(row, 0), length) for row, length in enumerate(self.lengths)]
        if sum(-(-n // PAGE_SIZE) for n in wanted) > NUM_PAGES - 1:
            with pytest.raises(OutOfPagesError):
                self.tables.extend(list(asked), list(asked.values()))
            assert snapshot(self.tables) == before
            return
        self.tables.extend(list(asked), list(asked.values()))
        for row, length in enumerate(self.lengths):
            kept = -(-length // PAGE_SIZE)
            assert self.tables.table[row, :kept].tolist() == table[row, :kept].tolist(), "kept pages never move"
        self.lengths = wanted

    @rule(row=st.integers(0, ROWS - 1))
    def release(self, row: int) -> None:
        self.tables.release(row)
        self.lengths[row] = 0

    @precondition(lambda self: self.tables.allocator.num_free < NUM_PAGES - 1)
    @rule(row=st.integers(0, ROWS - 1))
    def too_long_for_the_table(self, row: int) -> None:
        before = snapshot(self.tables)
        with pytest.raises(InvalidInputError, match="pages wide"):
            self.tables.resize([row], [MOST + PAGE_SIZE])
        assert snapshot(self.tables) == before

    @invariant()
    def every_row_has_exactly_its_pages(self) -> None:
        self.tables.validate()
        used = [-(-n // PAGE_SIZE) for n in self.lengths]
        assert [(row != NULL_PAGE).sum() for row in self.tables.table] == used
        assert self.tables.allocator.num_free == NUM_PAGES - 1 - sum(used)


PagesMachine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=25, deadline=None)
TestPages = PagesMachine.TestCase


def test_out_of_pages_takes_nothing() -> None:
    allocator = PageAllocator(4)
    allocator.allocate(2)
    with pytest.raises(OutOfPagesError, match="2 pages wanted, 1 of 3 are free"):
        allocator.allocate(2)
    assert allocator.num_free == 1


def test_pages_given_back_by_one_row_serve_another_in_the_same_call() -> None:
    tables = BlockTables(4, 2, 12, 4)
    tables.resize([0], [12])
    tables.resize([0, 1], [4, 8])
    assert (tables.table != 0).sum(1).tolist() == [1, 2]


def test_a_pool_without_a_page_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="page 0 is the null page"):
        PageAllocator(1)


def filled() -> BlockTables:
    tables = BlockTables(NUM_PAGES, ROWS, MOST, PAGE_SIZE)
    tables.resize([0, 1], [9, 5])
    tables.validate()
    return tables


def test_the_checker_finds_a_page_with_two_owners() -> None:
    tables = filled()
    tables.table[1, 0] = tables.table[0, 0]
    with pytest.raises(InvariantError, match="owned twice"):
        tables.validate()


def test_the_checker_finds_an_owned_page_on_the_free_list() -> None:
    tables = filled()
    tables.allocator.release([int(tables.table[0, 1])])
    with pytest.raises(InvariantError, match="owned twice"):
        tables.validate()


def test_the_checker_finds_a_lost_page() -> None:
    tables = filled()
    tables.allocator.allocate(1)
    with pytest.raises(InvariantError, match="1 pages are lost"):
        tables.validate()


def test_the_checker_finds_an_owner_of_the_null_page() -> None:
    tables = filled()
    tables.table[0, 0] = NULL_PAGE
    with pytest.raises(InvariantError, match="null page has an owner"):
        tables.validate()


def test_the_checker_finds_a_stale_entry_behind_a_row() -> None:
    tables = filled()
    tables.table[1, 3] = 11
    with pytest.raises(InvariantError, match="past a row's pages"):
        tables.validate()


def test_a_defect_is_found_by_the_next_resize() -> None:
    """Under SPECDEC_CHECK=1 the checker runs by itself."""
    tables = filled()
    tables.allocator.allocate(1)
    with pytest.raises(InvariantError):
        tables.resize([2], [1])


def test_unused_entries_are_the_null_page() -> None:
    assert np.array_equal(filled().table[2:], np.zeros((2, 7)))


def test_what_is_used_is_what_rows_hold() -> None:
    tables = BlockTables(NUM_PAGES, ROWS, MOST, PAGE_SIZE)
    assert tables.num_used == 0
    tables.resize([0, 2], [9, 4])
    assert tables.num_used == 4 == NUM_PAGES - 1 - tables.allocator.num_free


def test_tables_are_as_wide_as_a_power_of_two_of_pages_and_never_wider_than_all() -> None:
    tables = BlockTables(NUM_PAGES, ROWS, MOST, PAGE_SIZE)  # 7 pages a row
    assert [tables.width_for(n) for n in (1, 4, 5, 8, 9, 16, 17, 26)] == [1, 1, 2, 2, 4, 4, 7, 7]
