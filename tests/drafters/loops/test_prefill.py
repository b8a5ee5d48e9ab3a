"""The rows that a draft prefill reads: worked examples, and properties that a slow loop decides."""

from __future__ import annotations

import doctest
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import drafters.loops.prefill
from attention.batch.host import rows_batch
from drafters.loops.prefill import accepted_rows, module_batch, module_rows, shifted_batch, shifted_token_ids

QSL = np.array([0, 4, 8, 12])
SEQ = np.array([20, 33, 48])
ACCEPTED = np.array([1, 3, 0])
DRAFTS = np.array([3, 3, 3])
TABLE = np.array([[7, 9, 0, 0], [3, 4, 8, 0], [1, 2, 5, 6]], np.int32)
WIDE = np.array([[9, 3, 14, 1, 20, 6, 11, 2], [5, 12, 7, 19, 4, 17, 8, 10], [13, 15, 16, 18, 21, 22, 23, 24]], np.int32)
ranges = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=3)


def test_the_examples_in_the_docstrings() -> None:
    outcome = doctest.testmod(drafters.loops.prefill)
    assert outcome.failed == 0 and outcome.attempted >= 19


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


def test_rejection_vector() -> None:
    accepted = accepted_rows(np.array([0, 4, 11, 16]), np.array([3, 6, 4]), np.array([2, 3, 2]))
    assert accepted.query_start_loc.tolist() == [0, 3, 7, 10]
    assert accepted.token_indices.tolist() == [0, 1, 2, 4, 5, 6, 7, 11, 12, 13]


def test_shift_vector() -> None:
    table = np.array([[10, 11, 12, 100, 0], [20, 21, 200, 0, 0], [30, 31, 32, 33, 300]])
    rows, positions = np.repeat([0, 1, 2], [3, 2, 4]), np.array([0, 1, 2, 0, 1, 0, 1, 2, 3])
    assert shifted_token_ids(table, rows, positions).tolist() == [11, 12, 100, 21, 200, 31, 32, 33, 300]


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


@given(ranges, st.integers(1, 4))
def test_every_row_reads_its_own_token_and_the_output_before_it(new: list[tuple[int, int]], modules: int) -> None:
    """A row is named (request, module, index); tokens are named (request, position)."""
    first, lens = (np.array(x) for x in zip(*new, strict=True))
    outputs = [(b, i) for b, (a, n) in enumerate(new) for i in range(a, a + n)]  # module 0's rows
    tokens = [(b, i + 1) for b, i in outputs]
    for m, rows in enumerate(module_rows(first, lens, modules), 1):
        own = [(b, i) for b, (a, n) in enumerate(new) for i in range(max(a - m, 0), max(a + n - m, 0))]
        carried = [(b, a - m) for b, (a, _) in enumerate(new)]  # module m-1's last row of the round before
        assert [tokens[t] for t in rows.tokens] == [(b, i + 1 + m) for b, i in own]
        assert [(carried + outputs)[s] for s in rows.sources] == own
        batch = module_batch(rows, WIDE[: len(new)], 4)
        batch.validate()
        assert batch.positions.tolist() == [i for _, i in own]
        for b, count in enumerate(rows.lens):
            assert not count or own[rows.last_row[b]] == (b, new[b][0] + new[b][1] - m - 1)
        outputs = own


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_rows_before_a_requests_own_beginning_are_on_the_null_page(
    rows: list[tuple[int, int, int]], module: int
) -> None:
    """What stands before it, on pages of the prefix cache, is another's: module m reads it, and never writes it."""
    begins, read, lens = (np.array(x) for x in zip(*rows, strict=True))
    starts = np.concatenate([[0], np.cumsum(lens)])
    batch = shifted_batch(module, starts, begins + read, WIDE[: len(rows)], 4, begins)
    batch.validate()
    token = 0
    for b, (begin, before, count) in enumerate(rows):
        for i in range(count):
            own = begin + before + i - module
            slot = WIDE[b, own // 4] * 4 + own % 4 if own >= begin else batch.slot_mapping[token]
            assert batch.slot_mapping[token] == slot and (slot >= 4) == (own >= begin)
            assert own < begin or batch.positions[token] == own
            token += 1
    least = np.zeros_like(begins)
    other = shifted_batch(module, starts, begins + read, WIDE[: len(rows)], 4)
    same = shifted_batch(module, starts, begins + read, WIDE[: len(rows)], 4, least)
    assert other.slot_mapping.tolist() == same.slot_mapping.tolist()
