"""The rows of a batch on the pages of a group of sliding-window layers, whose pages behind the window are freed.

A row's page list begins at the first page with a key that any of its queries sees, rounded down to where a tile of keys
begins. So a kernel with a window needs no change: it counts keys from the list's first one and queries from the last
key backwards. As in local attention, lengths count the keys that are listed, and positions stay what they are.

A row at position 300 (two tokens, window 32, pages of 16 tokens) lists its pages from token 256 on:

>>> from attention.batch.host import rows_batch
>>> starts, computed = np.array([0, 2]), np.array([300])
>>> batch = rows_batch(starts, computed, np.arange(1, 21, dtype=np.int32)[None], 16)
>>> windowed = windowed_batch(batch, np.arange(41, 61, dtype=np.int32)[None], 32)
>>> windowed.num_computed_tokens.tolist(), windowed.seq_lens.tolist(), windowed.page_indices.tolist()
([44], [46], [57, 58, 59])
>>> windowed.slot_mapping.tolist(), windowed.positions.tolist()
([956, 957], [300, 301])
"""

from __future__ import annotations

from math import lcm

import numpy as np

from attention.batch.host import HostBatch, page_counts_of, slots_of

TILE_KEYS = 128
"""Kernels walk over keys in tiles of at most so many. A list that begins where a tile of the whole row would gives the
kernels the same tiles, so that what is rounded, and with the batch-invariant kernel every bit, stays the same."""


def first_listed(start: np.ndarray, window: int, page_size: int) -> np.ndarray:
    """The first token on the page list of rows whose first query is at `start` (any shape).

    >>> first_listed(np.array([0, 31, 159, 300]), 32, 16).tolist()
    [0, 0, 128, 256]
    """
    step = lcm(TILE_KEYS, page_size)
    return np.maximum(start - (window - 1), 0) // step * step


def most_listed_pages(window: int, query_len: int, page_size: int) -> int:
    """Most pages on the list of a row with `query_len` query tokens.

    >>> most_listed_pages(32, 2, 16)
    11
    """
    return -(-(lcm(TILE_KEYS, page_size) - 1 + window - 1 + query_len) // page_size)


def pages_from(block_table: np.ndarray, first_pages: np.ndarray, width: int) -> np.ndarray:
    """block_table [B, P] -> [B, width]: every row from its page first_pages[i] on; past the table its last entry.

    >>> pages_from(np.array([[7, 9, 5], [3, 4, 0]]), np.array([1, 0]), 2).tolist()
    [[9, 5], [3, 4]]
    """
    columns = first_pages[:, None] + np.arange(width)
    np.minimum(columns, block_table.shape[1] - 1, out=columns)
    return np.take_along_axis(block_table, columns, 1)


def windowed_batch(batch: HostBatch, block_table: np.ndarray, window: int) -> HostBatch:
    """The rows of `batch` on a group's pages.

    Args:
        block_table: [B, P] the rows' pages in that group by logical page; the null page where they are freed.
        window: of the group's layers, see `AttentionSpec`.
    """
    size = batch.page_size
    first = first_listed(batch.num_computed_tokens, window, size)
    first_pages = first // size
    seq_lens = batch.seq_lens - first
    width = int(page_counts_of(seq_lens, size).max(initial=0))
    listed = pages_from(block_table, first_pages, width)
    owner = np.repeat(np.arange(batch.num_reqs), batch.query_lens)
    return HostBatch(
        query_start_loc=batch.query_start_loc,
        seq_lens=seq_lens.astype(np.int32),
        num_computed_tokens=(batch.num_computed_tokens - first).astype(np.int32),
        block_table=listed,
        slot_mapping=slots_of(block_table, owner, batch.positions, size),
        positions=batch.positions,
        page_size=size,
    )
