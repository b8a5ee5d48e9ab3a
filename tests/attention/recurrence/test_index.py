"""The arithmetic of recurrent states over random rounds: what is in a state and in a ring, position by position."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attention.recurrence.index
import attention.recurrence.spec
from attention.errors import InvariantError
from attention.recurrence.index import (
    StateIndex,
    conv_ring_size,
    folded_after,
    replay_of,
    ring_place,
    state_ring_size,
)


def test_the_examples_in_the_docstrings() -> None:
    for module in (attention.recurrence.index, attention.recurrence.spec):
        outcome = doctest.testmod(module)
        assert outcome.failed == 0 and outcome.attempted > 1


@st.composite
def launches(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]]]:
    """K, and (committed tokens, drafts, accepted) of every launch of one row: chunks of a prompt, then rounds."""
    most = draw(st.integers(0, 5))
    chunks = [(n, 0, 0) for n in draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))]
    rounds = []
    for _ in range(draw(st.integers(1, 12))):
        drafts = draw(st.integers(0, most))
        rounds.append((1, drafts, draw(st.integers(0, drafts))))
    return most, chunks + rounds


@given(launches(), st.integers(1, 5))
def test_a_state_and_its_rings_hold_what_a_launch_needs(case: tuple[int, list[tuple[int, int, int]]], k: int) -> None:
    most, row = case
    ring: dict[int, tuple[str, int]] = {}
    conv: dict[int, tuple[str, int]] = {}
    size, conv_size = state_ring_size(most), conv_ring_size(k, most)
    state: list[int] = []
    folded = start = 0
    for number, (num_new, drafts, accepted) in enumerate(row):
        replay = int(replay_of(np.array(start), np.array(folded)))
        assert 0 <= replay <= most
        before = np.arange(start - replay, start)
        kept = [ring.get(int(place)) for place in ring_place(before, size)]
        assert kept == [("true", p) for p in before]  # every accepted draft, and none that was rejected
        state += before.tolist() + list(range(start, start + num_new))
        assert state == list(range(start + num_new))  # each token once, in order
        own = range(start + num_new, start + num_new + drafts)
        assert not set(ring_place(before, size).tolist()) & {p % size for p in own}
        for p in own:
            ring[p % size] = ("true" if p < start + num_new + accepted else f"rejected in {number}", p)
        taps = range(max(start - k + 1, 0), start)
        assert [conv.get(p % conv_size) for p in taps] == [("true", p) for p in taps]
        for p in range(max(start, start + num_new + drafts - conv_size), start + num_new + drafts):
            conv[p % conv_size] = ("true" if p < start + num_new + accepted else f"rejected in {number}", p)
        folded = int(folded_after(np.array(start), np.array(num_new)))
        start += num_new + accepted


def index(**changes: list[int]) -> StateIndex:
    arrays = {"slots": [1, 2], "start": [5, 0], "replay": [2, 0], "num_new": [1, 4]} | changes
    return StateIndex.of(**{name: np.array(values) for name, values in arrays.items()})


def test_contradictions_are_found() -> None:
    lens = np.array([4, 4])
    index().validate(lens, 3)
    index(slots=[0, 0]).validate(lens, 3)  # padding rows share the null slot
    for changes, message in (
        ({"slots": [2, 2]}, "two rows share a state"),
        ({"replay": [6, 0]}, "replays what it never read"),
        ({"num_new": [5, 4]}, "commits no token, or more than it reads"),
        ({"num_new": [0, 4]}, "commits no token"),
    ):
        with pytest.raises(InvariantError, match=message):
            index(**changes).validate(lens, 3)
    with pytest.raises(InvariantError, match="replays more than K"):
        index().validate(lens, 1)
