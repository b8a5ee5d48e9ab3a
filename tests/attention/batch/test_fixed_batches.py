"""A LiveBatch follows its buffers: nothing that was derived from the last round is remembered."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from attention.batch.fixed import LiveBatch
from attention.batch.host import HostBatch, rows_batch

DERIVED = ("query_lens", "page_counts", "page_indices", "last_page_len", "page_indptr")
TABLE = np.array([[3, 5, 0], [2, 4, 6]], np.int32)


def batch(starts: list[int]) -> HostBatch:
    """Two rows of two tokens each, on pages of four tokens."""
    return rows_batch(np.array([0, 2, 4]), np.array(starts), TABLE, 4)


def live(over: HostBatch) -> LiveBatch:
    arrays = {field.name: getattr(over, field.name) for field in fields(HostBatch)}
    copies = {name: x.copy() if isinstance(x, np.ndarray) else x for name, x in arrays.items()}
    return LiveBatch(over.page_indptr.copy(), **copies)


def assert_same(one: HostBatch, other: HostBatch) -> None:
    for name in DERIVED:
        assert getattr(one, name).tolist() == getattr(other, name).tolist(), name


def test_what_is_derived_follows_the_buffers() -> None:
    first, second = batch([0, 5]), batch([4, 9])
    found = live(first)
    assert_same(found, first)
    for field in fields(HostBatch):
        buffer = getattr(found, field.name)
        if isinstance(buffer, np.ndarray):
            buffer[...] = getattr(second, field.name)
    found.page_indptr[...] = second.page_indptr
    assert_same(found, second)
    assert any(getattr(first, name).tolist() != getattr(second, name).tolist() for name in DERIVED)


def test_over_another_block_table_the_buffers_stay() -> None:
    found = live(batch([0, 5]))
    other = found.over(TABLE + 7)
    assert other.block_table.tolist() == (TABLE + 7).tolist()
    found.seq_lens[...] += 1
    assert other.seq_lens.tolist() == found.seq_lens.tolist()


def test_lengths_and_last_pages_follow_the_buffers_too() -> None:
    """Rows of other query lengths, that end elsewhere on their pages."""
    first = rows_batch(np.array([0, 2, 4]), np.array([0, 5]), TABLE, 4)
    second = rows_batch(np.array([0, 3, 4]), np.array([1, 6]), TABLE, 4)
    found = live(first)
    assert_same(found, first)
    for field in fields(HostBatch):
        buffer = getattr(found, field.name)
        if isinstance(buffer, np.ndarray):
            buffer[...] = getattr(second, field.name)
    found.page_indptr[...] = second.page_indptr
    assert_same(found, second)
    for name in ("query_lens", "last_page_len"):
        assert getattr(first, name).tolist() != getattr(second, name).tolist()
