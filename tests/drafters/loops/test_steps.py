"""The draft steps: worked examples, a slow recount of any number of modules, and the same in a fixed shape."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import drafters.loops.steps
from attention.batch.host import HostBatch, rows_batch, slots_of
from attention.errors import InvariantError
from drafters.loops.base import DraftingRows, FixedShape
from drafters.loops.steps import StepBuffers, StepSection, step_arrays, step_tokens, step_width
from specdec.rounds.rows import draft_room, drafts_within
from tests.drafters.loops.test_prefill import DRAFTS, TABLE, WIDE, Case, cases

CPU = torch.device("cpu")
ROWS, LONGEST = 4, 46
Rows = list[tuple[int, int]]
"""(committed length, drafts) of each row."""
rows_lists = st.lists(st.tuples(st.integers(1, 36), st.integers(0, 5)), min_size=1, max_size=ROWS)


def by_hand(step: int, rows: DraftingRows, modules: int) -> HostBatch:
    """Step by step with `rows_batch`: rows that do not take the step are on the null page."""
    width, page_size = min(step, modules), rows.page_size
    active = (rows.num_drafts > step) & (rows.committed_lens >= width)
    first = np.where(active, rows.committed_lens + step // modules * modules - width, 0)
    own = rows_batch(np.arange(len(first) + 1) * width, first, rows.block_table, page_size)
    return replace(own, slot_mapping=np.where(np.repeat(active, width), own.slot_mapping, 0))


def test_the_examples_in_the_docstrings() -> None:
    outcome = doctest.testmod(drafters.loops.steps)
    assert outcome.failed == 0 and outcome.attempted >= 8


def test_worked_example_steps() -> None:
    steps = step_arrays(DraftingRows(np.array([18, 33, 45]), DRAFTS, TABLE, 16)).batches
    steps[0].validate()
    assert steps[0].page_counts.tolist() == [2, 3, 3]
    assert steps[0].last_page_len.tolist() == [3, 2, 14]


def test_page_crossing_vector() -> None:
    steps = step_arrays(DraftingRows(np.array([47]), np.array([4]), np.array([[5, 9, 2, 7]]), 16)).batches
    assert [step.positions[0] for step in steps] == [47, 48, 49]
    assert [step.slot_mapping[0] for step in steps] == [47, 112, 113]


@pytest.mark.parametrize(("bonus", "drafts"), [(20, 3), (60, 3), (61, 2), (62, 1), (63, 0), (64, 0)])
def test_length_limit_vector(bonus: int, drafts: int) -> None:
    """Limit 64: a bonus token at 62 has one draft and no draft step, a bonus token at 63 none."""
    n = drafts_within(np.array([3]), draft_room(64, np.array([bonus]), np.array([99])))
    assert n.tolist() == [drafts]
    steps = step_arrays(DraftingRows(np.array([bonus]), n, np.zeros((1, 64), np.int32), 1))
    assert len(steps.batches) == max(0, drafts - 1) and (steps.sent is None) == (drafts < 2)


@given(cases())
def test_steps_write_the_rows_own_slots_in_order_and_nothing_else(case: Case) -> None:
    committed = case.start + case.query - case.drafts + case.accepted
    committed = np.minimum(committed, case.max_model_len)
    n = drafts_within(case.most, draft_room(case.max_model_len, committed, case.left))
    assert ((n <= case.most) & (n <= np.maximum(case.left - 1, 0)) & (n >= 0)).all()
    assert (np.where(n > 0, committed + n, 0) <= case.max_model_len - 1).all(), "the last draft has a position"
    batches = step_arrays(DraftingRows(committed, n, case.table, case.page_size)).batches
    assert len(batches) == max(0, int(n.max()) - 1)
    owned, live = [{int(p) for p in row} for row in case.table], []
    for j, batch in enumerate(batches):
        for i in range(len(committed)):
            slot, position = int(batch.slot_mapping[i]), int(batch.positions[i])
            if n[i] >= j + 2:
                live.append(slot)
                assert position == committed[i] + j
                assert slot // case.page_size in owned[i] and slot % case.page_size == position % case.page_size
                assert slot == slots_of(case.table, np.array([i]), np.array([position]), case.page_size)[0]
                assert batch.seq_lens[i] == position + 1
            else:
                assert (slot, position, int(batch.seq_lens[i])) == (0, 0, 1), "padding writes to the null page"
        again = replace(batch)
        batch.validate()
        for name in ("query_lens", "page_counts", "page_indices", "page_indptr", "last_page_len"):
            assert getattr(batch, name).tolist() == getattr(again, name).tolist(), f"{name} was noted, and is another"
    assert len(set(live)) == len(live), "no slot is written twice"


@given(cases())
def test_one_rows_limit_does_not_touch_its_neighbours(case: Case) -> None:
    bonus = np.minimum(case.start + 1, case.max_model_len)
    n = drafts_within(case.most, draft_room(case.max_model_len, bonus, case.left))
    steps = step_arrays(DraftingRows(bonus, n, case.table, case.page_size)).batches
    for i in range(len(bonus)):
        one = slice(i, i + 1)
        alone = drafts_within(case.most[one], draft_room(case.max_model_len, bonus[one], case.left[one]))
        assert n[i] == alone[0]
        own = step_arrays(DraftingRows(bonus[one], alone, case.table[one], case.page_size)).batches
        slots = [int(step.slot_mapping[i]) for step in steps]
        assert slots == [int(step.slot_mapping[0]) for step in own] + [0] * (len(steps) - len(own))


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 7)), min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_steps_run_the_rows_whose_tokens_are_drafted(rows: Rows, modules: int) -> None:
    """Row i of the step's module reads the token at i+1+m; the step's width tokens end at the newest draft."""
    lens, n = (np.array(x) for x in zip(*rows, strict=True))
    for step, batch in enumerate(step_arrays(DraftingRows(lens, n, WIDE[: len(rows)], 4), modules).batches, 1):
        batch.validate()
        width, m = step_width(step, modules), step % modules
        for b, own in enumerate(batch.positions.reshape(len(rows), width)):
            slots = batch.slot_mapping.reshape(-1, width)[b]
            if n[b] > step and lens[b] >= width:
                assert [i + 1 + m - lens[b] for i in own] == list(range(step - width + 1, step + 1))  # draft numbers
                assert own[-1] <= lens[b] + n[b] - 2, "inside the pages that a draft loop of n drafts has"
                assert slots.all()
            else:
                assert own[0] == 0 and not slots.any()


@given(rows_lists, st.integers(1, 4), st.sampled_from([1, 3, 16]))
def test_they_equal_a_recount_step_by_step(rows: Rows, modules: int, page_size: int) -> None:
    own = drafting_rows(rows, page_size)
    found = step_arrays(own, modules)
    assert len(found.batches) == max(own.num_drafts.max() - 1, 0)
    for step, batch in enumerate(found.batches, 1):
        right = by_hand(step, own, modules)
        for name in ("query_start_loc", "positions", "seq_lens", "num_computed_tokens", "slot_mapping", "page_indices"):
            assert getattr(batch, name).tolist() == getattr(right, name).tolist(), name


@pytest.mark.parametrize(
    "wrong_slots",
    [
        pytest.param(lambda slots: slots[0] + np.arange(len(slots)), id="slot + 1 at a page crossing"),
        pytest.param(lambda slots: slots % 64, id="position clamped into the first page"),
    ],
)
def test_the_validator_sees_the_classic_slot_bugs(wrong_slots: Callable[[np.ndarray], np.ndarray]) -> None:
    table = np.array([[5, 9, 2, 7]], np.int32)
    batch = rows_batch(np.array([0, 4]), np.array([46]), table, 16)
    batch.validate()
    with pytest.raises(InvariantError):
        replace(batch, slot_mapping=wrong_slots(batch.slot_mapping)).validate()


def fixed_steps(page_size: int, modules: int, drafts: int) -> StepBuffers:
    entries = ROWS * -(-LONGEST // page_size)
    return StepBuffers(
        FixedShape(ROWS, drafts + 1, page_size, entries), step_tokens(ROWS, max(drafts - 1, 0), modules), CPU
    )


def drafting_rows(rows: Rows, page_size: int, drafts: int = 5) -> DraftingRows:
    lens = np.array([n for n, _ in rows], np.int64)
    width = -(-LONGEST // page_size)
    pages = np.arange(1, 1 + len(rows) * width, dtype=np.int32).reshape(len(rows), width)
    return DraftingRows(lens, np.array([min(n, drafts) for _, n in rows], np.int64), pages, page_size)


@given(
    st.lists(rows_lists, min_size=1, max_size=4),
    st.sampled_from([1, 3, 16]),
    st.integers(1, 4),
    st.integers(1, 5),
)
def test_fixed_steps_equal_the_recount_one_round_after_the_other(
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
            right, width, added = by_hand(step, own, modules), step_width(step, modules), ROWS - len(rows)
            assert batch.query_lens.tolist() == [width] * ROWS
            assert batch.positions.tolist() == right.positions.tolist() + list(range(width)) * added
            assert batch.seq_lens.tolist() == right.seq_lens.tolist() + [width] * added
            assert batch.slot_mapping.tolist() == right.slot_mapping.tolist() + [0] * width * added
            plain = HostBatch(*(getattr(batch, name) for name in HostBatch.__dataclass_fields__))
            names = ("query_start_loc", "positions", "seq_lens", "slot_mapping", "page_indptr", "last_page_len")
            for name in (*names, "page_indices"):
                assert getattr(view, name).tolist() == getattr(plain, name).tolist(), name


@given(rows_lists, st.sampled_from([1, 3, 16]), st.integers(1, 3))
def test_fixed_steps_equal_what_a_ragged_round_sends(rows: Rows, page_size: int, modules: int) -> None:
    own = drafting_rows(rows, page_size)
    ragged = StepSection(modules).arrays.values(step_arrays(own, modules).sent)
    num_steps = max(int(own.num_drafts.max()) - 1, 0)
    assert bool(ragged) == (num_steps > 0)
    _, staged = fixed_steps(page_size, modules, 5).send(own)
    for name in ("step.seq_lens", "step.last_page_len") if ragged else ():
        assert staged[name][:num_steps, : len(rows)].tolist() == ragged[name].tolist(), name


def test_worked_example_of_a_chain_in_a_fixed_shape() -> None:
    """K=3, page size 16: the second row takes no step and stands on the null page."""
    pages = np.array([[7, 9], [3, 4]], np.int32)
    rows = DraftingRows(np.array([18, 20]), np.array([3, 1]), pages, 16)
    batches, staged = fixed_steps(16, 1, 3).send(rows)
    assert staged["step.slot_mapping"].tolist() == [146, 0, 0, 0, 147, 0, 0, 0]
    assert [b.seq_lens.tolist() for b in batches] == [[19, 1, 1, 1], [20, 1, 1, 1]]


def test_worked_example_of_modules_in_a_fixed_shape() -> None:
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
