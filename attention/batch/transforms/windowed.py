"""The rows of a batch on the pages of a windowed group: layers with a sliding window or in chunks, which free earlier
pages than they see.

A row's page list begins at the first page with a key that any of its queries sees, rounded down to where a tile of keys
begins, and a chunk. So a kernel with a window needs no change: it counts keys from the list's first one and queries
from the last key backwards; and local attention cuts the list into the chunks of the whole row. As there, lengths count
the listed keys, and positions are unchanged.

A row at position 300 (two tokens, window 32, pages of 16 tokens) lists its pages from token 256 on:

>>> from attention.batch.host import rows_batch
>>> starts, computed = np.array([0, 2]), np.array([300])
>>> batch = rows_batch(starts, computed, np.arange(1, 21, dtype=np.int32)[None], 16)
>>> windowed = windowed_batch(batch, np.arange(41, 61, dtype=np.int32)[None], np.array([0]), Reach(32))
>>> windowed.num_computed_tokens.tolist(), windowed.seq_lens.tolist(), windowed.page_indices.tolist()
([44], [46], [57, 58, 59])
>>> windowed.slot_mapping.tolist(), windowed.positions.tolist()
([956, 957], [300, 301])
"""

from __future__ import annotations

from math import lcm
from typing import Any

import numpy as np
from numpy import ndarray

from attention.batch.host import HostBatch, page_layout, slots_of
from attention.errors import InvalidInputError
from attention.spec import Reach

TILE_KEYS = 128
"""Largest tile of keys of any kernel. A list that begins where a tile of the whole row would gives the kernels the same
tiles, so that roundings, and with the batch-invariant kernel every bit, stay the same."""


def first_listed(start: ndarray, reach: Reach, page_size: int) -> ndarray:
    """The first token on the page list of rows whose first query is at `start` (any shape).

    >>> first_listed(np.array([0, 31, 159, 300]), Reach(32), 16).tolist()
    [0, 0, 128, 256]
    """
    step = lcm(TILE_KEYS, page_size, reach.step)
    return np.maximum(reach.first_seen(start), 0) // step * step


def most_listed_pages(reach: Reach, query_len: int, page_size: int) -> int:
    """Most pages on the list of a row with `query_len` query tokens.

    >>> most_listed_pages(Reach(32), 2, 16), most_listed_pages(Reach(8192, 8192), 2, 16)
    (10, 513)
    """
    before = lcm(TILE_KEYS, page_size, reach.step) - reach.step
    return -(-(before + reach.tokens - 1 + query_len) // page_size)


class WindowedBatch(HostBatch):
    """Rows whose page lists begin on a later page than the first.

    The lists are cut out of the tables directly. Only the torch backend and the checks read `block_table`, so it is
    built from the lists on first access.
    """

    def __init__(self, **arrays: Any) -> None:
        """arrays: the fields of HostBatch but the block table, and `page_counts`, `page_indptr`, `page_indices`."""
        vars(self).update(arrays)

    def _table(self) -> ndarray:
        used = np.arange(int(self.page_counts.max(initial=0))) < self.page_counts[:, None]
        table = np.zeros(used.shape, np.int32)
        table[used] = self.page_indices
        return table

    block_table: Any = property(_table)


def listed_pages(table: ndarray, rows: ndarray, first_pages: ndarray, counts: ndarray) -> ndarray:
    """Concatenate counts[i] entries of row rows[i] of table [R, P] from column first_pages[i] on: [sum(counts)].

    >>> listed_pages(np.array([[7, 9, 5], [3, 4, 0]]), np.array([0, 1]), np.array([1, 0]), np.array([2, 1])).tolist()
    [9, 5, 3]
    """
    return pages_from(table, rows * table.shape[1] + first_pages, counts)


def pages_from(pages: ndarray, begins: ndarray, counts: ndarray) -> ndarray:
    """Concatenate counts[i] entries of `pages`, read flat, from begins[i] on: [sum(counts)]."""
    before = np.cumsum(counts)
    before -= counts
    places = np.repeat(begins - before, counts)
    places += np.arange(len(places))
    return pages.take(places)


def windowed_batch(batch: HostBatch, block_table: ndarray, rows: ndarray, reach: Reach) -> HostBatch:
    """The rows of `batch` on a group's pages, whose layers see this `reach`.

    Args:
        block_table: [R, P] pages in that group by logical page; the null page where they are freed.
        rows: [B] the batch's rows there.

    Raises:
        InvalidInputError: not one row of the table for each of the batch's, or no reach.
    """
    if len(rows) != batch.num_reqs or reach.tokens < 1:
        raise InvalidInputError(
            f"{batch.num_reqs} rows with {reach} in rows {rows.tolist()} of a table: allowed are one row of it "
            "for each row of the batch, and a reach of at least one token"
        )
    size = batch.page_size
    first = first_listed(batch.num_computed_tokens, reach, size)
    first_pages = first // size
    seq_lens = (batch.seq_lens - first).astype(np.int32)
    layout = page_layout(seq_lens, size)
    return WindowedBatch(
        query_start_loc=batch.query_start_loc,
        seq_lens=seq_lens,
        num_computed_tokens=(batch.num_computed_tokens - first).astype(np.int32),
        slot_mapping=slots_of(block_table, np.repeat(rows, batch.query_lens), batch.positions, size),
        positions=batch.positions,
        page_size=size,
        page_counts=layout.counts,
        page_indptr=layout.indptr,
        page_indices=listed_pages(block_table, rows, first_pages, layout.counts),
    )
