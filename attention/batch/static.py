"""Page lists of batches of one fixed shape, written in place into the buffers that are sent."""

from __future__ import annotations

import numpy as np

from attention.batch.host import flat_pages


def covering(table: np.ndarray, rows: int, pages: int) -> np.ndarray:
    """A block table of `rows` rows and at least `pages` columns: this one, or with the null page around it.

    >>> covering(np.array([[7, 9]], np.int32), 2, 3).tolist()
    [[7, 9, 0], [0, 0, 0]]
    """
    if table.shape[0] == rows and table.shape[1] >= pages:
        return table
    larger = np.zeros((rows, max(pages, table.shape[1])), np.int32)
    larger[: len(table), : table.shape[1]] = table
    return larger


def write_pages(out: np.ndarray, table: np.ndarray, counts: np.ndarray) -> int:
    """Write `flat_pages(table, counts)` to the front of `out` [at least sum(counts)] int32; returns how many.

    >>> out = np.zeros(4, np.int32)
    >>> write_pages(out, np.array([[7, 9], [3, 4]], np.int32), np.array([1, 2])), out.tolist()
    (3, [7, 3, 4, 0])
    """
    if len(counts) == 1:
        used = int(counts[0])
        out[:used] = table[0, :used]
        return used
    flat = flat_pages(table, counts)
    out[: len(flat)] = flat
    return len(flat)
