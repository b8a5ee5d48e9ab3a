"""Virtual rows compute attention in chunks: the worked example, and any ragged batch against a dense chunked mask."""

from __future__ import annotations

import doctest
from dataclasses import fields

import numpy as np
import pytest
import torch
from fakes import PagedLayer
from hypothesis import example, given, settings
from hypothesis import strategies as st

import attention.batch.transforms.local_attention
from attention.batch.fixed import LiveBatch
from attention.batch.host import HostBatch, rows_batch
from attention.batch.transforms.local_attention import local_attention
from attention.batch.transforms.windowed import WindowedBatch
from attention.errors import InvalidInputError

TABLES = np.arange(30, dtype=np.int32).reshape(3, 10)
"""Pages 0-9, 10-19 and 20-29."""


def example_batch() -> HostBatch:
    """q = [4, 10, 5], k = [6, 17, 9] on pages of two tokens."""
    return rows_batch(np.array([0, 4, 14, 19]), np.array([2, 7, 4]), TABLES, 2)


def test_the_examples_in_the_docstrings() -> None:
    outcome = doctest.testmod(attention.batch.transforms.local_attention)
    assert (outcome.failed, outcome.attempted) == (0, 15)


def test_the_worked_example() -> None:
    batch = example_batch()
    virtual = local_attention(batch, 4)
    assert virtual.query_lens.tolist() == [2, 2, 1, 4, 4, 1, 4, 1]
    assert virtual.seq_lens.tolist() == [4, 2, 4, 4, 4, 1, 4, 1]
    local_tables = [[0, 1], [2, 0], [12, 13], [14, 15], [16, 17], [18, 0], [22, 23], [24, 0]]
    assert virtual.block_table.tolist() == local_tables
    assert virtual.query_start_loc.tolist() == [0, 2, 4, 5, 9, 13, 14, 18, 19]
    virtual.validate()


def test_tokens_keep_their_slots_and_positions() -> None:
    batch = example_batch()
    virtual = local_attention(batch, 4)
    assert virtual.slot_mapping is batch.slot_mapping and virtual.positions is batch.positions
    for field in fields(HostBatch):
        value = getattr(batch, field.name)
        if isinstance(value, np.ndarray):
            assert getattr(virtual, field.name).dtype == value.dtype, field.name


@st.composite
def ragged(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """[B] keys in the cache and [B] query tokens; some rows without queries, at least one with."""
    rows = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=5))
    lens = [n for _, n in rows]
    return [n for n, _ in rows], lens if any(lens) else [*lens[:-1], 1]


@settings(deadline=None)
@given(ragged(), st.sampled_from([1, 2, 3, 4]), st.integers(1, 5), st.integers(0, 9))
@example(([2, 7, 4], [4, 10, 5]), 2, 2, 0)
def test_any_batch_equals_a_dense_chunked_mask(
    rows: tuple[list[int], list[int]], page_size: int, pages: int, seed: int
) -> None:
    computed, lens = rows
    chunk = page_size * pages
    layer = PagedLayer(computed, lens, page_size, seed)
    batch = local_attention(layer.batch, chunk)
    batch.validate()
    assert int(batch.seq_lens.max()) <= chunk and int(batch.query_lens.min()) > 0
    expected = layer.dense(lambda query, key: (key <= query) & (key // chunk == query // chunk))
    assert torch.allclose(layer.attend(batch), expected, rtol=0, atol=1e-12)


@settings(deadline=None)
@given(ragged(), st.sampled_from([1, 2, 3, 4]), st.integers(1, 5))
def test_virtual_rows_say_what_a_loop_over_tokens_says(
    rows: tuple[list[int], list[int]], page_size: int, pages: int
) -> None:
    computed, lens = rows
    chunk = page_size * pages
    found: dict[tuple[int, int], int] = {}
    for row, (first, count) in enumerate(zip(computed, lens, strict=True)):
        for position in range(first, first + count):
            found[row, position // chunk * chunk] = position
    batch = PagedLayer(computed, lens, page_size).batch
    virtual = local_attention(batch, chunk)
    first = [batch.block_table[row, start // page_size] for row, start in found]
    assert virtual.page_indices[virtual.page_indptr[:-1]].tolist() == first
    assert virtual.seq_lens.tolist() == [last + 1 - start for (_, start), last in found.items()]


def test_a_chunk_longer_than_every_row_changes_nothing() -> None:
    batch = example_batch()
    whole = local_attention(batch, 8192)
    for name in ("query_start_loc", "seq_lens", "num_computed_tokens", "page_indices", "slot_mapping", "positions"):
        assert getattr(whole, name).tolist() == getattr(batch, name).tolist(), name


def test_past_the_end_of_a_table_there_is_the_null_page() -> None:
    """A row of 17 tokens on five pages of four: its second chunk of 16 has one page of its own."""
    batch = rows_batch(np.array([0, 2]), np.array([15]), np.array([[7, 3, 9, 1, 5]], np.int32), 4)
    virtual = local_attention(batch, 16)
    assert virtual.block_table.tolist() == [[7, 3, 9, 1], [5, 0, 0, 0]]
    assert (virtual.seq_lens.tolist(), virtual.query_lens.tolist()) == ([16, 1], [1, 1])
    virtual.validate()


def test_a_padding_row_stays_one_row_on_the_null_page() -> None:
    table = np.array([[7, 3], [0, 0]], np.int32)
    virtual = local_attention(rows_batch(np.array([0, 1, 2]), np.array([6, 0]), table, 4), 4)
    assert virtual.block_table.tolist() == [[3], [0]]
    assert (virtual.seq_lens.tolist(), virtual.slot_mapping.tolist()) == ([3, 1], [14, 0])


def test_a_live_batch_gives_rows_that_do_not_follow_its_buffers() -> None:
    batch = example_batch()
    arrays = {field.name: getattr(batch, field.name) for field in fields(HostBatch)}
    virtual = local_attention(LiveBatch(batch.page_indptr, **arrays), 4)
    assert type(virtual) is WindowedBatch
    before = virtual.seq_lens.tolist()
    batch.seq_lens[...] += 1
    assert virtual.seq_lens.tolist() == before


@pytest.mark.parametrize(("chunk", "page_size"), [(6, 4), (3, 4), (8192, 48)])
def test_chunks_that_do_not_begin_on_a_page_are_refused(chunk: int, page_size: int) -> None:
    batch = rows_batch(np.array([0, 4]), np.array([0]), np.array([[1]], np.int32), page_size)
    with pytest.raises(InvalidInputError, match=f"chunks of {chunk} tokens .* given pages of {page_size}"):
        local_attention(batch, chunk)
