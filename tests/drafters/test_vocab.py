"""Vocabulary maps: a map is accepted exactly when it names ascending target ids."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.errors import InvalidInputError
from drafters.vocab import check_map, ids_of, mask_of, most_frequent, offsets_of, scatter

counts_and_size = st.lists(st.integers(0, 5), min_size=1, max_size=60).flatmap(
    lambda counts: st.tuples(st.just(counts), st.integers(1, len(counts)))
)


def test_worked_example() -> None:
    d2t = offsets_of(torch.tensor([1, 2, 5, 7]))
    assert d2t.tolist() == [1, 1, 3, 4]
    assert mask_of(d2t, 8).int().tolist() == [0, 1, 1, 0, 0, 1, 0, 1]
    check_map(d2t, 8, mask_of(d2t, 8))


@given(counts_and_size)
def test_most_frequent_is_a_valid_map_of_the_most_frequent(case: tuple[list[int], int]) -> None:
    counts, size = case
    d2t = most_frequent(torch.tensor(counts), size)
    check_map(d2t, len(counts), mask_of(d2t, len(counts)))
    best = sorted(range(len(counts)), key=lambda i: (-counts[i], i))[:size]
    assert ids_of(d2t).tolist() == sorted(best)


@given(counts_and_size)
def test_absolute_ids_are_refused(case: tuple[list[int], int]) -> None:
    counts, size = case
    ids = ids_of(most_frequent(torch.tensor(counts), size))
    if size == 1:
        return  # of a single token, offset and id are the same number
    with pytest.raises(InvalidInputError):
        check_map(ids, len(counts), mask_of(offsets_of(ids), len(counts)))


def test_absolute_ids_are_named_without_a_mask() -> None:
    ids = torch.arange(0, 200, 3)[:40]
    with pytest.raises(InvalidInputError, match="absolute"):
        check_map(ids, 500)
    check_map(offsets_of(torch.arange(40)), 500)


@pytest.mark.parametrize(
    ("d2t", "t2d", "message"),
    [
        (torch.tensor([3, 1, 1]), None, "strictly increasing"),
        (torch.tensor([2, 1, 1]), None, "strictly increasing"),
        (torch.tensor([0, 5, 6]), None, "absolute"),
        (torch.tensor([5, 6, 6]), None, "from 5 to 8"),
        (torch.tensor([-1, 0, 0]), None, "from -1"),
        (torch.tensor([0.0, 1.0]), None, "integers"),
        (torch.zeros(2, 2, dtype=torch.int64), None, "vector"),
        (torch.tensor([0, 0]), torch.ones(7, dtype=torch.bool), r"\[7\]"),
        (torch.tensor([0, 0]), torch.tensor([1, 0, 1, 0, 0, 0, 0, 0]).bool(), "same tokens"),
    ],
)
def test_broken_maps_are_refused(d2t: torch.Tensor, t2d: torch.Tensor | None, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        check_map(d2t, 8, t2d)


def test_sizes_outside_the_vocabulary_are_refused() -> None:
    for size in (0, 4):
        with pytest.raises(InvalidInputError, match="1 to 3"):
            most_frequent(torch.ones(3), size)


def test_scatter_keeps_the_mass_where_it_belongs() -> None:
    d2t = torch.tensor([1, 1, 3, 4])
    probabilities = torch.rand(2, 3, 4).softmax(-1)
    spread = scatter(probabilities, ids_of(d2t), 8)
    assert spread.shape == (2, 3, 8)
    assert torch.equal(spread[..., [1, 2, 5, 7]], probabilities)
    assert spread[..., [0, 3, 4, 6]].count_nonzero() == 0
