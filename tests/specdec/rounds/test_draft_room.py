"""Limits of drafts: the formulas against what happens token by token."""

from __future__ import annotations

import doctest

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import specdec.rounds.rows
from specdec.rounds.rows import draft_room, drafts_within


def test_the_examples_in_the_docstrings() -> None:
    outcome = doctest.testmod(specdec.rounds.rows)
    assert outcome.failed == 0 and outcome.attempted == 3


@given(st.integers(0, 6), st.integers(1, 40), st.integers(0, 39), st.integers(0, 12))
def test_every_draft_that_is_allowed_has_a_position_and_a_use(wanted: int, longest: int, bonus: int, left: int) -> None:
    """Counted one by one: a draft needs a position before the last, and one more token is emitted beside the drafts."""
    allowed = 0
    while allowed < wanted and bonus + allowed + 1 <= longest - 1 and allowed + 1 < left:
        allowed += 1
    found = drafts_within(np.array([wanted]), draft_room(longest, np.array([bonus]), np.array([left])))
    assert found.tolist() == [allowed]


@given(st.integers(0, 6), st.integers(8, 60), st.integers(0, 50), st.integers(1, 30), st.integers(0, 6))
def test_room_falls_by_one_with_every_token(wanted: int, longest: int, bonus: int, left: int, taken: int) -> None:
    """So what a round leaves is known before its commit, from the accepted count alone (`drafts_after`)."""
    before = draft_room(longest, np.array([bonus]), np.array([left]))
    after = drafts_within(np.array([wanted]), draft_room(longest, np.array([bonus + taken]), np.array([left - taken])))
    assert drafts_within(np.array([wanted]), before - taken).tolist() == after.tolist()
