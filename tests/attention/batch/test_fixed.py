"""Slots and page lists written in place equal those that are made anew."""

from __future__ import annotations

import doctest

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import attention.batch.host
from attention.batch.host import covering, flat_pages, slots_at, slots_of, write_pages


def test_the_examples_in_the_docstrings() -> None:
    outcome = doctest.testmod(attention.batch.host)
    assert outcome.failed == 0 and outcome.attempted == 14


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 17), st.data())
def test_slots_in_place_equal_slots_of(rows: int, pages: int, page_size: int, data: st.DataObject) -> None:
    """In the shapes of a fixed round: [rows, tokens] positions, divided once for every group of pages."""
    table = np.array(data.draw(st.permutations(range(rows * pages))), np.int32).reshape(rows, pages)
    drawn = st.lists(st.integers(0, pages * page_size - 1), min_size=3, max_size=3)
    positions = np.array([data.draw(drawn) for _ in range(rows)])
    out = np.full((rows, 3), -1, np.int64)
    slots_at(table, np.arange(rows)[:, None], *np.divmod(positions, page_size), page_size, out=out)
    owner = np.repeat(np.arange(rows), 3)
    assert out.reshape(-1).tolist() == slots_of(table, owner, positions.reshape(-1), page_size).tolist()
    for (row, column), slot in np.ndenumerate(out):
        assert table[row, positions[row, column] // page_size] == slot // page_size
        assert positions[row, column] % page_size == slot % page_size


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(0, 3))
def test_page_lists_in_place_equal_flat_pages(counts: list[int], more: int) -> None:
    table = np.arange(1, 1 + 5 * len(counts), dtype=np.int32).reshape(len(counts), 5)
    out = np.full(sum(counts) + more, -1, np.int32)
    assert write_pages(out, table, np.array(counts)) == sum(counts)
    assert out.tolist() == flat_pages(table, np.array(counts)).tolist() + [-1] * more


def test_a_table_that_is_large_enough_is_not_copied() -> None:
    table = np.ones((2, 3), np.int32)
    assert covering(table, 2, 3) is table and covering(table, 2, 1) is table
    assert covering(table, 3, 3) is not table


def test_a_table_that_is_too_narrow_is_widened_by_the_null_page() -> None:
    table = np.array([[7, 9], [3, 4]], np.int32)
    assert covering(table, 2, 3).tolist() == [[7, 9, 0], [3, 4, 0]]
    assert covering(table, 3, 1).tolist() == [[7, 9], [3, 4], [0, 0]]
