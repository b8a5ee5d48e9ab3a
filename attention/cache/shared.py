"""Pages that several rows may hold, and that keep their contents after the last row has released them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from attention.cache.pages import NULL_PAGE, PageAllocator
from attention.checking import require
from attention.errors import OutOfPagesError


class SharedPages(PageAllocator):
    """A `PageAllocator` with holders counted.

    A page is on the free list, or held by one row or more, or idle (registered but held by no row). Idle pages count as
    free; when the free list is too short they are evicted, least recently held first.
    """

    def __init__(self, num_pages: int, evict: Callable[[int], None]) -> None:
        """evict: drops all references to an idle page, then frees it by `withdraw`."""
        super().__init__(num_pages)
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
        while len(self._free) < count:
            self._evict(next(iter(self._idle)))
        taken = super().allocate(count)
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

    def claim(self, pages: Sequence[int]) -> None:
        """See `PageAllocator.claim`; pages that are held already get one holder more."""
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

    def idle_pages(self) -> list[int]:
        """A copy of the idle pages, the next one to be evicted first."""
        return list(self._idle)

    def registered_pages(self) -> set[int]:
        """A copy of the registered pages, held or idle."""
        return set(self._registered)

    def check_writable(self, pages: Sequence[int]) -> None:
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
            lost = sorted(counted.keys() - held.keys())
            require(not lost, f"{len(lost)} pages are lost: {lost[:8]} have holders and stand in no row")
            wrong = sorted(page for page, holders in held.items() if counted.get(page, 0) != holders)
            require(not wrong, f"pages owned twice: {wrong[:8]} stand in other rows than the counted ones")
        require(self._idle.keys() <= self._registered, "a page that is not registered is idle")
        owned = [*counted, *self._idle, *self._free]
        seen = set(owned)
        require(NULL_PAGE not in seen, "the null page has an owner")
        if len(seen) != len(owned):
            require(False, f"pages owned twice: {[p for p, n in Counter(owned).items() if n > 1][:8]}")
        require(len(seen) == self.num_pages - 1, f"{self.num_pages - 1 - len(seen)} pages are lost")
