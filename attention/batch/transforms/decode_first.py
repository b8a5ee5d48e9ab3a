"""Decode first: rows with few queries before the others, by the fewest swaps of two rows.

Decoding and verification wait for memory, prompt chunks for arithmetic: kernels of different tile sizes serve them,
each a contiguous part of the batch. With n short rows, every long row among the first n changes places with a short row
after them. Both are equally many, and fewer swaps do not suffice, because each brings at most one short row to the
front. The swaps share no row, so the same swaps are their own inverse.

Rows of 5, 1, 7 and 1 tokens:

>>> swaps = decode_first_swaps(np.array([5, 1, 7, 1]), longest_decode=1)
>>> swaps.tolist()
[[0, 3]]
>>> starts, lens = np.array([0, 5, 6, 13, 14], np.int32), np.array([5, 1, 7, 1], np.int32)
>>> table, places = np.array([[1], [2], [3], [4]], np.int32), np.array([0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5, 6, 0])
>>> slots = np.repeat([8, 16, 24, 32], lens) + places
>>> batch = HostBatch(starts, lens, np.zeros(4, np.int32), table, slots, places, page_size=8)
>>> ordered = swapped(batch, swaps)
>>> ordered.query_lens.tolist(), ordered.block_table[:, 0].tolist()
([1, 1, 7, 5], [4, 2, 3, 1])
>>> token_order(batch, swaps).tolist()
[13, 5, 6, 7, 8, 9, 10, 11, 12, 0, 1, 2, 3, 4]
>>> swapped(ordered, swaps).query_lens.tolist()
[5, 1, 7, 1]

Source: vllm-project/vllm, vllm/v1/attention/backends/utils.py, reorder_batch_to_split_decodes_and_prefills.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from attention.batch.host import HostBatch, offsets_within, starts_of
from attention.checking import whole_number
from attention.errors import InvalidInputError


def decode_first_swaps(query_lens: ndarray, longest_decode: int) -> ndarray:
    """The fewest swaps that bring the short rows before the long ones.

    Args:
        query_lens: [B] query tokens of each row.
        longest_decode: most query tokens of a row that counts as short: 1 for decoding, K+1 with verifications.

    Returns [n, 2] int64 pairs (long row, short row after it); no row occurs twice.

    Raises:
        InvalidInputError: longest_decode is no whole number from 1 on.
    """
    is_short = np.asarray(query_lens) <= whole_number("longest_decode", longest_decode)
    front = int(is_short.sum())
    return np.stack([np.flatnonzero(~is_short[:front]), front + np.flatnonzero(is_short[front:])], axis=1)


def swapped(batch: HostBatch, swaps: ndarray) -> HostBatch:
    """The batch with the rows of each pair exchanged, their tokens with them; once more with the same swaps undoes it.

    swaps: [n, 2] pairs of rows, none of which occurs twice, e.g. of `decode_first_swaps`. Without pairs the batch
    itself is returned. The caller must reorder queries by `token_order`.

    Raises:
        InvalidInputError: a row occurs twice or does not exist, or the rows have extras.
    """
    batch.refuse_extras("reordered")
    order = _row_order(batch, swaps)
    if not len(swaps):
        return batch
    tokens = token_order(batch, swaps)
    return HostBatch(
        query_start_loc=starts_of(batch.query_lens[order]).astype(np.int32),
        seq_lens=batch.seq_lens[order],
        num_computed_tokens=batch.num_computed_tokens[order],
        block_table=batch.block_table[order],
        slot_mapping=batch.slot_mapping[tokens],
        positions=batch.positions[tokens],
        page_size=batch.page_size,
        other_groups=tuple(swapped(group, swaps) for group in batch.other_groups),
    )


def token_order(batch: HostBatch, swaps: ndarray) -> ndarray:
    """[T] int64, the token of `batch` at each place of `swapped(batch, swaps)`.

    For queries in the batch's order, the swapped batch takes `queries[token_order(batch, swaps)]`. Its output is in the
    batch's order again as `out[token_order(swapped(batch, swaps), swaps)]`.

    Raises:
        InvalidInputError: as `swapped`.
    """
    order = _row_order(batch, swaps)
    lens = batch.query_lens[order]
    return np.repeat(batch.query_start_loc[:-1][order], lens) + offsets_within(lens)


def _row_order(batch: HostBatch, swaps: ndarray) -> ndarray:
    """[B] int64, the row of `batch` at each place after the swaps."""
    pairs = np.asarray(swaps)
    rows = pairs.reshape(-1)
    some = len(rows) > 0
    wrong = some and (pairs.ndim != 2 or pairs.shape[1] != 2 or not np.issubdtype(pairs.dtype, np.integer))
    if wrong or len(np.unique(rows)) < len(rows) or (some and not 0 <= rows.min() <= rows.max() < batch.num_reqs):
        raise InvalidInputError(
            f"swaps {pairs.tolist()} of a batch of {batch.num_reqs} rows: allowed are pairs of rows from 0 to "
            f"{batch.num_reqs - 1}, none of which occurs twice"
        )
    order = np.arange(batch.num_reqs)
    if some:
        order[rows] = pairs[:, ::-1].reshape(-1)
    return order
