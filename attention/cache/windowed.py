"""Block tables of a group of sliding-window layers: pages behind the window are given back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from attention.batch.host import offsets_within
from attention.cache.pages import NULL_PAGE, BlockTables
from attention.checking import checking, require


class WindowedTables(BlockTables):
    """Block tables whose rows own a contiguous range of their logical pages: what is before it is freed.

    `table` keeps its index by logical page. A freed entry is the null page, so who owns which page can be read from
    the table alone.

    Attributes:
        window: number of visible positions including its own, see `AttentionSpec`.
    """

    def __init__(self, num_pages: int, max_rows: int, max_tokens_per_row: int, page_size: int, window: int) -> None:
        super().__init__(num_pages, max_rows, max_tokens_per_row, page_size)
        self.window = window
        self._first = np.zeros(max_rows, np.int64)

    @property
    def num_used(self) -> int:
        """Pages that rows own, and those aside."""
        return int((self._counts - self._first).sum()) + self._aside.total()

    def first_needed(self, computed: int) -> int:
        """The first logical page that a query at position `computed` or later sees a key of."""
        return max((computed - (self.window - 1)) // self.page_size, 0)

    def detach(self, row: int) -> list[int]:
        """See `BlockTables.detach`."""
        pages = super().detach(row)
        self._first[row] = 0
        return pages

    def attach(self, row: int, pages: Sequence[int], num_tokens: int) -> None:
        """See `BlockTables.attach`: the last pages of so many tokens, all before them freed."""
        count = self.pages_for(num_tokens)
        first = count - len(pages)
        require(not self._counts[row] and first >= 0, "a row that has pages was given others, or too many")
        self._aside -= Counter(pages)
        self.table[row, first:count] = pages
        self._counts[row], self._first[row] = count, first

    def most_pages(self, num_tokens: int, query_len: int) -> int:
        """Most pages that a row of at most `num_tokens` tokens owns while it reads at most `query_len` at a time."""
        return min(self.pages_for(num_tokens), most_owned_pages(self.window, query_len, self.page_size))

    def free_behind(self, rows: np.ndarray, computed: np.ndarray) -> None:
        """Free the pages of rows [B] that no query at position computed[i] or later sees a key of.

        Args:
            computed: [B] committed tokens whose keys are in the cache. Never those of a launched round: its drafts may
                be rejected, and then the next query stands before them.
        """
        first = (computed - (self.window - 1)) // self.page_size
        more = first - self._first[rows]
        if (more <= 0).all():  # in most rounds, of most rows
            return
        np.maximum(more, 0, out=more)
        owners = np.repeat(rows, more)
        columns = np.repeat(self._first[rows], more) + offsets_within(more)
        self.allocator.release(self.table[owners, columns].tolist())
        self.table[owners, columns] = NULL_PAGE
        self._first[rows] += more
        if checking():
            self.validate()

    def validate(self) -> None:
        """As `BlockTables.validate`, of what rows own. Raises InvariantError."""
        ends = zip(self._first.tolist(), self._counts.tolist(), strict=True)
        own = [row[first:count] for row, (first, count) in zip(self.table, ends, strict=True)]
        aside = np.array(list(self._aside.elements()), np.int32)
        pages = np.concatenate([*own, aside, np.array(self.allocator.free_pages(), np.int32)])
        seen, counts = np.unique(pages, return_counts=True)
        most = self.allocator.num_pages - 1
        require(NULL_PAGE not in seen, "the null page has an owner")
        require(bool((counts == 1).all()), f"pages owned twice: {seen[counts > 1][:8].tolist()}")
        require(len(seen) == most, f"{most - len(seen)} pages are lost")
        require(
            np.count_nonzero(self.table) == self.num_used - len(aside),
            "an entry that its row does not own is not the null page",
        )

    def _shrink(self, row: int, count: int) -> None:
        kept = max(count, int(self._first[row]))
        self.allocator.release(self.table[row, kept : self._counts[row]].tolist())
        self.table[row, kept : self._counts[row]] = NULL_PAGE
        self._counts[row] = count
        self._first[row] = min(int(self._first[row]), count)


def most_owned_pages(window: int, query_len: int, page_size: int) -> int:
    """Most pages that hold the keys which `query_len` queries of a row see, those of their own tokens included.

    >>> most_owned_pages(32, 1, 16), most_owned_pages(33, 1, 16), most_owned_pages(1, 1, 16)
    (3, 3, 1)
    """
    return (window + query_len - 3) // page_size + 2 if window + query_len > 2 else 1
