"""HostBatch: slots, pages and the FlashInfer names follow from lengths and block tables, and lies are caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention.batch.host import HostBatch, flat_pages, rows_batch, slots_of
from attention.errors import InvariantError

TABLE = np.array([[7, 9, 0, 0], [3, 4, 8, 0], [1, 2, 5, 6]], np.int32)


def batch() -> HostBatch:
    return rows_batch(np.array([0, 4, 8, 12]), np.array([16, 29, 44]), TABLE, 16)


def test_a_page_crossing_jumps_to_another_page() -> None:
    slots = slots_of(np.array([[5, 9, 2, 7]]), np.zeros(3, int), np.array([47, 48, 49]), 16)
    assert slots.tolist() == [47, 112, 113]


@pytest.mark.parametrize("longest", [1024, 1025, 4096])
def test_pages_of_a_long_row_beside_short_ones(longest: int) -> None:
    """Both ways in which rows are joined; a row may have no page at all."""
    counts = np.array([3, longest, 0, 17])
    table = np.random.default_rng(0).integers(1, 99, (4, longest + 2), np.int32)
    flat = flat_pages(table, counts)
    assert flat.dtype == np.int32
    assert flat.tolist() == [p for row, n in zip(table, counts, strict=True) for p in row[:n].tolist()]


def test_names_at_the_kernels_border() -> None:
    b = batch()
    assert b.seq_lens.tolist() == [20, 33, 48]
    assert b.page_counts.tolist() == [2, 3, 3]
    assert b.page_indptr.tolist() == [0, 2, 5, 8]
    assert b.page_indices.tolist() == [7, 9, 3, 4, 8, 1, 2, 5]
    assert b.last_page_len.tolist() == [4, 1, 16]


@given(data=st.data(), page_size=st.integers(1, 20), rows=st.integers(1, 5))
def test_flat_pages_and_slots_say_what_a_loop_says(data: st.DataObject, page_size: int, rows: int) -> None:
    counts = np.array(data.draw(st.lists(st.integers(0, 6), min_size=rows, max_size=rows)))
    table = np.arange(1, rows * 6 + 1).reshape(rows, 6)
    assert flat_pages(table, counts).tolist() == [p for row, n in zip(table, counts, strict=True) for p in row[:n]]
    positions = np.array(data.draw(st.lists(st.integers(0, 6 * page_size - 1), min_size=rows, max_size=rows)))
    expected = [int(table[i][p // page_size]) * page_size + p % page_size for i, p in enumerate(positions.tolist())]
    assert slots_of(table, np.arange(rows), positions, page_size).tolist() == expected


def changed(array: np.ndarray, index: int, value: int) -> np.ndarray:
    out = array.copy()
    out[index] = value
    return out


LIES: dict[str, Callable[[HostBatch], HostBatch]] = {
    "tokens not spanned": lambda b: replace(b, query_start_loc=changed(b.query_start_loc, 3, 11)),
    "negative query": lambda b: replace(b, query_start_loc=changed(b.query_start_loc, 1, 9)),
    "upper bound instead of a length": lambda b: replace(b, seq_lens=b.seq_lens + 1),
    "slot of another row": lambda b: replace(b, slot_mapping=changed(b.slot_mapping, 0, int(b.slot_mapping[5]))),
    "slot + 1 over a page": lambda b: replace(b, slot_mapping=changed(b.slot_mapping, 7, int(b.slot_mapping[6]) + 1)),
    "narrow block table": lambda b: replace(b, block_table=b.block_table[:, :2]),
    "missing slot": lambda b: replace(b, slot_mapping=b.slot_mapping[:-1]),
}


@pytest.mark.parametrize("lie", LIES)
def test_the_validator_catches(lie: str) -> None:
    batch().validate()
    with pytest.raises(InvariantError):
        LIES[lie](batch()).validate()
