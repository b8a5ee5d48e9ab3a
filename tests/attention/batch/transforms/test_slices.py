"""Slices are the whole: their metadata, put together again, and what they attend, for any batch and any cuts."""

from __future__ import annotations

import doctest
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from fakes import PagedLayer
from hypothesis import given, settings
from hypothesis import strategies as st

import attention.batch.transforms.slices
from attention.batch.host import HostBatch, rows_batch
from attention.batch.transforms.local_attention import local_attention
from attention.batch.transforms.slices import request_slices, token_slices
from attention.errors import InvalidInputError
from attention.recurrence.index import StateIndex

ARRAYS = tuple(field.name for field in fields(HostBatch) if field.name not in ("page_size", "other_groups", "extras"))
Slicer = Callable[[HostBatch, Sequence[int]], tuple[HostBatch, ...]]


def test_the_examples_in_the_docstrings() -> None:
    outcome = doctest.testmod(attention.batch.transforms.slices)
    assert (outcome.failed, outcome.attempted) == (0, 6)


@st.composite
def layers(draw: st.DrawFn) -> PagedLayer:
    """Up to five rows behind up to 12 keys; some rows without queries, at least one with."""
    rows = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 20)), min_size=1, max_size=5))
    lens = [n for _, n in rows]
    lens = lens if any(lens) else [*lens[:-1], 1]
    return PagedLayer([n for n, _ in rows], lens, draw(st.sampled_from([1, 3, 4])), draw(st.integers(0, 9)))


def cuts_of(data: st.DataObject, size: int) -> list[int]:
    return sorted(data.draw(st.sets(st.integers(1, size - 1), max_size=6))) if size > 1 else []


def twin(layer: PagedLayer) -> PagedLayer:
    """The same rows before anything of the batch is written."""
    lens = layer.batch.query_lens.tolist()
    return PagedLayer(layer.starts, lens, layer.batch.page_size, layer.seed)


def attended(layer: PagedLayer, parts: Sequence[HostBatch], order: Sequence[int]) -> torch.Tensor:
    """What the slices attend, run one after the other in `order`, put together in their own order."""
    ends = np.cumsum([part.num_tokens for part in parts]).tolist()
    outputs = {i: layer.attend(parts[i], slice(ends[i] - parts[i].num_tokens, ends[i])) for i in order}
    return torch.cat([outputs[i] for i in range(len(parts))])


