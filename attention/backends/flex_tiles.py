"""Tiles of queries for FlexAttention, and the pages that each of them reads: numpy, from a host batch alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attention.batch.host import HostBatch, offsets_within

TILES = (16, 32, 64)
"""Packed queries of a tile. Each is a compiled form of its own."""
_WHOLE = 128
"""Packed queries of a plan are a multiple of it: torch compiles a form of its own for those that are not."""
_LEAST = 2
"""Pages of any plan: the compiler takes a size of one for a case of its own."""


def tile_size(packed: int) -> int:
    """The smallest tile that holds the longest row's packed queries, or the largest there is.

    >>> [tile_size(n) for n in (1, 17, 24, 4000)]
    [16, 32, 32, 64]
    """
    return next((tile for tile in TILES if packed <= tile), TILES[-1])


@dataclass(frozen=True)
class Tiles:
    """Queries of a batch in tiles of one row each; a packed query is a token and one of the G heads of a KV head.

    Attributes:
        row: [n] row of each tile.
        begin, end: [n] logical pages of which some query sees some key.
        whole_begin, whole_end: [n] logical pages of which every query sees every key, within those.
        token, head, position: [n·tile] of each packed query; padding is token 0, head 0, position -1.
        query_row: [n·tile] row of each packed query.
        place: [T·G] where the packed query of each token and head stands.
    """

    row: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    whole_begin: np.ndarray
    whole_end: np.ndarray
    token: np.ndarray
    head: np.ndarray
    position: np.ndarray
    query_row: np.ndarray
    place: np.ndarray

    @classmethod
    def of(cls, host: HostBatch, groups: int, tile: int, window: int | None) -> Tiles:
        """The tiles of a batch with `groups` query heads a KV head."""
        packed = host.query_lens * groups
        counts = -(-packed // tile)
        counts[-1] += -int(counts.sum()) % (_WHOLE // tile)
        row = np.repeat(np.arange(host.num_reqs), counts)
        first = offsets_within(counts) * tile  # packed query of the row
        within = first[:, None] + np.arange(tile)
        real = within < packed[row][:, None]
        start = host.num_computed_tokens[row]
        oldest = start + np.minimum(first, packed[row] - 1) // groups
        newest = start + (np.minimum(first + tile, packed[row]) - 1) // groups
        pages = _pages(oldest, newest, window, host.page_size)
        begin, end, whole_begin, whole_end = (np.where(first < packed[row], at, 0) for at in pages)
        token = host.query_start_loc[:-1][row][:, None] + within // groups
        position = start[:, None] + within // groups
        place = np.empty(host.num_tokens * groups, np.int64)
        at = np.flatnonzero(real)
        token, head = np.where(real, token, 0).reshape(-1), np.where(real, within % groups, 0).reshape(-1)
        place[token[at] * groups + head[at]] = at
        return cls(
            row,
            begin,
            end,
            whole_begin,
            whole_end,
            token,
            head,
            np.where(real, position, -1).reshape(-1),
            np.repeat(row, tile),
            place,
        )

    def arrays(self, host: HostBatch, num_pages: int) -> list[np.ndarray]:
        """What the device needs, all int32: counts [n] and pages [n, W] of partly and of wholly visible blocks; for the
        rows' pages their place in [rows, num_pages] and their logical page; row start and position, token and head of
        each packed query; place. W is one number: torch 2.11's kernel reads both lists of pages by one's strides."""
        before, whole = self.whole_begin - self.begin, self.whole_end - self.whole_begin
        partly = before + self.end - self.whole_end
        at = np.arange(max(_LEAST, int(partly.max(initial=0)), int(whole.max(initial=0))))
        logical = np.where(at < before[:, None], self.begin[:, None] + at, (self.whole_end - before)[:, None] + at)
        owners = np.repeat(np.arange(host.num_reqs), host.page_counts)
        found = [
            partly,
            self._physical(host, logical, at < partly[:, None]),
            whole,
            self._physical(host, self.whole_begin[:, None] + at, at < whole[:, None]),
            owners * num_pages + host.page_indices,
            offsets_within(host.page_counts),
            self.query_row * num_pages,
            self.position,
            self.token,
            self.head,
            self.place,
        ]
        return [array.astype(np.int32) for array in found]

    def _physical(self, host: HostBatch, logical: np.ndarray, used: np.ndarray) -> np.ndarray:
        return np.where(used, host.block_table[self.row[:, None], np.where(used, logical, 0)], 0)


def _pages(
    oldest: np.ndarray, newest: np.ndarray, window: int | None, page_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """begin, end, whole_begin, whole_end of `Tiles`, for tiles of queries from position oldest to newest.

    Queries at 20 … 22 on pages of 8: all see pages 0 and 1 whole, page 2 partly; with a window of 12 page 0 is out of
    sight, and of page 1 the query at 22 no longer sees key 10:

    >>> [int(x[0]) for x in _pages(np.array([20]), np.array([22]), None, 8)]
    [0, 3, 0, 2]
    >>> [int(x[0]) for x in _pages(np.array([20]), np.array([22]), 12, 8)]
    [1, 3, 2, 2]
    """
    begin = whole_begin = np.zeros_like(oldest)
    if window is not None:
        begin = np.maximum(oldest - window + 1, 0) // page_size
        whole_begin = -(-np.maximum(newest - window + 1, 0) // page_size)
    end = newest // page_size + 1
    whole_begin = np.minimum(whole_begin, end)
    return begin, end, whole_begin, np.maximum((oldest + 1) // page_size, whole_begin)
