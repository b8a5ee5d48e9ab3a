"""The index arithmetic of drafting: the worked examples, and properties that a slow loop decides."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import drafters.loops.chain_arrays
import drafters.loops.lengths
from attention.batch.host import rows_batch, slots_of
from attention.errors import InvariantError
from drafters.loops.base import DraftingRows
from drafters.loops.chain_arrays import (
    accepted_rows,
    draft_steps,
    shifted_token_ids,
    step_arrays,
)
from drafters.loops.lengths import num_drafts_allowed

QSL = np.array([0, 4, 8, 12])
SEQ = np.array([20, 33, 48])
ACCEPTED = np.array([1, 3, 0])
DRAFTS = np.array([3, 3, 3])
TABLE = np.array([[7, 9, 0, 0], [3, 4, 8, 0], [1, 2, 5, 6]], np.int32)


def test_the_examples_in_the_docstrings() -> None:
    modules = (drafters.loops.chain_arrays, drafters.loops.chain_arrays, drafters.loops.lengths)
    outcomes = [doctest.testmod(module) for module in modules]
    assert [outcome.failed for outcome in outcomes] == [0, 0, 0]
    assert [outcome.attempted for outcome in outcomes] >= [8, 5, 5]


def test_worked_example_draft_prefill() -> None:
    accepted = accepted_rows(QSL, DRAFTS, ACCEPTED)
    assert accepted.query_start_loc.tolist() == [0, 2, 6, 7]
    assert accepted.token_indices.tolist() == [0, 1, 4, 5, 6, 7, 8]
    assert accepted.last_row.tolist() == [1, 5, 6]
    verified = rows_batch(QSL, SEQ - 4, TABLE, 16)
    assert verified.seq_lens.tolist() == [20, 33, 48]
    first = rows_batch(accepted.query_start_loc, SEQ - 4, TABLE, 16)
    assert first.positions.tolist() == [16, 17, 29, 30, 31, 32, 44]
    assert first.seq_lens.tolist() == [18, 33, 45]
    assert first.slot_mapping.tolist() == verified.slot_mapping[accepted.token_indices].tolist()
    assert first.positions.tolist() == verified.positions[accepted.token_indices].tolist()


def test_worked_example_steps() -> None:
    steps = draft_steps(np.array([18, 33, 45]), DRAFTS, TABLE, 16)
    assert len(steps.positions) == 2
    assert steps.positions.tolist() == [[18, 33, 45], [19, 34, 46]]
    assert steps.seq_lens.tolist() == [[19, 34, 46], [20, 35, 47]]
    assert steps.slots.tolist() == [[146, 129, 93], [147, 130, 94]]
    batch = step_arrays(DraftingRows(np.array([18, 33, 45]), DRAFTS, TABLE, 16)).batches[0]
    batch.validate()
    assert batch.page_counts.tolist() == [2, 3, 3]
    assert batch.last_page_len.tolist() == [3, 2, 14]


def test_rejection_vector() -> None:
    accepted = accepted_rows(np.array([0, 4, 11, 16]), np.array([3, 6, 4]), np.array([2, 3, 2]))
    assert accepted.query_start_loc.tolist() == [0, 3, 7, 10]
    assert accepted.token_indices.tolist() == [0, 1, 2, 4, 5, 6, 7, 11, 12, 13]


def test_shift_vector() -> None:
    table = np.array([[10, 11, 12, 100, 0], [20, 21, 200, 0, 0], [30, 31, 32, 33, 300]])
    rows, positions = np.repeat([0, 1, 2], [3, 2, 4]), np.array([0, 1, 2, 0, 1, 0, 1, 2, 3])
    assert shifted_token_ids(table, rows, positions).tolist() == [11, 12, 100, 21, 200, 31, 32, 33, 300]


def test_page_crossing_vector() -> None:
    steps = draft_steps(np.array([47]), np.array([4]), np.array([[5, 9, 2, 7]]), 16)
    assert steps.positions[:, 0].tolist() == [47, 48, 49]
    assert steps.slots[:, 0].tolist() == [47, 112, 113]


@pytest.mark.parametrize(("bonus", "drafts"), [(20, 3), (60, 3), (61, 2), (62, 1), (63, 0), (64, 0)])
def test_length_limit_vector(bonus: int, drafts: int) -> None:
    """Limit 64: a bonus token at 62 has one draft and no draft step, a bonus token at 63 none."""
    n = num_drafts_allowed(np.array([3]), 64, np.array([bonus]), np.array([99]))
    assert n.tolist() == [drafts]
    steps = draft_steps(np.array([bonus]), n, np.zeros((1, 64), np.int32), 1)
    assert len(steps.positions) == max(0, drafts - 1)


def test_rows_that_go_on_come_in_the_order_asked_for() -> None:
    accepted = accepted_rows(QSL, DRAFTS, ACCEPTED, np.array([2, 0]))
    assert accepted.query_start_loc.tolist() == [0, 1, 3]
    assert accepted.token_indices.tolist() == [8, 0, 1]
    assert accepted.last_row.tolist() == [0, 2]


@dataclass(frozen=True)
class Case:
    """Rows of a verification: committed length before it, query length, drafts, accepted, own K, tokens left."""

    page_size: int
    max_model_len: int
    start: np.ndarray
    query: np.ndarray
    drafts: np.ndarray
    accepted: np.ndarray
    most: np.ndarray
    left: np.ndarray
    table: np.ndarray


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows = draw(st.integers(1, 6))
    page_size = draw(st.integers(1, 17))
    max_model_len = draw(st.integers(8, 70))

    def ints(low: int, high: int) -> np.ndarray:
        return np.array(draw(st.lists(st.integers(low, high), min_size=rows, max_size=rows)))

    start = np.minimum(ints(0, max_model_len), max_model_len - 1)
    drafts = np.minimum(ints(0, 6), max_model_len - 1 - start)
    prompt = ints(0, 1) * ints(1, 9)
    query = np.where(drafts > 0, drafts + 1, np.minimum(np.maximum(prompt, 1), max_model_len - start))
    accepted = np.minimum(ints(0, 6), drafts)
    width = -(-(max_model_len + 8) // page_size)
    pages = draw(st.permutations(range(1, rows * width + 1)))
    table = np.array(pages, np.int32).reshape(rows, width)
    return Case(page_size, max_model_len, start, query, drafts, accepted, ints(0, 6), ints(1, 9), table)


@given(cases())
def test_accepted_rows_are_the_bonus_tokens_and_the_accepted_drafts(case: Case) -> None:
    qsl = np.concatenate([[0], np.cumsum(case.query)])
    accepted = accepted_rows(qsl, case.drafts, case.accepted)
    expected, last = [], []
    for i in range(len(case.start)):
        keep = case.query[i] - case.drafts[i] + case.accepted[i]
        expected += range(qsl[i], qsl[i] + keep)
        last.append(len(expected) - 1)
    assert accepted.token_indices.tolist() == expected
    assert accepted.last_row.tolist() == last
    assert np.diff(accepted.query_start_loc).tolist() == (case.query - case.drafts + case.accepted).tolist()
    verified = rows_batch(qsl, case.start, case.table, case.page_size)
    first = rows_batch(accepted.query_start_loc, case.start, case.table, case.page_size)
    verified.validate()
    first.validate()
    assert first.slot_mapping.tolist() == verified.slot_mapping[accepted.token_indices].tolist()
    assert first.positions.tolist() == verified.positions[accepted.token_indices].tolist()


@given(cases())
def test_steps_write_the_rows_own_slots_in_order_and_nothing_else(case: Case) -> None:
    committed = case.start + case.query - case.drafts + case.accepted
    committed = np.minimum(committed, case.max_model_len)
    n = num_drafts_allowed(case.most, case.max_model_len, committed, case.left)
    assert ((n <= case.most) & (n <= np.maximum(case.left - 1, 0)) & (n >= 0)).all()
    assert (np.where(n > 0, committed + n, 0) <= case.max_model_len - 1).all(), "the last draft has a position"
    steps = draft_steps(committed, n, case.table, case.page_size)
    assert len(steps.positions) == max(0, int(n.max()) - 1)
    owned = [{int(p) for p in row} for row in case.table]
    batches = step_arrays(DraftingRows(committed, n, case.table, case.page_size)).batches
    assert len(batches) == len(steps.positions)
    for j in range(len(steps.positions)):
        for i in range(len(committed)):
            slot, position = int(steps.slots[j, i]), int(steps.positions[j, i])
            if n[i] >= j + 2:
                assert steps.active[j, i]
                assert position == committed[i] + j
                assert slot // case.page_size in owned[i] and slot % case.page_size == position % case.page_size
                assert slot == slots_of(case.table, np.array([i]), np.array([position]), case.page_size)[0]
                assert steps.seq_lens[j, i] == position + 1
            else:
                assert not steps.active[j, i]
                assert (slot, position, int(steps.seq_lens[j, i])) == (0, 0, 1), "padding stands on the null page"
        batch, again = batches[j], replace(batches[j])
        batch.validate()
        for name in ("query_lens", "page_counts", "page_indices", "page_indptr", "last_page_len"):
            assert getattr(batch, name).tolist() == getattr(again, name).tolist(), f"{name} was noted, and is another"
        assert not batch.block_table[~steps.active[j]].any()
    live = steps.slots[steps.active]
    assert len(set(live.tolist())) == len(live), "no slot is written twice"


@given(cases())
def test_one_rows_limit_does_not_touch_its_neighbours(case: Case) -> None:
    bonus = np.minimum(case.start + 1, case.max_model_len)
    n = num_drafts_allowed(case.most, case.max_model_len, bonus, case.left)
    for i in range(len(bonus)):
        one = slice(i, i + 1)
        alone = num_drafts_allowed(case.most[one], case.max_model_len, bonus[one], case.left[one])
        assert n[i] == alone[0]
        steps, own = draft_steps(bonus, n, case.table, case.page_size), None
        own = draft_steps(bonus[one], alone, case.table[one], case.page_size)
        assert steps.slots[: len(own.positions), i].tolist() == own.slots[:, 0].tolist()
        assert not steps.slots[len(own.positions) :, i].any()


@given(cases(), st.integers(0, 2**32 - 1))
def test_the_shift_pairs_position_p_with_the_token_at_p_plus_1(case: Case, seed: int) -> None:
    tokens = np.random.default_rng(seed).integers(0, 1000, (len(case.start), case.max_model_len + 2))
    batch = rows_batch(np.concatenate([[0], np.cumsum(case.query)]), case.start, case.table, case.page_size)
    owner = np.repeat(np.arange(len(case.start)), case.query)
    shifted = shifted_token_ids(tokens, owner, batch.positions)
    assert shifted.dtype == np.int64
    unshifted = tokens[owner, batch.positions]
    inside = owner[:-1] == owner[1:]
    assert (shifted[:-1][inside] == unshifted[1:][inside]).all()
    last = np.cumsum(case.query) - 1
    assert shifted[last].tolist() == tokens[np.arange(len(last)), case.start + case.query].tolist()


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
