"""Detached pages: owned by no row, because a request moves. No page is ever free and owned, or lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.cache.pages import BlockTables, PageAllocator
from attention.cache.windowed import WindowedTables
from attention.errors import InvariantError, OutOfPagesError
from attention.spec import Reach

PAGES, ROWS, LONGEST, SIZE = 12, 3, 24, 4
REACHES = {"windowed": Reach(9), "chunked": Reach(8, 8)}


def tables(kind: str) -> Any:
    if kind in REACHES:
        return WindowedTables(PAGES, ROWS, LONGEST, SIZE, REACHES[kind])
    allocator = PageAllocator(PAGES, lambda page: None) if kind == "shared" else None
    return BlockTables(PAGES, ROWS, LONGEST, SIZE, allocator)


@pytest.mark.parametrize("kind", ["plain", "shared", *REACHES])
@settings(deadline=None, max_examples=examples(60))
@given(data=st.data())
@pytest.mark.cases(1)
def test_any_sequence_keeps_every_page_owned_once(kind: str, data: st.DataObject) -> None:
    """Rows grow, leave and come; tables are made anew with what is detached."""
    pool, lens = tables(kind), {}
    detached: list[tuple[list[int], int]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        step = data.draw(st.sampled_from(["grow", "leave", "come", "enter", "drop", "anew"]))
        row = data.draw(st.integers(0, ROWS - 1))
        tokens = data.draw(st.integers(1, LONGEST))
        first = pool.first_needed(tokens) if kind in REACHES else 0
        try:
            if step == "grow":
                pool.resize([row], [tokens])
                lens[row] = tokens
            elif step == "leave" and row in lens:
                own = lens.pop(row)
                if kind in REACHES:
                    pool.free_behind(np.array([row]), np.array([own]))
                detached.append((pool.detach(row), own))
                assert not pool.table[row].any()
            elif step == "come":
                detached.append((pool.allocate_detached(pool.pages_for(tokens) - first), tokens))
            elif step == "enter" and detached and row not in lens:
                pages, lens[row] = detached.pop()
                pool.attach(row, pages, lens[row])
                assert [p for p in pool.pages_of(row) if p] == pages
                assert len(pool.pages_of(row)) == pool.pages_for(lens[row])
            elif step == "drop" and detached:
                pool.release_detached(detached.pop()[0])
            elif step == "anew":
                pool, lens = tables(kind), {}
                for pages, _ in detached:
                    pool.keep_detached(pages)
        except OutOfPagesError:
            pass
        pool.validate()
        owned = sum(len(pages) for pages, _ in detached)
        rows = sum(np.count_nonzero(pool.table[row]) for row in range(ROWS))
        assert pool.num_used == owned + rows and pool.allocator.num_free == PAGES - 1 - owned - rows


def test_a_page_that_a_row_shares_stays_shared() -> None:
    allocator = PageAllocator(PAGES, lambda page: None)
    pool = BlockTables(PAGES, ROWS, LONGEST, SIZE, allocator)
    pool.resize([0], [8])
    pages = pool.pages_of(0)
    allocator.hold(pages)
    pool.begin(1, pages)
    left = pool.detach(0)
    pool.validate()
    again = BlockTables(PAGES, ROWS, LONGEST, SIZE, PageAllocator(PAGES, lambda page: None))
    again.keep_detached(left)
    again.keep_detached(left)
    again.release_detached(left)
    again.validate()
    assert again.num_used == 2
    pool.release_detached(left)
    pool.validate()
    assert pool.num_used == 2 and pool.pages_of(1) == pages


@pytest.mark.parametrize("kind", ["plain", "shared", "windowed"])
def test_a_page_that_is_lost_or_free_besides_is_seen(kind: str) -> None:
    """Planted defects."""
    lost, twice = tables(kind), tables(kind)
    lost.allocator.allocate(1)
    with pytest.raises(InvariantError, match="lost"):
        lost.validate()
    twice.allocator.release(twice.allocate_detached(1))
    with pytest.raises(InvariantError):
        twice.validate()
    other = tables(kind)
    with pytest.raises(InvariantError):
        other.attach(0, other.allocate_detached(3), 4)
