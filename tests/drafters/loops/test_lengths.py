"""Lengths and draft limits: the formulas against what happens token by token."""

from __future__ import annotations

import doctest

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import drafters.loops.lengths
from drafters.loops.lengths import draft_room, drafts_within, num_drafts_allowed, tokens_accepted

small = st.integers(0, 12)


def test_the_examples_in_the_docstrings() -> None:
    outcome = doctest.testmod(drafters.loops.lengths)
    assert outcome.failed == 0 and outcome.attempted == 5


@given(st.integers(1, 20), small, small)
def test_the_new_length_is_that_of_the_tokens_that_stay(start: int, num_new: int, accepted: int) -> None:
    cache = ["old"] * start + ["committed"] * num_new + ["accepted"] * accepted
    found = tokens_accepted(np.array([num_new]), np.array([accepted]))
    assert start + int(found[0]) == len(cache)


@given(st.integers(0, 6), st.integers(1, 40), st.integers(0, 39), st.integers(0, 12))
def test_every_draft_that_is_allowed_has_a_position_and_a_use(wanted: int, longest: int, bonus: int, left: int) -> None:
    """Counted one by one: a draft needs a position before the last, and one more token is emitted beside the drafts."""
    allowed = 0
    while allowed < wanted and bonus + allowed + 1 <= longest - 1 and allowed + 1 < left:
        allowed += 1
    found = num_drafts_allowed(np.array([wanted]), longest, np.array([bonus]), np.array([left]))
    assert found.tolist() == [allowed]


@given(st.integers(0, 6), st.integers(8, 60), st.integers(0, 50), st.integers(1, 30), st.integers(0, 6))
def test_room_falls_by_one_with_every_token(wanted: int, longest: int, bonus: int, left: int, taken: int) -> None:
    """So what a round leaves is known before its commit, from the accepted count alone (`drafts_after`)."""
    before = draft_room(longest, np.array([bonus]), np.array([left]))
    after = num_drafts_allowed(np.array([wanted]), longest, np.array([bonus + taken]), np.array([left - taken]))
    assert drafts_within(np.array([wanted]), before - taken).tolist() == after.tolist()
