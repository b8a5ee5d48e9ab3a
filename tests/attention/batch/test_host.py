"""HostBatch: slots, pages and the FlashInfer names follow from lengths and block tables, and lies are caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import check_mode
from hypothesis import given
from hypothesis import strategies as st

from attention.backends.reference import TorchBackend
from attention.batch.host import HostBatch, flat_pages, offsets_within, rows_batch, slots_of
from attention.batch.metadata import single_batch_arena, stage
from attention.cache.kv_cache import CacheGroup
from attention.errors import InvalidInputError, InvariantError
from attention.runner import GroupRunner
from attention.spec import AttentionSpec

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
    "keys before the first": lambda b: replace(
        b, num_computed_tokens=changed(b.num_computed_tokens, 0, -1), seq_lens=changed(b.seq_lens, 0, 3)
    ),
    "a row without a table": lambda b: replace(b, block_table=b.block_table[:-1]),
    "missing slot": lambda b: replace(b, slot_mapping=b.slot_mapping[:-1]),
}


@pytest.mark.parametrize("lie", LIES)
def test_the_validator_catches(lie: str) -> None:
    batch().validate()
    with pytest.raises(InvariantError):
        LIES[lie](batch()).validate()


def test_keys_before_the_first_are_caught_whatever_their_slots() -> None:
    """Slots of negative positions are those of the row's last pages, counted from the end."""
    lens, table = np.array([0, 2], np.int32), np.array([[7, 9]], np.int32)
    slots, computed = np.array([9 * 4 + 3, 7 * 4]), np.array([-1], np.int32)
    lie = HostBatch(lens, np.array([1], np.int32), computed, table, slots, np.array([0, 1]), 4)
    with pytest.raises(InvariantError, match="num_computed_tokens must not be negative"):
        lie.validate()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_positions": None}, r"first_positions \[\], block_table \[3, 4\]: allowed are"),
        (
            {"first_positions": np.array([16, 29])},
            r"query_start_loc \[4\], first_positions \[2\], block_table \[3, 4\]",
        ),
        ({"block_table": TABLE[:2]}, r"block_table \[2, 4\]"),
        ({"block_table": TABLE[0]}, r"block_table \[4\]"),
        ({"block_table": TABLE[:, :2]}, "2 pages a row, of 16 tokens each, with a token at position 47"),
        ({"first_positions": np.array([16.0, 29.0, 44.0])}, "first_positions: allowed are whole numbers"),
        ({"first_positions": np.array([16, -1, 44])}, "positions from 0 on"),
        ({"query_start_loc": np.array([0, 4, 3, 12])}, "that do not fall"),
        ({"query_start_loc": np.zeros(0, int)}, r"query_start_loc \[0\]"),
        ({"page_size": 0}, "page_size=0"),
    ],
)
def test_rows_that_make_no_batch_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    given = {"query_start_loc": np.array([0, 4, 8, 12]), "first_positions": np.array([16, 29, 44])}
    with pytest.raises(InvalidInputError, match=message):
        rows_batch(**{**given, "block_table": TABLE, "page_size": 16, **change})


def test_a_batch_of_no_rows_is_one() -> None:
    empty = rows_batch(np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros((0, 3), np.int32), 16)
    empty.validate()
    assert empty.num_reqs == empty.num_tokens == 0


@pytest.mark.parametrize("page", [10, -1])
def test_a_page_beyond_the_pool_is_refused_by_builder_and_check_mode(page: int) -> None:
    """Nine pages and the null page; in check mode whatever the backend, by the reference always."""
    table = np.where(TABLE == 9, page, TABLE)
    lie = rows_batch(np.array([0, 4, 8, 12]), np.array([16, 29, 44]), table, 16)
    spec = AttentionSpec(2, 2, 8, 8, 1.0)
    group, cpu = CacheGroup("g", (spec,), num_pages=10, page_size=16), torch.device("cpu")

    class Lenient(TorchBackend):
        def builder(self, *args: Any) -> Any:
            class Builder:
                def build(self, metadata: Any) -> None:
                    return None

            return Builder()

    with check_mode(False):
        metadata = stage(lie, *single_batch_arena(3, 12, 4, cpu))
        with pytest.raises(InvariantError, match=f"page {page} in the block table: the pool has pages 0 … 9"):
            TorchBackend(cpu).builder(group, spec, torch.float32).build(metadata)
        runner = GroupRunner(Lenient(cpu), group, torch.float32, cpu)
        runner.plan(metadata)
    with check_mode(True), pytest.raises(InvariantError, match=f"page {page} in the block table"):
        runner.plan(metadata)


def test_offsets_count_from_zero_in_every_row() -> None:
    assert offsets_within(np.array([2, 0, 3, 1])).tolist() == [0, 1, 0, 1, 2, 0]
    assert offsets_within(np.array([], np.int64)).tolist() == []
