"""The arithmetic of recurrent states over random rounds: what is in a state and in a ring, position by position."""

from __future__ import annotations

import doctest
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attention.recurrence.index
import attention.recurrence.states
from attention.errors import InvariantError
from attention.recurrence.index import FoldRule, StateIndex, conv_ring_size, folded_after, replay_of


def test_the_examples_in_the_docstrings() -> None:
    for module in (attention.recurrence.index, attention.recurrence.states):
        outcome = doctest.testmod(module)
        assert outcome.failed == 0 and outcome.attempted > 1


Launch = tuple[int, int, int, bool]
"""Committed tokens, drafts, how many of them are accepted, whether the row decodes."""


@st.composite
def launches(draw: st.DrawFn) -> tuple[int, list[Launch]]:
    """K, and every launch of one row: chunks of a prompt, then rounds."""
    most = draw(st.integers(0, 9))
    chunks = [(n, 0, 0, False) for n in draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))]
    rounds = []
    for _ in range(draw(st.integers(1, 12))):
        drafts = draw(st.integers(0, most))
        rounds.append((1, drafts, draw(st.integers(0, drafts)), True))
    return most, chunks + rounds


@given(launches(), st.integers(1, 5), st.sampled_from([FoldRule.every_launch, FoldRule.deferred]))
def test_a_state_and_its_rings_hold_what_a_launch_needs(
    case: tuple[int, list[Launch]], k: int, make: Callable[[int], FoldRule]
) -> None:
    """Every launch may write K drafts, as those from graphs do, whatever a row has."""
    most, row = case
    rule = make(most)
    ring: dict[int, tuple[str, int]] = {}
    conv: dict[int, tuple[str, int]] = {}
    size, conv_size = rule.ring_size, conv_ring_size(k, most)
    state: list[int] = []
    folded = start = 0
    for number, (committed, drafts, accepted, decodes) in enumerate(row):
        replay = int(replay_of(np.array(start), np.array(folded)))
        assert 0 <= replay <= rule.most_replayed
        arrays = (np.array([x]) for x in (replay, committed, decodes))
        num_new = int(rule.num_new(*arrays)[0])
        assert num_new in (0, committed) and (num_new or rule.most_replayed > most)
        lens = np.array([committed + drafts])
        StateIndex.of(*(np.array([x]) for x in (1, start, replay, num_new))).validate(lens, rule)
        before = np.arange(start - replay, start)
        kept = [ring.get(int(place)) for place in before % size]
        assert kept == [("true", p) for p in before]  # every accepted draft, and none that was rejected
        if num_new:
            state += before.tolist() + list(range(start, start + num_new))
            assert state == list(range(start + num_new))  # each token once, in order
        padded = most if decodes else drafts
        own = range(start + num_new, start + committed + padded)
        assert not set((before % size).tolist()) & {p % size for p in own} and len(own) <= size
        for p in own:
            ring[p % size] = ("true" if p < start + committed + accepted else f"rejected in {number}", p)
        taps = range(max(start - k + 1, 0), start)
        assert [conv.get(p % conv_size) for p in taps] == [("true", p) for p in taps]
        for p in range(max(start, start + committed + drafts - conv_size), start + committed + drafts):
            conv[p % conv_size] = ("true" if p < start + committed + accepted else f"rejected in {number}", p)
        folded = int(folded_after(*(np.array(x) for x in (start, num_new, folded))))
        start += committed + accepted


def index(**changes: list[int]) -> StateIndex:
    arrays = {"slots": [1, 2], "start": [5, 0], "replay": [2, 0], "num_new": [1, 4]} | changes
    return StateIndex.of(**{name: np.array(values) for name, values in arrays.items()})


def test_contradictions_are_found() -> None:
    lens = np.array([4, 4])
    rule = FoldRule.every_launch(3)
    index().validate(lens, rule)
    index(slots=[0, 0]).validate(lens, rule)  # padding rows share the null slot
    for changes, message in (
        ({"slots": [2, 2]}, "two rows share a state"),
        ({"replay": [6, 0]}, "replays what it never read"),
        ({"num_new": [5, 4]}, "commits more tokens than it reads"),
        ({"num_new": [0, 4]}, "leaves more to replay than there may be"),
    ):
        with pytest.raises(InvariantError, match=message):
            index(**changes).validate(lens, rule)
    index(num_new=[0, 4]).validate(lens, FoldRule.deferred(3))
    with pytest.raises(InvariantError, match="leaves more to replay than there may be"):  # though few enough are left
        index(replay=[0, 0], num_new=[0, 4]).validate(np.array([2, 4]), rule)
    with pytest.raises(InvariantError, match="replays more than there may be"):
        index().validate(lens, FoldRule.every_launch(1))
