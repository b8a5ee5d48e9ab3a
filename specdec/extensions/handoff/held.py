"""Pages of moving requests that no row owns: held for requests that left, or reserved for requests that arrive.

The pages of a request that left are freed once its next engine has read them or its lease has ended, and never while a
read within the lease may be running. An arriving request has pages before they are read, but no row yet. After a late
read its pages are in quarantine until the transport reports that nothing writes to them any more. After an interrupt or
a failed round all tables are made anew; these pages stay as they are (`HeldPages.keep`).
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from attention.cache.pages import BlockTables
from attention.cache.windowed import WindowedTables
from attention.errors import OutOfPagesError
from specdec.extensions.handoff.moved import MovedRequest, Pages

GRACE_SECONDS = 5.0
"""How much longer than the lease pages are held: the clocks of two hosts may differ by this."""

_PAUSE_SECONDS = 1e-3
"""Between two polls of the transport and the leases in rounds that have no other work."""
ROUNDS_IN_VAIN = 2
"""Rounds that may still write to freed pages: a row that has ended is still part of the launched round and of the draft
steps after it. Later rounds write after those; another engine or thread may write before them. So pages of a request
that comes are filled when these rounds are over."""
Settled = Callable[[], bool]
"""Whether a read has ended, so that nothing writes to its pages any more."""


def pages_needed(pools: Sequence[BlockTables], computed: int, without_head: bool) -> list[int]:
    """How many pages a request with `computed` keys and values has in each pool; none before a window or chunk.

    without_head: whether the last pool is the head's, and the request has no pages there because it does not draft.
    """
    counts = []
    for pool in pools:
        first = pool.first_needed(computed) if isinstance(pool, WindowedTables) else 0
        counts.append(pool.pages_for(computed) - first)
    return [*counts[:-1], 0] if without_head else counts


def take_pages(pools: Sequence[BlockTables], counts: Sequence[int]) -> Pages | OutOfPagesError:
    """Take these numbers of pages from the pools; or the error, not raised, where fewer are free."""
    for pool, count in zip(pools, counts, strict=True):
        if count > pool.allocator.num_free:
            return OutOfPagesError(f"{count} pages wanted, {pool.allocator.num_free} are free")
    return tuple(tuple(pool.allocate_detached(count)) for pool, count in zip(pools, counts, strict=True))


def release_pages(pools: Sequence[BlockTables], pages: Pages) -> None:
    """Free pages that no row owns."""
    for pool, own in zip(pools, pages, strict=True):
        pool.release_detached(own)


@dataclass(frozen=True)
class _Held:
    pages: Pages
    until: float


@dataclass
class _Reserved:
    """Pages of an arriving request. rounds: how many must end before they may be filled. settled: of a late read."""

    pages: Pages
    rounds: int
    settled: Settled | None = None


@dataclass(frozen=True)
class Due:
    """What can be freed now. Clocks and peers decide that, so rank 0 finds it for all ranks.

    leases: requests whose pages were read, or never will be. reads: numbers of reservations that late reads no longer
    write to.
    """

    leases: tuple[str, ...]
    reads: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.leases or self.reads)


class HeldPages:
    """Pages of one engine that belong to a request but to no row: it has left, or has not begun here yet.

    Attributes:
        pools: the engine's block tables. grace: see `GRACE_SECONDS`. reserved: pages of requests that come, by number.
        finished: returns leases that the transport reports as read.
        revoke, grant: notify the transport that a lease has ended, or that its pages may be read.
        confirm: called with everything that a round has granted, before any reader is notified; with several ranks they
            wait for each other there.
    """

    def __init__(self, pools: Sequence[BlockTables]) -> None:
        self.pools = pools
        self._held: dict[str, _Held] = {}
        self._over: list[str] = []
        self.reserved: dict[int, _Reserved] = {}
        self._next = 0
        self._num_leases = 0
        self.secret = secrets.token_bytes(32)
        self.grace = GRACE_SECONDS
        self.finished: Callable[[], Sequence[str]] = lambda: ()
        self.revoke: Callable[[str], None] = lambda lease: None
        self.grant: Callable[[str, Pages], None] = lambda lease, pages: None
        self.confirm: Callable[[Mapping[str, Pages]], None] = lambda granted: None

    @property
    def num_held(self) -> int:
        """Number of requests that left and whose pages are still held."""
        return len(self._held)

    @property
    def active(self) -> bool:
        """Whether anything is held, late or reserved for later."""
        return bool(self._held) or any(own.rounds or own.settled is not None for own in self.reserved.values())

    def pause(self, waiting: bool) -> None:
        """Sleep briefly if requests wait for pages that only a peer or the end of a lease frees."""
        if waiting and (self._held or self.reserved):
            time.sleep(_PAUSE_SECONDS)

    def hold(self, pages: Pages, lease_seconds: float) -> str:
        """Hold the pages of a request that leaves, and let them be read; returns its lease.

        A lease is 128 bits, derived from the engine's secret and a count, so that it cannot be guessed and all ranks
        make the same.
        """
        self._num_leases += 1
        lease = hashlib.sha256(self.secret + self._num_leases.to_bytes(8, "little")).hexdigest()[:32]
        self._held[lease] = _Held(pages, time.monotonic() + lease_seconds + self.grace)
        self.grant(lease, pages)
        return lease

    def end(self, lease: str) -> None:
        """Note that these pages will not be read, so that they are due next."""
        self._over.append(lease)

    def release(self, leases: Iterable[str]) -> None:
        """Free the pages of these leases. Unknown ones are over already."""
        for lease in leases:
            held = self._held.pop(lease, None)
            if held is not None:
                self.revoke(lease)
                release_pages(self.pools, held.pages)

    def due(self) -> Due:
        """Leases that were read, are overdue or ended here, and reservations that may leave quarantine."""
        leases = []
        if self._held:
            now = time.monotonic()
            over = [lease for lease, held in self._held.items() if held.until <= now]
            ended = self._over
            self._over = []
            leases = [lease for lease in dict.fromkeys((*ended, *self.finished(), *over)) if lease in self._held]
        late = [(number, own.settled) for number, own in self.reserved.items()]
        return Due(tuple(leases), tuple(number for number, settled in late if settled is not None and settled()))

    def settle(self, due: Due) -> None:
        """Free what is due."""
        self.release(due.leases)
        for number in due.reads:
            release_pages(self.pools, self.take(number))

    def begin_round(self) -> None:
        """Count a round, for `may_fill`, which is called between two rounds."""
        for own in self.reserved.values():
            own.rounds = max(own.rounds - 1, 0)

    def reserve(self, moved: MovedRequest, without_head: bool, rounds: int) -> int | OutOfPagesError:
        """Take pages for an arriving request; returns a number for them, or the error where too few are free now.

        rounds: how many must end before the pages are filled, see `may_fill`.
        """
        pages = take_pages(self.pools, pages_needed(self.pools, moved.computed, without_head))
        if isinstance(pages, OutOfPagesError):
            return pages
        self._next += 1
        self.reserved[self._next] = _Reserved(pages, rounds)
        return self._next

    def may_fill(self, number: int) -> bool:
        """Whether no launched round can write to reserved pages any more."""
        return not self.reserved[number].rounds

    def pages_of(self, number: int) -> Pages:
        """The reserved pages of a number."""
        return self.reserved[number].pages

    def take(self, number: int) -> Pages:
        """The reserved pages of a number, which are reserved no more."""
        return self.reserved.pop(number).pages

    def drop(self, number: int, settled: Settled) -> None:
        """Free reserved pages once `settled` returns True: nothing writes to them. Does nothing if they were taken."""
        own = self.reserved.get(number)
        if own is None or own.settled is not None:
            return
        if settled():
            release_pages(self.pools, self.take(number))
        else:
            own.settled = settled
            own.rounds = 0

    def watch(self, number: int, settled: Settled) -> None:
        """Replace the `settled` function of a late read. Does nothing if no such read is late."""
        own = self.reserved.get(number)
        if own is not None and own.settled is not None:
            own.settled = settled

    def keep(self, pools: Sequence[BlockTables]) -> None:
        """Own all held pages in new pools, which replace the former pools."""
        self.pools = pools
        for pages in (*(held.pages for held in self._held.values()), *(own.pages for own in self.reserved.values())):
            for pool, mine in zip(pools, pages, strict=True):
                pool.keep_detached(mine)
