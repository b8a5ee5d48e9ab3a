"""Where a marker ends, against a search in the whole text, for markers whose parts repeat."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.extensions.grammars.schemas import MarkerFinder

TOKENS = [b"a", b"b", b"ab", b"aab", b"ba", b"bb"]
MARKERS = st.text("ab", min_size=1, max_size=7).map(str.encode)


@pytest.mark.slow
@given(MARKERS, st.lists(st.integers(0, len(TOKENS) - 1), max_size=12))
@settings(max_examples=400, deadline=None)
def test_a_marker_is_found_where_it_first_ends(marker: bytes, ids: list[int]) -> None:
    check(marker, ids)


@pytest.mark.parametrize(
    ("marker", "ids"),
    [
        (b"aab", [0, 0, 0, 1]),
        (b"aabaaaa", [3, 0, 0, 0, 1, 0, 0, 0, 0]),
        (b"ba", [0, 1, 3]),
        (b"abab", [0, 1, 0, 0, 1, 0, 1]),
        (b"aabaaa", [3, 3, 0, 0]),
        (b"abaabab", [2, 0, 2, 0, 0, 4, 1]),
    ],
)
def test_a_marker_that_begins_again_inside_its_own_beginning(marker: bytes, ids: list[int]) -> None:
    check(marker, ids)


def check(marker: bytes, ids: list[int]) -> None:
    """Token by token until the first end: how much of the marker the text ends with, and then what comes after it."""
    finder, state, text = MarkerFinder(tuple(marker), lambda i: TOKENS[i], True), 0, b""
    for token_id in ids:
        text += TOKENS[token_id]
        state, rest = finder.after(state, token_id)
        end = text.find(marker)
        if end >= 0:
            assert (state, rest) == (0, text[end + len(marker) :])
            return
        assert rest is None and state == max(n for n in range(len(marker)) if text.endswith(marker[:n]))
