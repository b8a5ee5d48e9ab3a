"""Batches in a fixed shape: what CUDA graphs read. (Rounds from them: test_graphs.py.)"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from attention.batch import slots_of
from specdec.padding import uniform_batch, uniform_steps
from specdec.round import StepArrays


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 4)), min_size=1, max_size=5),
    st.integers(0, 3),
    st.sampled_from([1, 3, 16]),
)
def test_real_tokens_keep_their_places_and_padding_stands_on_the_null_page(
    rows: list[tuple[int, int]], more: int, page_size: int
) -> None:
    start, lens = (np.array(column) for column in zip(*rows, strict=True))
    width = -(-44 // page_size)
    table = np.arange(1, len(rows) * width + 1, dtype=np.int32).reshape(len(rows), width)
    fixed = uniform_batch(start, lens, table, page_size, (len(rows) + more, 4))
    fixed.validate()
    slots = fixed.slot_mapping.reshape(-1, 4)
    positions = fixed.positions.reshape(-1, 4)
    for i, (first, n) in enumerate(rows):
        own = np.arange(first, first + n)
        assert positions[i, :n].tolist() == own.tolist()
        assert slots[i, :n].tolist() == slots_of(table, np.full(n, i), own, page_size).tolist()
        assert not slots[i, n:].any() and not positions[i, n:].any()
    assert not slots[len(rows) :].any() and not fixed.block_table[len(rows) :].any()


def test_worked_example() -> None:
    """A row at position 20 with 1 of 3 drafts: its two slots, then the null page; seq_len 24."""
    fixed = uniform_batch(np.array([20]), np.array([2]), np.array([[7, 9]], np.int32), 16, (1, 4))
    assert fixed.slot_mapping.tolist() == [148, 149, 0, 0]
    assert fixed.seq_lens.tolist() == [24] and fixed.page_counts.tolist() == [2]


def test_added_rows_of_draft_steps_stand_on_the_null_page() -> None:
    table = np.array([[7, 9], [3, 4]], np.int32)
    steps = StepArrays(np.array([18, 20]), np.array([3, 1]), 2, np.array([1, 0]), table, 16)
    padded = uniform_steps(steps, 4, 3)
    assert padded.sources.tolist() == [1, 0, 0, 0]
    assert padded.steps.slots.tolist() == [[146, 0, 0, 0], [147, 0, 0, 0], [0, 0, 0, 0]]
    assert padded.steps.seq_lens.tolist() == [[19, 1, 1, 1], [20, 1, 1, 1], [1, 1, 1, 1]]
    for batch in padded.batches:
        batch.validate()
