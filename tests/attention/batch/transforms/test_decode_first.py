"""Short rows come first by the fewest swaps that there are, and the same swaps put the batch back."""

from __future__ import annotations

import doctest
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import combinations

import numpy as np
import pytest
import torch
from fakes import PagedLayer
from hypothesis import given, settings
from hypothesis import strategies as st

import attention.batch.transforms.decode_first
from attention.batch.host import HostBatch, rows_batch
from attention.batch.transforms.decode_first import decode_first_swaps, swapped, token_order
from attention.batch.transforms.windowed import windowed_batch
from attention.errors import InvalidInputError
from attention.spec import Reach

ROWS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=7)


def test_the_examples_in_the_docstrings() -> None:
    outcome = doctest.testmod(attention.batch.transforms.decode_first)
    assert (outcome.failed, outcome.attempted) == (0, 10)


def fewest_swaps(is_short: tuple[bool, ...]) -> int:
    """By trying: all orders that one swap more reaches, until one has no long row before a short one."""
    seen = {is_short}
    swaps = 0
    while not any(sorted(order, reverse=True) == list(order) for order in seen):
        seen |= {after for order in seen for after in one_swap(order)}
        swaps += 1
    return swaps


def one_swap(order: tuple[bool, ...]) -> Iterator[tuple[bool, ...]]:
    for i, j in combinations(range(len(order)), 2):
        after = list(order)
        after[i], after[j] = after[j], after[i]
        yield tuple(after)


@given(st.lists(st.integers(0, 6), max_size=7), st.integers(1, 6))
def test_the_swaps_are_the_fewest_that_there_are(lens: list[int], longest: int) -> None:
    is_short = [n <= longest for n in lens]
    front = sum(is_short)
    swaps = decode_first_swaps(np.array(lens, np.int32), longest)
    decodes_behind, prefills_in_front = sum(is_short[front:]), front - sum(is_short[:front])
    assert len(swaps) == min(decodes_behind, prefills_in_front) == fewest_swaps(tuple(is_short))
    order = list(is_short)
    for i, j in swaps.tolist():
        order[i], order[j] = order[j], order[i]
    assert order == sorted(is_short, reverse=True)


def arrays(batch: HostBatch) -> dict[str, tuple[np.dtype, list[int]]]:
    values = {field.name: getattr(batch, field.name) for field in fields(HostBatch)}
    return {name: (x.dtype, x.tolist()) for name, x in values.items() if isinstance(x, np.ndarray)}


@settings(deadline=None)
@given(ROWS, st.integers(1, 6), st.integers(0, 9))
@pytest.mark.thorough
def test_reordered_and_back_is_the_batch_and_its_attention(
    rows: list[tuple[int, int]], longest: int, seed: int
) -> None:
    computed, lens = [n for n, _ in rows], [n for _, n in rows]
    lens = lens if any(lens) else [*lens[:-1], 1]
    layer = PagedLayer(computed, lens, 4, seed)
    swaps = decode_first_swaps(layer.batch.query_lens, longest)
    ordered = swapped(layer.batch, swaps)
    ordered.validate()
    front = sum(n <= longest for n in lens)
    assert (ordered.query_lens[:front] <= longest).all() and (ordered.query_lens[front:] > longest).all()
    there, back = token_order(layer.batch, swaps), token_order(ordered, swaps)
    assert there[back].tolist() == back[there].tolist() == list(range(sum(lens)))
    again = rows_batch(ordered.query_start_loc, ordered.num_computed_tokens, ordered.block_table, 4)
    assert arrays(ordered) == arrays(again)
    assert arrays(swapped(ordered, swaps)) == arrays(layer.batch)
    whole = PagedLayer(computed, lens, 4, seed).attend(layer.batch)
    assert torch.allclose(layer.attend(ordered, there)[back], whole, rtol=0, atol=1e-6)


def test_a_batch_in_order_is_not_copied() -> None:
    batch = PagedLayer([3, 2, 0], [1, 1, 5], 4).batch
    assert swapped(batch, decode_first_swaps(batch.query_lens, 1)) is batch


@pytest.mark.parametrize("swaps", [[[0, 3]], [[-1, 1]], [[0, 1], [1, 2]], [[1, 1]]])
def test_swaps_that_are_none_are_refused(swaps: list[list[int]]) -> None:
    batch = PagedLayer([3, 2, 0], [5, 1, 1], 4).batch
    for function in (swapped, token_order):
        with pytest.raises(InvalidInputError, match="of a batch of 3 rows"):
            function(batch, np.array(swaps))


@pytest.mark.parametrize("longest", [0, -1])
def test_a_decode_of_no_tokens_is_refused(longest: int) -> None:
    with pytest.raises(InvalidInputError, match=f"longest_decode={longest}"):
        decode_first_swaps(np.array([1, 2]), longest)


def test_further_groups_change_places_with_their_rows() -> None:
    starts, first = np.array([0, 5, 6]), np.array([300, 40])
    own = rows_batch(starts, first, np.arange(1, 61, dtype=np.int32).reshape(2, 30), 16)
    group = windowed_batch(own, np.arange(100, 160, dtype=np.int32).reshape(2, 30), np.array([0, 1]), Reach(32))
    found = swapped(replace(own, other_groups=(group,)), np.array([[0, 1]])).other_groups[0]
    assert found.slot_mapping.tolist() == group.slot_mapping[[5, 0, 1, 2, 3, 4]].tolist()
    assert found.seq_lens.tolist() == group.seq_lens[::-1].tolist()
    assert found.block_table.tolist() == group.block_table[::-1].tolist()
