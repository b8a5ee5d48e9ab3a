"""Page ownership: a free list, and block tables: which row owns which page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from attention.batch.host import offsets_within
from attention.checking import CHECKS, require
from attention.errors import InvalidInputError, OutOfPagesError

NULL_PAGE = 0
"""Page 0 has no owner: padding rows write and read there. So kernels need no test for -1."""


class PageAllocator:
    """Pages 1 … num_pages-1 on a free list; page 0 is the null page."""

    def __init__(self, num_pages: int) -> None:
        """Raises InvalidInputError if num_pages leaves no page besides the null page."""
        if num_pages < 2:
            raise InvalidInputError(f"num_pages={num_pages}: at least 2 are needed (page 0 is the null page)")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))

    @property
    def num_free(self) -> int:
        """Pages on the free list."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages. Raises OutOfPagesError: fewer are free; nothing was taken."""
        if count > len(self._free):
            raise OutOfPagesError(f"{count} pages wanted, {len(self._free)} of {self.num_pages - 1} are free")
        cut = len(self._free) - count
        taken = self._free[cut:][::-1]
        del self._free[cut:]
        return taken

    def release(self, pages: list[int]) -> None:
        """Return pages to the free list."""
        self._free.extend(reversed(pages))  # `allocate` takes from the end, and so hands them out in this order

    def claim(self, pages: Sequence[int]) -> None:
        """Take these free pages, in an allocator that replaces another in which they had an owner."""
        for page in pages:
            self._free.remove(page)

    def free_pages(self) -> list[int]:
        """A copy of the free list (for the ownership checker)."""
        return list(self._free)

    def check_holders(self, held: Counter[int]) -> None:
        """Check that every page has one owner, the free list or rows. held: for every page, its number of uses in rows.

        Raises:
            InvariantError: a page is owned twice, or lost.
        """
        seen = held + Counter(self._free)
        require(NULL_PAGE not in seen, "the null page has an owner")
        require(set(seen.values()) <= {1}, f"pages owned twice: {[p for p, n in seen.items() if n > 1][:8]}")
        require(len(seen) == self.num_pages - 1, f"{self.num_pages - 1 - len(seen)} pages are lost")


