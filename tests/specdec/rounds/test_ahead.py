"""The draft prefill before its verification is read: each pass has the rows that it would have after the read."""

from __future__ import annotations

import doctest
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import specdec.rounds.drafting
from drafters.loops.base import PrefillPasses
from drafters.loops.prefill import module_batch, module_rows
from specdec.rounds.drafting import ahead_inputs
from specdec.rounds.verification import RoundTables, TargetArrays

MOST = 6
Row = tuple[int, int, int]
"""(first position, committed tokens, drafts)"""

verifications = st.tuples(st.integers(0, 20), st.just(1), st.integers(0, 4))
prompts = st.tuples(st.integers(0, 9), st.integers(1, 12), st.just(0))
rounds = st.lists(st.one_of(verifications, prompts), min_size=1, max_size=MOST)


def target_of(rows: list[Row], page_size: int) -> TargetArrays:
    start, num_new, drafts = (np.array([row[i] for row in rows], np.int64) for i in range(3))
    width = -(-40 // page_size)
    pages = np.arange(1, 1 + len(rows) * width, dtype=np.int32).reshape(len(rows), width)
    tokens = np.arange(len(rows) * int(num_new.max())).reshape(len(rows), -1)
    none = np.zeros(len(rows), np.int64)
    decided, place = np.arange(len(rows)), np.arange(len(rows)) + 10
    tables = RoundTables(pages, pages + 500, page_size)
    return TargetArrays(start, num_new, drafts, 0, tokens, decided, none, none, none, place, tables)


@given(rounds, st.sampled_from([1, 3, 16]), st.integers(2, 4), st.integers(0, 4))
def test_rows_of_later_modules_are_those_after_the_read(
    rows: list[Row], page_size: int, modules: int, accepted: int
) -> None:
    """The true rows of each pass, and what they read, are those of `module_rows`; all others are past the end or on the
    null page."""
    target = target_of(rows, page_size)
    ahead = ahead_inputs(target, PrefillPasses(modules), MOST)
    assert target.pages.head is not None and ahead.carried is not None and len(ahead.batches) == modules
    assert ahead.carried.request_rows.tolist() == target.request_rows.tolist()
    lens = target.num_new + np.minimum(accepted, target.drafts)
    starts, own = target.query_start_loc, np.arange(target.num_tokens)
    owner = np.repeat(np.arange(len(rows)), target.lens)
    position = target.start[owner] + own - starts[owner]
    true = position < (target.start + lens)[owner]
    place_of = {int(t): i for i, t in enumerate(np.flatnonzero(true))}  # of the tokens that are read after the read
    before = true
    for m, right in enumerate(module_rows(target.start, lens, modules), 1):
        batch = ahead.batches[m]
        batch.validate()
        exists = true & (position >= m)
        ragged = module_batch(right, target.pages.head, page_size)
        assert batch.positions[exists].tolist() == ragged.positions.tolist()
        assert batch.slot_mapping[exists].tolist() == ragged.slot_mapping.tolist()
        assert [place_of[int(t)] for t in np.flatnonzero(exists)] == right.tokens.tolist()
        earlier = {int(t): i for i, t in enumerate(np.flatnonzero(before))}
        sources = ahead.carried.sources[exists].tolist()
        assert right.sources.tolist() == [s if s < MOST else len(rows) + earlier[s - MOST] for s in sources]
        some = right.lens > 0
        last = (starts[:-1] + lens - 1)[some]
        assert [int(np.flatnonzero(np.flatnonzero(exists) == t)[0]) for t in last] == right.last_row[some].tolist()
        missing = position < m
        assert (batch.slot_mapping[missing] < modules * page_size).all() and (batch.slot_mapping[missing] < 500).all()
        rejected = ~true & ~missing
        assert (batch.positions[rejected] >= (target.start + lens)[owner][rejected] - m).all()
        before = exists


def test_one_pass_carries_nothing() -> None:
    ahead = ahead_inputs(target_of([(5, 1, 2), (0, 4, 0)], 16), PrefillPasses(1))
    assert len(ahead.batches) == 1 and ahead.carried is None


@given(rounds, st.sampled_from([1, 3, 16]), st.integers(0, 4))
def test_rows_with_the_bonus_token_are_those_after_the_read(rows: list[Row], page_size: int, accepted: int) -> None:
    """What a model that reads tokens reads once the result is there: `token_prefill`; later rows are past the end."""
    target = replace(target_of(rows, page_size), following=np.full(len(rows), 77))
    plain, ahead = (ahead_inputs(target, PrefillPasses(1, bonus)) for bonus in (0, 1))
    (batch,) = ahead.batches
    batch.validate()
    counts = np.minimum(accepted, target.drafts)
    first = batch.query_start_loc[:-1]
    assert target.pages.head is not None
    for i, (start, num_new, drafts) in enumerate(rows):
        own = slice(int(first[i]), int(first[i]) + num_new + drafts + 1)
        assert batch.positions[own].tolist() == [*range(start, start + num_new + drafts + 1)]
        page, within = np.divmod(batch.positions[own], page_size)
        assert batch.slot_mapping[own].tolist() == (target.pages.head[i][page] * page_size + within).tolist()
        assert ahead.token_ids[own][: num_new + 1].tolist() == [*target.tokens[i, :num_new], 77]
        assert batch.positions[ahead.last_row[i] + counts[i]] == start + num_new + counts[i], "the bonus token's"
    assert ahead.token_sources.tolist() == plain.token_sources.tolist()
    before = plain.batches[0].positions[plain.token_places]
    assert batch.positions[ahead.token_places].tolist() == (before + 1).tolist()


def test_the_example_in_the_docstring() -> None:
    outcome = doctest.testmod(specdec.rounds.drafting)
    assert outcome.failed == 0 and outcome.attempted == 7


def test_every_logits_row_finds_its_token_in_the_result() -> None:
    """Results have a column more than the most drafts of a row, whatever its own."""
    assert ahead_inputs(target_of([(5, 1, 3), (4, 1, 1), (3, 1, 0)], 16), PrefillPasses(1)).token_sources.tolist() == [
        0,
        1,
        2,
        3,
        4,
        5,
        8,
    ]


def test_later_modules_write_nothing_before_a_requests_own_beginning() -> None:
    """Both rows stand at position 6; the second one begins there, after pages of the prefix cache."""
    target = replace(target_of([(6, 1, 1), (6, 1, 1)], 4), begins=np.array([0, 6]))
    assert target.pages.head is not None
    _, later = ahead_inputs(target, PrefillPasses(2), MOST).batches
    pages = target.pages.head[:, 1]
    assert later.slot_mapping.tolist() == [pages[0] * 4 + 1, pages[0] * 4 + 2, 0, pages[1] * 4 + 2]
