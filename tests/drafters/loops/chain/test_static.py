"""The steps of a chain in a fixed shape, written in place: they equal the arrays of a ragged round."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.batch.host import HostBatch
from drafters.loops.base import DraftingRows, StaticShape
from drafters.loops.chain.arrays import StepArrays
from drafters.loops.chain.index import draft_steps
from drafters.loops.chain.staged import StepSection
from drafters.loops.chain.static import FixedSteps

CPU = torch.device("cpu")
ROWS, DRAFTS, LONGEST = 4, 3, 44
Rows = list[tuple[int, int]]
"""(committed length, drafts) of each row."""
rows_lists = st.lists(st.tuples(st.integers(0, 36), st.integers(0, DRAFTS)), min_size=1, max_size=ROWS)


def shape(page_size: int) -> StaticShape:
    return StaticShape(ROWS, DRAFTS + 1, page_size, ROWS * -(-LONGEST // page_size))


def drafting_rows(rows: Rows, page_size: int) -> DraftingRows:
    lens, drafts = (np.array([row[i] for row in rows], np.int64) for i in (0, 1))
    width = -(-LONGEST // page_size)
    pages = np.arange(1, 1 + len(rows) * width, dtype=np.int32).reshape(len(rows), width)
    return DraftingRows(lens, drafts, pages, page_size)


@given(st.lists(rows_lists, min_size=1, max_size=4), st.sampled_from([1, 3, 16]))
def test_they_equal_the_index_arithmetic_one_round_after_the_other(rounds: list[Rows], page_size: int) -> None:
    """Nothing of an earlier and larger round is left in a later one; added rows stand on the null page."""
    fixed = FixedSteps(shape(page_size), CPU)
    for rows in rounds:
        own = drafting_rows(rows, page_size)
        steps = draft_steps(own.committed_lens, own.num_drafts, own.block_table, page_size, DRAFTS - 1)
        batches, staged = fixed.send(own)
        views = fixed.views(batches, staged)
        assert len(batches) == len(views) == DRAFTS - 1
        for step, (batch, view) in enumerate(zip(batches, views, strict=True)):
            batch.validate()
            added = [0] * (ROWS - len(rows))
            assert batch.positions.tolist() == steps.positions[step].tolist() + added
            assert batch.seq_lens.tolist() == steps.seq_lens[step].tolist() + [1 for _ in added]
            assert batch.slot_mapping.tolist() == steps.slots[step].tolist() + added
            plain = HostBatch(*(getattr(batch, name) for name in HostBatch.__dataclass_fields__))
            for name in ("positions", "seq_lens", "slot_mapping", "page_indices", "page_indptr", "last_page_len"):
                assert getattr(view, name).tolist() == getattr(plain, name).tolist(), name


@given(rows_lists, st.sampled_from([1, 3, 16]))
def test_they_equal_what_a_ragged_round_sends(rows: Rows, page_size: int) -> None:
    own = drafting_rows(rows, page_size)
    ragged = StepSection.values(StepArrays(own))
    assert bool(ragged) == (own.num_steps > 0)
    _, staged = FixedSteps(shape(page_size), CPU).send(own)
    for name in ("step.positions", "step.seq_lens", "step.slot_mapping", "step.last_page_len") if ragged else ():
        assert staged[name][: own.num_steps, : len(rows)].tolist() == ragged[name].tolist(), name


def test_worked_example() -> None:
    """K=3, page size 16: the second row takes no step and stands on the null page."""
    pages = np.array([[7, 9], [3, 4]], np.int32)
    batches, staged = FixedSteps(shape(16), CPU).send(DraftingRows(np.array([18, 20]), np.array([3, 1]), pages, 16))
    assert staged["step.slot_mapping"].tolist() == [[146, 0, 0, 0], [147, 0, 0, 0]]
    assert [b.seq_lens.tolist() for b in batches] == [[19, 1, 1, 1], [20, 1, 1, 1]]