class BlockTables:
    """Rows of page ids, one row a running request, over one allocator.

    `table` is [max_rows, P] int32; entries past a row's own pages are 0. Pages may also be *detached*: owned by no row,
    by a request that comes with keys and values, or leaves with them.
    """

    def __init__(
        self,
        num_pages: int,
        max_rows: int,
        max_tokens_per_row: int,
        page_size: int,
        allocator: PageAllocator | None = None,
    ) -> None:
        """allocator: an allocator of `num_pages` pages; by default one in which every page has one owner."""
        self.page_size = page_size
        self.allocator = allocator or PageAllocator(num_pages)
        self.table = np.zeros((max_rows, -(-max_tokens_per_row // page_size)), np.int32)
        self._counts = np.zeros(max_rows, np.int64)
        self._detached: Counter[int] = Counter()

    @property
    def num_used(self) -> int:
        """Pages that rows hold; one that several rows share counts once."""
        return self.allocator.num_pages - 1 - self.allocator.num_free

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit when one request has every page."""
        return (self.allocator.num_pages - 1) * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def width_for(self, num_tokens: int) -> int:
        """Columns for rows of at most `num_tokens` >= 1 tokens: a power of two, or all, which makes few widths."""
        return min(1 << ((num_tokens - 1) // self.page_size).bit_length(), self.table.shape[1])

    def release(self, row: int) -> None:
        """Return all pages of a row."""
        self.resize([row], [0])

    def pages_of(self, row: int) -> list[int]:
        """A row's pages, in the order of its tokens."""
        pages: list[int] = self.table[row, : self._counts[row]].tolist()
        return pages

    def begin(self, row: int, pages: Sequence[int]) -> None:
        """Let a row without pages begin with these, which its allocator counts as held by it already."""
        require(not self._counts[row], "a row that has pages was given others to begin with")
        self.table[row, : len(pages)] = pages
        self._counts[row] = len(pages)

    def allocate_detached(self, count: int) -> list[int]:
        """Take `count` pages that belong to no row. Raises OutOfPagesError: fewer are free; nothing was taken."""
        pages = self.allocator.allocate(count)
        self._detached.update(pages)
        return pages

    def detach(self, row: int) -> list[int]:
        """A row gives up its pages, in the order of its tokens, and they stay owned: detached."""
        pages = [page for page in self.pages_of(row) if page != NULL_PAGE]
        self._detached.update(pages)
        self.table[row, : self._counts[row]] = NULL_PAGE
        self._counts[row] = 0
        return pages

    def attach(self, row: int, pages: Sequence[int], num_tokens: int) -> None:
        """Give a row without pages the detached pages of its `num_tokens` tokens."""
        require(self.pages_for(num_tokens) == len(pages), "a row was given pages of other tokens")
        self._detached -= Counter(pages)
        self.begin(row, pages)

    def release_detached(self, pages: Sequence[int]) -> None:
        """Return detached pages."""
        self._detached -= Counter(pages)
        self.allocator.release(list(pages))

    def keep_detached(self, pages: Sequence[int]) -> None:
        """Take over detached pages from tables that these replace."""
        self.allocator.claim(pages)
        self._detached.update(pages)

    def resize(self, rows: Sequence[int] | np.ndarray, num_tokens: Sequence[int] | np.ndarray) -> None:
        """Give each row exactly the pages that num_tokens[i] tokens need; the rest is returned.

        All or nothing: pages that lie beyond count as free for the other rows of the same call.

        Raises:
            OutOfPagesError: too few pages; nothing was changed.
            InvalidInputError: a row would be longer than the block table is wide; nothing was changed.
        """
        self._set(np.asarray(rows, np.int64), self._pages_of(num_tokens))

    def extend(self, rows: Sequence[int] | np.ndarray, num_tokens: Sequence[int] | np.ndarray) -> None:
        """As `resize`, but a row keeps surplus pages."""
        owners = np.asarray(rows, np.int64)
        self._set(owners, np.maximum(self._pages_of(num_tokens), self._counts[owners]))

    def validate(self) -> None:
        """Every page has the holders that its allocator knows of, and page 0 has none.

        Raises:
            InvariantError: a page is owned twice or lost, or an entry past its row's pages is not 0.
        """
        held = Counter(page for row in np.flatnonzero(self._counts).tolist() for page in self._held_by(row))
        self.allocator.check_holders(held + self._detached if self._detached else held)
        others = np.count_nonzero(self.table) - held.total()
        require(not others, "an entry that its row does not own, past a row's pages or freed, is not the null page")

    def _held_by(self, row: int) -> list[int]:
        """The pages that a row holds."""
        return self.pages_of(row)

    def _pages_of(self, num_tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        return (np.asarray(num_tokens, np.int64) + (self.page_size - 1)) // self.page_size

    def _set(self, rows: np.ndarray, wanted: np.ndarray) -> None:
        """Set the page count of row rows[i] to wanted[i]."""
        more = wanted - self._counts[rows]
        if more.any():  # in most rounds no row enters a new page
            self._check_fits(wanted, int(more.sum()))
            fewer, greater = more < 0, more > 0
            # First, so that pages given back serve the rows that grow: `_check_fits` counted them as free.
            for row, count in zip(rows[fewer].tolist(), wanted[fewer].tolist(), strict=True):
                self._shrink(row, count)
            self._grow(rows[greater], more[greater])
        if CHECKS.on:
            self.validate()

    def _check_fits(self, wanted: np.ndarray, growth: int) -> None:
        width, free = self.table.shape[1], self.allocator.num_free
        if wanted.max() > width:
            raise InvalidInputError(
                f"a row of {wanted.max()} pages was asked for; the block table is {width} pages wide"
            )
        if growth > free:
            raise OutOfPagesError(f"{growth - free} pages are missing for {len(wanted)} rows; {free} are free")

    def _shrink(self, row: int, count: int) -> None:
        have = self._counts[row]
        self.allocator.release(self.table[row, count:have].tolist())
        self.table[row, count:have] = NULL_PAGE  # a stale id would be another row's page by the next round
        self._counts[row] = count

    def _grow(self, rows: np.ndarray, more: np.ndarray) -> None:
        """more: [len(rows)] pages that each row gets after its own."""
        columns = np.repeat(self._counts[rows], more) + offsets_within(more)
        self.table[np.repeat(rows, more), columns] = self.allocator.allocate(len(columns))
        self._counts[rows] += more
