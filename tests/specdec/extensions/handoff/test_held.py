"""How many pages a request that moves has in each pool."""

from __future__ import annotations

from attention.cache.pages import BlockTables
from attention.cache.windowed import WindowedTables
from attention.spec import Reach
from specdec.extensions.handoff.held import pages_needed

PAGES, ROWS, LONGEST, SIZE = 12, 3, 24, 4


def test_none_behind_a_window_nor_of_a_head_without_drafts() -> None:
    plain, windowed = (PAGES, ROWS, LONGEST, SIZE), WindowedTables(PAGES, ROWS, LONGEST, SIZE, Reach(9))
    pools = [BlockTables(*plain), windowed, BlockTables(*plain)]
    assert pages_needed(pools, 18, without_head=False) == [5, 3, 5], (
        "a query at 18 sees 10 … 18, from the third page on"
    )
    assert pages_needed(pools, 18, without_head=True) == [5, 3, 0]


def test_none_before_a_chunk() -> None:
    """In chunks of two pages: none where the next token begins a chunk."""
    pools = [BlockTables(PAGES, ROWS, LONGEST, SIZE), WindowedTables(PAGES, ROWS, LONGEST, SIZE, Reach(8, 8))]
    assert [pages_needed(pools, n, without_head=False)[1] for n in (7, 8, 9, 15, 16, 17)] == [2, 0, 1, 2, 0, 1]
