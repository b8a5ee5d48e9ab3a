"""Page ownership: which pages are free, held or kept for others, and block tables: which row owns which page."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from attention.batch.host import offsets_within
from attention.checking import CHECKS, require
from attention.errors import InvalidInputError, OutOfPagesError

PageIds = Sequence[int]
Counts = Sequence[int] | np.ndarray
NULL_PAGE = 0
"""Page 0 has no owner: padding rows write and read there. So kernels need no test for -1."""


class PageAllocator:
    """Pages 1 … num_pages-1 with their holders counted; page 0 is the null page.

    A page is on the free list, or held by one row or more, or idle (registered but held by no row): it keeps its
    contents, for others to find. Idle pages count as free; when the free list is too short they are evicted, least
    recently held first.
    """

    def __init__(self, num_pages: int, evict: Callable[[int], None] | None = None) -> None:
        """evict: drops all references to an idle page, then frees it by `withdraw`; None where none is registered.

        Raises:
            InvalidInputError: num_pages leaves no page besides the null page.
        """
        if num_pages < 2:
            raise InvalidInputError(f"num_pages={num_pages}: at least 2 are needed (page 0 is the null page)")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._holders = [0] * num_pages
        self._registered: set[int] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()  # its first one is found at once after any deletions
        self._evict = evict

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can give: free ones and idle ones."""
        return len(self._free) + len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, evicting idle ones where the free list is too short.

        Raises:
            OutOfPagesError: fewer are free or idle; nothing was taken.
        """
        if count > self.num_free:
            raise OutOfPagesError(f"{count} pages wanted, {self.num_free} of {self.num_pages - 1} are free")
        while len(self._free) < count and self._evict is not None:
            self._evict(next(iter(self._idle)))
        cut = len(self._free) - count
        taken = self._free[cut:][::-1]
        del self._free[cut:]
        for page in taken:
            self._holders[page] = 1
        return taken

    def release(self, pages: list[int]) -> None:
        """Release a row's pages, in the order of its tokens: of idle pages the last ones of a row are evicted first,
        because earlier pages are found without later ones, and not the other way round."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._registered:
                self._idle[page] = None
            else:
                self._free.append(page)

    def claim(self, pages: PageIds) -> None:
        """Take these pages, in an allocator that replaces another in which they had an owner: free ones, or such as are
        held already, which get one holder more."""
        for page in pages:
            if not self._holders[page]:
                self._free.remove(page)
            self._holders[page] += 1

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder for each of these pages, which are held or idle."""
        for page in pages:
            self._idle.pop(page, None)
            self._holders[page] += 1

    def register(self, page: int) -> None:
        """Keep a held page when its last holder releases it."""
        self._registered.add(page)

    def withdraw(self, page: int) -> None:
        """Keep it no longer; an idle page is free at once. Idempotent."""
        self._registered.discard(page)
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def touch(self, page: int) -> None:
        """An idle page counts as held until now."""
        if page in self._idle:
            self._idle.move_to_end(page)

    def is_idle(self, page: int) -> bool:
        """Whether the page is registered and held by no row."""
        return page in self._idle

    def num_idle(self, pages: Iterable[int]) -> int:
        """How many of these pages are idle."""
        return sum(page in self._idle for page in pages)

    def registered_pages(self) -> set[int]:
        """A copy of the registered pages, held or idle."""
        return set(self._registered)

    def check_writable(self, pages: PageIds) -> None:
        """Check that a row may write to these pages.

        Raises:
            InvariantError: a page is registered or has several holders: others may read it.
        """
        shared = [page for page in pages if page in self._registered or self._holders[page] != 1]
        require(not shared, f"a round would write to pages that others may read: {shared[:8]}")

    def check_holders(self, held: Counter[int]) -> None:
        """Every page is on the free list, idle, or held by as many rows as are counted.

        Raises:
            InvariantError: holders are not those that were counted, or a page has two owners or none.
        """
        require(NULL_PAGE not in held, "the null page has an owner")
        counted = {page: n for page, n in enumerate(self._holders) if n}
        if not dict.__eq__(counted, held):
            wrong = sorted(page for page, holders in held.items() if counted.get(page, 0) != holders)
            require(not wrong, f"pages owned twice: {wrong[:8]} stand in other rows than the counted ones")
            lost = sorted(counted.keys() - held.keys())
            require(not lost, f"{len(lost)} pages are lost: {lost[:8]} have holders and stand in no row")
        require(self._idle.keys() <= self._registered, "a page that is not registered is idle")
        owned = [*counted, *self._idle, *self._free]
        seen = set(owned)
        require(NULL_PAGE not in seen, "the null page has an owner")
        if len(seen) != len(owned):
            require(False, f"pages owned twice: {[p for p, n in Counter(owned).items() if n > 1][:8]}")
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
        return self.table[row, : self._counts[row]].tolist()

    def begin(self, row: int, pages: PageIds) -> None:
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

    def attach(self, row: int, pages: PageIds, num_tokens: int) -> None:
        """Give a row without pages the detached pages of its `num_tokens` tokens."""
        require(self.pages_for(num_tokens) == len(pages), "a row was given pages of other tokens")
        self._detached -= Counter(pages)
        self.begin(row, pages)

    def release_detached(self, pages: PageIds) -> None:
        """Return detached pages."""
        self._detached -= Counter(pages)
        self.allocator.release(list(pages))

    def keep_detached(self, pages: PageIds) -> None:
        """Take over detached pages from tables that these replace."""
        self.allocator.claim(pages)
        self._detached.update(pages)

    def resize(self, rows: Counts, num_tokens: Counts) -> None:
        """Give each row exactly the pages that num_tokens[i] tokens need; the rest is returned.

        All or nothing: pages that lie beyond count as free for the other rows of the same call.

        Raises:
            OutOfPagesError: too few pages; nothing was changed.
            InvalidInputError: a row would be longer than the block table is wide; nothing was changed.
        """
        self._set(np.asarray(rows, np.int64), self._pages_of(num_tokens))

    def extend(self, rows: Counts, num_tokens: Counts) -> None:
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

    def _pages_of(self, num_tokens: Counts) -> np.ndarray:
        return (np.asarray(num_tokens, np.int64) + (self.page_size - 1)) // self.page_size

    def _set(self, rows: np.ndarray, wanted: np.ndarray) -> None:
        """Set the page count of row rows[i] to wanted[i]."""
        more = wanted - self._counts[rows]
        if more.any():  # in most rounds no row enters a new page
            self._check_fits(wanted, int(more.sum()))
            fewer = more < 0
            greater = more > 0
            # First, so that pages given back serve the rows that grow: `_check_fits` counted them as free.
            for row, count in zip(rows[fewer].tolist(), wanted[fewer].tolist(), strict=True):
                self._shrink(row, count)
            rows, more = rows[greater], more[greater]
            columns = np.repeat(self._counts[rows], more) + offsets_within(more)
            self.table[np.repeat(rows, more), columns] = self.allocator.allocate(len(columns))
            self._counts[rows] += more
        if CHECKS.on:
            self.validate()

    def _check_fits(self, wanted: np.ndarray, growth: int) -> None:
        width = self.table.shape[1]
        free = self.allocator.num_free
        if wanted.max() > width:
            raise InvalidInputError(
                f"a row of {wanted.max()} pages was asked for; the block table is {width} pages wide"
            )
        if growth > free:
            raise OutOfPagesError(f"{growth - free} pages are missing for {len(wanted)} rows; {free} are free")

    def _shrink(self, row: int, count: int) -> None:
        given_back = self.table[row, count : self._counts[row]]
        self.allocator.release(given_back.tolist())
        given_back[:] = NULL_PAGE  # a stale id would be another row's page by the next round
        self._counts[row] = count
