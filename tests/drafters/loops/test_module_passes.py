"""The steps of several modules in a fixed shape, written in place: they equal the arrays of a ragged round."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.batch.host import HostBatch
from drafters.loops.base import DraftingRows, FixedShape
from drafters.loops.module_arrays import module_step, step_width
from drafters.loops.module_passes import FixedModuleSteps

CPU = torch.device("cpu")
ROWS, LONGEST = 4, 46
Rows = list[tuple[int, int]]
"""(committed length, drafts) of each row."""


def fixed_steps(page_size: int, modules: int, drafts: int) -> FixedModuleSteps:
    entries = ROWS * -(-LONGEST // page_size)
    return FixedModuleSteps(FixedShape(ROWS, drafts + 1, page_size, entries), modules, CPU)


def drafting_rows(rows: Rows, page_size: int, drafts: int) -> DraftingRows:
    lens = np.array([n for n, _ in rows], np.int64)
    width = -(-LONGEST // page_size)
    pages = np.arange(1, 1 + len(rows) * width, dtype=np.int32).reshape(len(rows), width)
    return DraftingRows(lens, np.array([min(n, drafts) for _, n in rows], np.int64), pages, page_size)


rows_lists = st.lists(st.tuples(st.integers(0, 36), st.integers(0, 5)), min_size=1, max_size=ROWS)


@given(
    st.lists(rows_lists, min_size=1, max_size=4),
    st.sampled_from([1, 3, 16]),
    st.integers(1, 4),
    st.integers(1, 5),
)
def test_they_equal_the_index_arithmetic_one_round_after_the_other(
    rounds: list[Rows], page_size: int, modules: int, drafts: int
) -> None:
    """Nothing of an earlier and larger round is left in a later one; rows that take no step write to the null page."""
    fixed = fixed_steps(page_size, modules, drafts)
    for rows in rounds:
        own = drafting_rows(rows, page_size, drafts)
        batches, staged = fixed.send(own)
        views = fixed.views(batches, staged)
        assert len(batches) == len(views) == drafts - 1
        for step, (batch, view) in enumerate(zip(batches, views, strict=True), 1):
            batch.validate()
            args = own.committed_lens, own.num_drafts, own.block_table, page_size, modules
            right, width = module_step(step, *args), step_width(step, modules)
            added = ROWS - len(rows)
            assert batch.query_lens.tolist() == [width] * ROWS
            assert batch.positions.tolist() == right.positions.tolist() + list(range(width)) * added
            assert batch.seq_lens.tolist() == right.seq_lens.tolist() + [width] * added
            takes_part = np.repeat(right.block_table.any(1), width)  # the others are on the null page there
            assert (
                batch.slot_mapping.tolist()
                == np.where(takes_part, right.slot_mapping, 0).tolist() + [0] * width * added
            )
            plain = HostBatch(*(getattr(batch, name) for name in HostBatch.__dataclass_fields__))
            for name in ("query_start_loc", "positions", "seq_lens", "slot_mapping", "page_indptr", "last_page_len"):
                assert getattr(view, name).tolist() == getattr(plain, name).tolist(), name
            used = len(plain.page_indices)
            assert view.page_indices[:used].tolist() == plain.page_indices.tolist()


def test_worked_example() -> None:
    """K=4, M=2, page size 16: the second row takes one step."""
    pages = np.array([[7, 9], [3, 4]], np.int32)
    rows = DraftingRows(np.array([18, 7]), np.array([4, 2]), pages, 16)
    batches, _ = fixed_steps(16, 2, 4).send(rows)
    slots = [batch.slot_mapping[: 2 * len(batch.slot_mapping) // ROWS].tolist() for batch in batches]
    assert slots == [[145, 54], [146, 147, 0, 0], [146, 147, 0, 0]]
    assert [batch.seq_lens.tolist() for batch in batches] == [[18, 7, 1, 1], [20, 2, 2, 2], [20, 2, 2, 2]]


@pytest.mark.parametrize("modules", [1, 2, 3])
def test_one_draft_takes_no_step(modules: int) -> None:
    batches, _ = fixed_steps(16, modules, 1).send(drafting_rows([(5, 1)], 16, 1))
    assert batches == ()