def joined(parts: Sequence[HostBatch], continues: Sequence[bool]) -> dict[str, np.ndarray]:
    """Arrays of the slices, concatenated; continues[i]: the first row of slice i goes on where slice i-1 ends."""
    rows: list[dict[str, np.ndarray]] = []
    for part, goes_on in zip(parts, continues, strict=True):
        for row in range(part.num_reqs):
            tokens = slice(int(part.query_start_loc[row]), int(part.query_start_loc[row + 1]))
            arrays = {name: getattr(part, name)[tokens] for name in ("slot_mapping", "positions")}
            arrays |= {name: getattr(part, name)[[row]] for name in ("seq_lens", "num_computed_tokens", "block_table")}
            if row == 0 and goes_on:
                before = rows.pop()
                assert before["seq_lens"].tolist() == arrays["num_computed_tokens"].tolist()
                assert before["block_table"].tolist() == arrays["block_table"].tolist()
                arrays["num_computed_tokens"] = before["num_computed_tokens"]
                for name in ("slot_mapping", "positions"):
                    arrays[name] = np.concatenate([before[name], arrays[name]])
            rows.append(arrays)
    ends = np.cumsum([len(row["positions"]) for row in rows])
    starts = np.concatenate([[0], ends]).astype(parts[0].query_start_loc.dtype)
    return {"query_start_loc": starts} | {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def assert_equal(found: dict[str, np.ndarray], whole: HostBatch) -> None:
    assert found.keys() == set(ARRAYS)
    for name in ARRAYS:
        right = getattr(whole, name)
        assert (found[name].dtype, found[name].tolist()) == (right.dtype, right.tolist()), name


@pytest.mark.slow
@settings(deadline=None)
@given(layers(), st.data())
@pytest.mark.thorough
def test_request_slices_are_the_whole_in_any_order(layer: PagedLayer, data: st.DataObject) -> None:
    whole = layer.batch
    parts = request_slices(whole, cuts_of(data, whole.num_reqs))
    for part in parts:
        part.validate()
    assert_equal(joined(parts, [False] * len(parts)), whole)
    filled = [i for i, part in enumerate(parts) if part.num_tokens]
    parts = [parts[i] for i in filled]
    order = data.draw(st.permutations(range(len(parts))))
    assert torch.allclose(attended(twin(layer), parts, order), layer.attend(whole), rtol=0, atol=1e-6)


@pytest.mark.slow
@settings(deadline=None)
@given(layers(), st.data())
@pytest.mark.thorough
def test_token_slices_are_the_whole_in_their_order(layer: PagedLayer, data: st.DataObject) -> None:
    whole = layer.batch
    cuts = cuts_of(data, whole.num_tokens)
    parts = token_slices(whole, cuts)
    for part in parts:
        part.validate()
    assert [part.num_tokens for part in parts] == np.diff([0, *cuts, whole.num_tokens]).tolist()
    assert_equal(joined(parts, [False, *(cut not in whole.query_start_loc for cut in cuts)]), whole)
    assert torch.allclose(attended(twin(layer), parts, range(len(parts))), layer.attend(whole), rtol=0, atol=1e-6)


@pytest.mark.slow
@settings(deadline=None)
@given(layers(), st.data(), st.integers(1, 3))
@pytest.mark.thorough
def test_slices_of_attention_in_chunks(layer: PagedLayer, data: st.DataObject, pages: int) -> None:
    """Transforms compose: slices of the virtual rows, and the virtual rows of slices."""
    chunk, cuts = pages * layer.batch.page_size, cuts_of(data, layer.batch.num_tokens)
    whole = layer.attend(local_attention(layer.batch, chunk))
    sliced_after = token_slices(local_attention(layer.batch, chunk), cuts)
    sliced_before = [local_attention(part, chunk) for part in token_slices(layer.batch, cuts)]
    for parts in (sliced_after, sliced_before):
        assert torch.allclose(attended(twin(layer), parts, range(len(parts))), whole, rtol=0, atol=1e-6)


def batch() -> HostBatch:
    """Rows of 3, 0 and 2 tokens on pages of four."""
    return rows_batch(np.array([0, 3, 3, 5]), np.array([2, 4, 0]), np.array([[5, 2], [1, 0], [3, 0]], np.int32), 4)


def test_a_row_without_queries_is_in_one_slice() -> None:
    assert [part.num_reqs for part in token_slices(batch(), [3])] == [2, 1]
    assert [part.num_reqs for part in token_slices(batch(), [2, 4])] == [1, 3, 1]


def test_a_row_may_be_cut_more_than_once() -> None:
    parts = token_slices(batch(), [1, 2])
    assert [part.num_computed_tokens.tolist() for part in parts] == [[2], [3], [4, 4, 0]]
    assert [part.seq_lens.tolist() for part in parts] == [[3], [4], [5, 4, 2]]


@pytest.mark.parametrize("slicer", [request_slices, token_slices])
def test_without_cuts_there_is_one_slice(slicer: Slicer) -> None:
    (part,) = slicer(batch(), [])
    assert_equal({name: getattr(part, name) for name in ARRAYS}, batch())


@pytest.mark.parametrize(("slicer", "size", "of"), [(request_slices, 3, "rows"), (token_slices, 5, "tokens")])
@pytest.mark.parametrize("cuts", [[0], [-1], [5], [2, 2], [2, 1], [1, 6], [True], [np.True_]])
def test_cuts_that_are_none_are_refused(slicer: Slicer, size: int, of: str, cuts: list[int]) -> None:
    with pytest.raises(InvalidInputError, match=f"a batch of {size} {of} has no slices .* from 1 to {size - 1}"):
        slicer(batch(), cuts)


def test_rows_with_recurrent_states_are_not_sliced() -> None:
    one = np.ones(1, np.int32)
    plain = rows_batch(np.array([0, 4]), np.array([0]), np.array([[1]]), 4)
    batch = replace(plain, extras=(StateIndex(one, 0 * one, 0 * one, 4 * one),))
    with pytest.raises(InvalidInputError, match="recurrent states cannot be sliced"):
        token_slices(batch, [2])


def test_rows_without_queries_before_all_others_are_in_the_first_slice() -> None:
    table = np.array([[1], [2], [3]], np.int32)
    own = rows_batch(np.array([0, 0, 2, 4]), np.array([3, 0, 0]), table, 8)
    first, second = token_slices(own, [2])
    assert first.block_table[:, 0].tolist() == [1, 2] and second.block_table[:, 0].tolist() == [3]
    assert first.query_lens.tolist() == [0, 2] and first.seq_lens.tolist() == [3, 2]
