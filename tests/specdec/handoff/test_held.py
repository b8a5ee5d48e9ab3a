"""How many pages a request that moves has in each pool."""

from __future__ import annotations

from attention.cache.pages import BlockTables
from attention.cache.windowed import WindowedTables
from specdec.handoff.held import pages_needed

PAGES, ROWS, LONGEST, SIZE, WINDOW = 12, 3, 24, 4, 9


def test_none_behind_a_window_nor_of_a_head_without_drafts() -> None:
    plain, windowed = (PAGES, ROWS, LONGEST, SIZE), WindowedTables(PAGES, ROWS, LONGEST, SIZE, WINDOW)
    pools = [BlockTables(*plain), windowed, BlockTables(*plain)]
    assert pages_needed(pools, 18, without_head=False) == [5, 3, 5], (
        "a query at 18 sees 10 … 18, from the third page on"
    )
    assert pages_needed(pools, 18, without_head=True) == [5, 3, 0]
