"""Block tables of a windowed group, whose layers see a sliding window or a chunk: pages before that are given back."""

from __future__ import annotations

from collections import Counter
from math import gcd

import numpy as np

from attention.batch.host import offsets_within
from attention.cache.pages import NULL_PAGE, BlockTables, PageAllocator, PageIds
from attention.checking import CHECKS, require
from attention.spec import Reach


class WindowedTables(BlockTables):
    """Block tables whose rows own a contiguous range of their logical pages; earlier pages are freed.

    `table` keeps its index by logical page. A freed entry is the null page, so who owns which page can be read from
    the table alone. reach: how far back the group's layers see, see `AttentionSpec.reach`.
    """

    def __init__(
        self,
        num_pages: int,
        max_rows: int,
        max_tokens_per_row: int,
        page_size: int,
        reach: Reach,
        allocator: PageAllocator | None = None,
    ) -> None:
        super().__init__(num_pages, max_rows, max_tokens_per_row, page_size, allocator)
        self.reach = reach
        self._first = np.zeros(max_rows, np.int64)

    def first_needed(self, computed: int) -> int:
        """The first logical page that a query at position `computed` or later sees a key of."""
        return first_needed_page(self.reach, computed, self.page_size)

    def begin_behind(self, row: int, pages: PageIds, num_pages: int) -> None:
        """As `begin`, with the last ones of the row's first num_pages logical pages: all before them count as freed."""
        require(not self._counts[row] and len(pages) <= num_pages, "a row that has pages was given others, or too many")
        first = num_pages - len(pages)
        self.table[row, first:num_pages] = pages
        self._counts[row], self._first[row] = num_pages, first

    def to_be_freed(self, row: int, computed: int) -> tuple[int, list[int]]:
        """The pages of a row that `free_behind` will free, preceded by the logical index of the first."""
        first = int(self._first[row])
        pages: list[int] = self.table[row, first : max(self.first_needed(computed), first)].tolist()
        return first, pages

    def detach(self, row: int) -> list[int]:
        pages = super().detach(row)
        self._first[row] = 0
        return pages

    def attach(self, row: int, pages: PageIds, num_tokens: int) -> None:
        """See `BlockTables.attach`; the last pages of `num_tokens` tokens, all earlier pages freed."""
        self._detached -= Counter(pages)
        self.begin_behind(row, pages, self.pages_for(num_tokens))

    def most_pages(self, num_tokens: int, query_len: int) -> int:
        """Most pages that a row of at most `num_tokens` tokens owns while it reads at most `query_len` at a time."""
        return min(self.pages_for(num_tokens), most_owned_pages(self.reach, query_len, self.page_size))

    def free_behind(self, rows: np.ndarray, computed: np.ndarray) -> None:
        """Free the pages of rows [B] that no query at position computed[i] or later sees a key of.

        Args:
            computed: [B] committed tokens whose keys are in the cache. Tokens of a launched round must not count: its
                drafts may be rejected, and then the next query has an earlier position.
        """
        first = self.reach.first_seen(computed) // self.page_size
        more = first - self._first[rows]
        if (more <= 0).all():  # in most rounds, of most rows
            return
        np.maximum(more, 0, out=more)
        owners = np.repeat(rows, more)
        columns = np.repeat(self._first[rows], more) + offsets_within(more)
        self.allocator.release(self.table[owners, columns].tolist())
        self.table[owners, columns] = NULL_PAGE
        self._first[rows] += more
        if CHECKS.on:
            self.validate()

    def _held_by(self, row: int) -> list[int]:
        return self.pages_of(row)[self._first[row] :]

    def _shrink(self, row: int, count: int) -> None:
        first = int(self._first[row])
        super()._shrink(row, max(count, first))  # earlier pages are freed already
        self._counts[row], self._first[row] = count, min(first, count)


def first_needed_page(reach: Reach, computed: int, page_size: int) -> int:
    """The first logical page that a query at position `computed` or later sees a key of.

    >>> [first_needed_page(Reach(18), computed, 4) for computed in (0, 17, 20, 21, 24)]
    [0, 0, 0, 1, 1]
    """
    return max(reach.first_seen(computed) // page_size, 0)


def most_owned_pages(reach: Reach, query_len: int, page_size: int) -> int:
    """Most pages that hold the keys which `query_len` queries of a row see, including the queries' own.

    >>> [most_owned_pages(reach, 1, 16) for reach in (Reach(32), Reach(33), Reach(1), Reach(32, 32))]
    [3, 3, 1, 2]
    """
    before = page_size - gcd(reach.step, page_size)  # tokens of the first page that are not seen
    return -(-(before + reach.tokens - 1 + query_len) // page_size)
