"""Pages that belong to a request and to no row: of one that moves in from another engine, or out to one."""

from __future__ import annotations

from collections.abc import Sequence

from attention.cache.pages import BlockTables
from attention.cache.windowed import WindowedTables
from attention.errors import OutOfPagesError
from specdec.requests.moved import Pages


def pages_needed(pools: Sequence[BlockTables], computed: int, without_head: bool) -> list[int]:
    """Pages that a request with `computed` keys and values has in each pool: none before a window.

    without_head: whether the last pool is the head's, and the request has no pages there because it does not draft.
    """
    counts = []
    for pool in pools:
        first = pool.first_needed(computed) if isinstance(pool, WindowedTables) else 0
        counts.append(pool.pages_for(computed) - first)
    return [*counts[:-1], 0] if without_head else counts


def put_aside(pools: Sequence[BlockTables], counts: Sequence[int]) -> Pages:
    """Take so many pages of each pool. Raises OutOfPagesError: fewer are free; nothing was taken."""
    for pool, count in zip(pools, counts, strict=True):
        if count > pool.allocator.num_free:
            raise OutOfPagesError(f"{count} pages wanted, {pool.allocator.num_free} are free")
    return tuple(tuple(pool.put_aside(count)) for pool, count in zip(pools, counts, strict=True))


def release_aside(pools: Sequence[BlockTables], pages: Pages) -> None:
    """Return pages that were aside."""
    for pool, own in zip(pools, pages, strict=True):
        pool.release_aside(own)


def keep_aside(pools: Sequence[BlockTables], pages: Pages) -> None:
    """In pools that replace others: these pages stay aside."""
    for pool, own in zip(pools, pages, strict=True):
        pool.keep_aside(own)
