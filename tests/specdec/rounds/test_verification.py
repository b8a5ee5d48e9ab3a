"""The arrays of a verification against a recount row by row, and the one after it against a commit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention.recurrence.index import FoldRule, StateIndex
from specdec.extras.long_factors import FirstTokensLong
from specdec.extras.recurrent_states import FoldedTokens
from specdec.requests.sampling import SamplingParams
from specdec.rounds.rows import RowTable, Schedule
from specdec.rounds.verification import RoundTables, TargetArrays, target_after, target_arrays
from specdec.wrapped.long_rope import LongRopeRule, RotaryPositions

MOST, SIZE, LIMIT = 24, 4, 22
PAGES = np.arange(1, 41, dtype=np.int32).reshape(4, 10)
HEAD = PAGES + 100
BOTH = RoundTables(PAGES, HEAD, SIZE)

drafting = st.tuples(st.integers(1, 15), st.just(1), st.integers(1, 3), st.just(True))
decoding = st.tuples(st.integers(1, 20), st.just(1), st.just(0), st.just(True))
ending = st.tuples(st.integers(0, 9), st.integers(1, 9), st.just(0), st.just(True))
reading = st.tuples(st.integers(0, 9), st.integers(1, 9), st.just(0), st.just(False))
rounds = st.tuples(*(st.lists(kind, max_size=2) for kind in (drafting, decoding, ending, reading))).map(
    lambda kinds: [row for kind in kinds for row in kind][:4]
)
"""Rows (read already, reads now, drafts, decided), in the order of a schedule."""


def opened(rows: list[tuple[int, int, int, bool]]) -> tuple[RowTable, Schedule]:
    """Rows stand in the table in the reverse of the schedule's order; token p of row r is 100·r + p."""
    table = RowTable(4, MOST)
    for number, (computed, new, _, decided) in enumerate(reversed(rows)):
        length = computed + new + 3 * (not decided)
        prefill = length - 1 if new == 1 and decided else length
        row = table.open(100 * number + np.arange(length), LIMIT, 3, 1, SamplingParams(), prefill=prefill)
        table.computed[row] = computed
    order = np.arange(len(rows))[::-1].copy()
    return table, Schedule(order, *(np.array([row[i] for row in rows], np.int64) for i in (1, 2)))


@given(rounds.filter(bool))
def test_every_row_reads_its_tokens_then_its_drafts(rows: list[tuple[int, int, int, bool]]) -> None:
    table, schedule = opened(rows)
    target = target_arrays(schedule, table, BOTH)
    tokens: list[int] = []
    places, sources, logits, index = [], [], [], []
    width = max(drafts for _, _, drafts, _ in rows)
    for b, ((computed, new, drafts, decided), row) in enumerate(zip(rows, schedule.rows.tolist(), strict=True)):
        begin = len(tokens)
        tokens += [100 * row + p for p in range(computed, computed + new)] + [0] * drafts
        places += range(begin + new, begin + new + drafts)
        sources += range(b * width, b * width + drafts)
        if decided:
            index.append([len(logits) + min(j, drafts) for j in range(width + 1)])
            logits += range(begin + new - 1, begin + new + drafts)
    inputs = target.inputs
    inputs.batch.validate()
    assert inputs.token_ids.tolist() == tokens
    assert inputs.draft_places.tolist() == places and inputs.draft_sources.tolist() == sources
    assert inputs.logits_indices.tolist() == logits and inputs.logit_index.tolist() == index
    assert inputs.num_drafts.tolist() == [drafts for _, _, drafts, decided in rows if decided]
    assert target.decided.tolist() == [b for b, row in enumerate(rows) if row[3]]
    assert target.only_bonus_tokens == all(new == 1 and decided for _, new, _, decided in rows)
    assert target.following.tolist() == [
        0 if decided else 100 * row + computed + new
        for (computed, new, _, decided), row in zip(rows, schedule.rows.tolist(), strict=True)
    ]


@given(rounds.filter(bool))
def test_drafts_after_it_are_bounded_by_the_rows_limits(rows: list[tuple[int, int, int, bool]]) -> None:
    """With nothing accepted a row has one token more; each further draft needs a place for itself and one after it."""
    table, schedule = opened(rows)
    target = target_arrays(schedule, table, BOTH)
    assert target.wanted.tolist() == [3 if decided else 0 for *_, decided in rows]
    assert target.room.tolist() == [min(MOST - 1, LIMIT - 2) - computed - new for computed, new, _, _ in rows]


