"""Microbatch slices: a batch cut into smaller batches whose concatenated results equal the whole batch's.

A cut between two rows leaves both as they are. A cut inside a row makes two rows of it over the same pages: for the
second the first one's tokens are keys that were computed before. Pages, slots and rotary positions do not change.

- Slices at request boundaries share no row: they may run in any order, or at the same time.
- Slices at token boundaries are for causal layers: where queries see those after them, a row must stay whole. They run
  in order within every layer, because a row's second part attends to what its first part wrote. Chunked prefill runs in
  this order, as do two halves of which the second is a layer behind.

Two rows of 2 and 5 tokens that come after 6 and 0 keys, cut after the fourth token:

>>> starts, computed = np.array([0, 2, 7], np.int32), np.array([6, 0], np.int32)
>>> table = np.array([[7, 9], [3, 4]], np.int32)
>>> positions, slots = np.array([6, 7, 0, 1, 2, 3, 4]), np.array([38, 39, 12, 13, 14, 15, 16])
>>> batch = HostBatch(starts, np.array([8, 5], np.int32), computed, table, slots, positions, page_size=4)
>>> for part in token_slices(batch, [4]):
...     print(part.query_start_loc, part.num_computed_tokens, part.seq_lens, part.slot_mapping)
[0 2 4] [6 0] [8 2] [38 39 12 13]
[0 3] [2] [5] [14 15 16]
>>> [part.block_table.tolist() for part in request_slices(batch, [1])]
[[[7, 9]], [[3, 4]]]

Source: vllm-project/vllm, vllm/v1/attention/backends/utils.py, split_attn_metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from attention.batch.host import HostBatch, HostBatches
from attention.checking import whole_numbers
from attention.errors import InvalidInputError


def request_slices(batch: HostBatch, cuts: Sequence[int]) -> HostBatches:
    """Cut a batch between rows; the slices share no row, and their arrays are views where nothing changes.

    cuts: the first row of every slice but the first one, increasing, 1 … B-1. None gives the batch in one slice.

    Raises:
        InvalidInputError: a cut outside 1 … B-1, not after the one before it, or no whole number.
    """
    bounds = _bounds(cuts, batch.num_reqs, "rows")
    starts = batch.query_start_loc
    return tuple(_part(batch, first, stop, int(starts[first]), int(starts[stop])) for first, stop in pairwise(bounds))


def token_slices(batch: HostBatch, cuts: Sequence[int]) -> HostBatches:
    """Cut a batch between tokens; a row that a cut falls into is in both slices, each with its own tokens.

    The slices are to be run in order within every layer; their arrays are views where nothing changes. A row without
    queries is in one of them. cuts: the first token of every slice but the first one, increasing, 1 … T-1. None gives
    the batch in one slice.

    Raises:
        InvalidInputError: a cut outside 1 … T-1, not after the one before it, or no whole number.
    """
    bounds = np.array(_bounds(cuts, batch.num_tokens, "tokens"))
    starts = batch.query_start_loc[:-1]
    ends = batch.query_start_loc[1:]
    first = np.searchsorted(ends, bounds, side="right")  # the row of token bounds[i]
    stop = np.maximum(first, np.searchsorted(starts, bounds))  # that row, or the one after it where it began before
    first[0] = 0
    rows = zip(first[:-1].tolist(), stop[1:].tolist(), strict=True)
    return tuple(_part(batch, *r, *t) for r, t in zip(rows, pairwise(bounds.tolist()), strict=True))


def _bounds(cuts: Sequence[int], size: int, of: str) -> list[int]:
    """0, the cuts and `size`."""
    allowed = f"increasing whole numbers from 1 to {size - 1}, the first of each slice but the first one"
    bounds = [0, *whole_numbers(f"a batch of {size} {of} has no slices at cuts", cuts, allowed), size]
    if len(bounds) > 2 and any(a >= b for a, b in pairwise(bounds)):
        raise InvalidInputError(f"a batch of {size} {of} has no slices at cuts {bounds[1:-1]}: allowed are {allowed}")
    return bounds


def _part(batch: HostBatch, first: int, stop: int, start: int, end: int) -> HostBatch:
    """Rows first … stop-1, restricted to tokens start … end-1.

    Raises:
        InvalidInputError: the rows have extras: a cut inside a row would store recurrent states in its midst.
    """
    batch.refuse_extras("sliced")
    rows = slice(first, stop)
    tokens = slice(start, end)
    starts = batch.query_start_loc[first : stop + 1]
    kept = np.clip(starts, start, end)
    computed = batch.num_computed_tokens[rows] + (kept - starts)[:-1]
    return HostBatch(
        query_start_loc=kept - np.int32(start),
        seq_lens=computed + np.diff(kept),
        num_computed_tokens=computed,
        block_table=batch.block_table[rows],
        slot_mapping=batch.slot_mapping[tokens],
        positions=batch.positions[tokens],
        page_size=batch.page_size,
        other_groups=tuple(_part(group, first, stop, start, end) for group in batch.other_groups),
    )