def test_a_full_row_beside_a_long_chunk_reads_inside_the_table() -> None:
    table = RowTable(2, 12)
    for length, computed in ((12, 11), (12, 0)):
        table.computed[table.open(np.arange(length), 13, 0, 1, SamplingParams())] = computed
    schedule = Schedule(np.array([0, 1]), np.array([1, 12]), np.array([0, 0]))
    assert target_arrays(schedule, table, RoundTables(PAGES, None, SIZE)).inputs.token_ids.tolist() == [11, *range(12)]


def test_a_row_that_comes_back_decides_nothing_before_its_bonus_token() -> None:
    """Preempted at a bonus token with drafts: it reads all before it, and drafts then; it has that token already."""
    table = RowTable(1, MOST)
    table.open(np.arange(9), LIMIT, 3, 1, SamplingParams(), prefill=8)
    target = target_arrays(Schedule(np.array([0]), np.array([8]), np.array([0])), table, BOTH)
    assert not len(target.decided) and target.following.tolist() == [8] and target.wanted.tolist() == [3]


def test_drafts_made_ahead_stand_in_the_order_of_the_last_batch() -> None:
    table, schedule = opened([(5, 1, 2, True), (7, 1, 1, True), (3, 1, 0, True)])
    table.mark_batch(np.array([1, 0, 2]))
    assert target_arrays(schedule, table, BOTH).sources is None
    sources = target_arrays(schedule, table, BOTH, True).sources
    assert sources is not None and sources.tolist() == [2, 0], "rows 2 and 1 of the table, those with drafts"


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=4))
def test_the_round_after_one_of_bonus_tokens_is_that_after_its_commit(rows: list[tuple[int, int, int]]) -> None:
    """From accepted counts alone, against the table advanced by them."""
    table, schedule = opened([(computed, 1, drafts, True) for computed, drafts, _ in rows])
    accepted = np.array([min(a, n) for _, n, a in rows])
    bonus, drafts = np.arange(len(rows)) + 7, np.array([n % 2 for _, n, _ in rows])
    before = target_arrays(schedule, table, BOTH)
    own, tokens = schedule.rows, np.full((len(rows), 4), 9)
    tokens[np.arange(len(rows)), accepted] = bonus
    found = target_after(before, table, BOTH.rows(own), drafts, accepted, tokens)
    table.computed[own] += 1 + accepted
    table.length[own] += 1 + accepted
    table.tokens[own, table.computed[own]] = bonus
    right = target_arrays(replace(schedule, num_drafts=drafts), table, BOTH)
    for name in ("start", "num_new", "drafts", "num_drafting", "tokens", "decided", "wanted", "room", "request_rows"):
        assert np.array_equal(getattr(found, name), getattr(right, name)), name


@pytest.mark.parametrize(
    ("start", "told"), [([3, 0], [True, False]), ([7, 8], [True, False]), ([8, 3], None), ([9, 12], None)]
)
def test_only_rows_that_read_positions_with_other_factors_are_told_so(
    start: list[int], told: list[bool] | None
) -> None:
    """Row 0 has long factors from its first token on, row 1 has not; positions from 8 on have them anyway."""
    table = RowTable(2, MOST, [FirstTokensLong(LongRopeRule(8))])
    for computed, long in zip(start, (True, False), strict=True):
        row = table.open(np.arange(computed + 1), LIMIT, 0, 1, SamplingParams(), variant=int(long))
        table.computed[row] = computed
    schedule = Schedule(np.arange(2), np.ones(2, np.int64), np.zeros(2, np.int64))
    target: TargetArrays = target_arrays(schedule, table, BOTH)
    found = target.inputs.batch.extra(RotaryPositions)
    assert (found is None) == (told is None)
    if found is not None:
        assert found.positions.tolist() == [start[0] - 8, start[1]]


def test_states_are_put_off_from_a_rows_first_verification_on() -> None:
    """Of deferred states: a chunk goes into the state at once, a bonus token only when it must."""
    columns = FoldedTokens(FoldRule.deferred(3), 3)
    table = RowTable(3, MOST, [columns])
    for computed, length in ((0, 6), (6, 7), (9, 10)):
        row = table.open(np.arange(length), LIMIT, 3, 1, SamplingParams(), prefill=6)
        table.computed[row] = columns.folded[row] = computed
    schedule = Schedule(np.arange(3), np.array([6, 1, 1]), np.zeros(3, np.int64))
    (index,) = target_arrays(schedule, table, BOTH).extras
    assert isinstance(index, StateIndex) and index.num_new.tolist() == [6, 0, 0]
