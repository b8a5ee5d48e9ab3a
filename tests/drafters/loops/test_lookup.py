"""TokenIndex against a search of the whole text, and its time and memory over a long one."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import pytest
from fakes import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import drafters.loops.lookup as module
from drafters.loops.lookup import END, SharedTexts, TokenIndex

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def common(text: Sequence[int], end: int, other: Sequence[int], place: int) -> int:
    """Equal tokens up to `end` of a text and up to `place` of another."""
    count = 0
    while count <= min(end, place) and text[end - count] == other[place - count]:
        count += 1
    return count


def longest(text: list[int], least: int, most: int) -> tuple[int, int]:
    """(length, place) of the longest match, the last of several, by looking at every place."""
    found = [(min(common(text, len(text) - 1, text, place), most), place) for place in range(len(text) - 1)]
    length, place = max(found, default=(0, -1))
    return (length, place) if length >= least else (0, -1)


@settings(max_examples=examples(200), deadline=None)
@given(TEXTS, st.integers(1, 4), st.integers(0, 12), st.integers(1, 9))
def test_the_longest_match_is_found_whatever_is_appended_at_once(
    text: list[int], least: int, more: int, parts: int
) -> None:
    """With as many places as there are; matches longer than `longest` are as good as one of that length."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PLACES", 1000)
        index = TokenIndex(least, least + more)
        for first in range(0, len(text), parts):
            index.extend(text[first : first + parts])
            seen = text[: first + parts]
            match = index.longest(index.tokens)
            assert (match.length, match.place) == longest(seen, least, least + more)
            other = TokenIndex(least, least + more)
            other.extend([*seen[:-1], END])
            of_other = other.longest(seen)  # the same search in a text of its own, which ends before the last token
            assert of_other.length >= match.length or match.place == len(seen) - 2


@settings(max_examples=examples(100), deadline=None)
@given(TEXTS, st.integers(1, 3), st.integers(1, 8))
def test_proposals_follow_the_match_and_repeat_a_period(text: list[int], least: int, most: int) -> None:
    index = TokenIndex(least, 16)
    index.extend(text)
    match, found = index.longest(index.tokens), index.propose(most)
    assert len(found) == min(most, match.length * match.agreeing)
    longer = list(text)
    for i, token in enumerate(found):
        assert token == longer[match.place + 1 + i]
        longer.append(token)


def test_no_match_reaches_from_one_text_into_the_next() -> None:
    index = TokenIndex(2, 8)
    index.extend([1, 2, 3, END, 4, 5, 6, END])
    assert index.proposed(index.longest([9, 2, 3]), 4) == []
    assert index.proposed(index.longest([9, 1, 2]), 4) == [3], "and nothing of the next text follows"
    assert index.proposed(index.longest([3, 4]), 4) == []


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(TEXTS, max_size=12), TEXTS)
def test_shared_texts_are_the_last_ones_and_bounded(texts: list[list[int]], asked: list[int]) -> None:
    shared = SharedTexts(2, 8, 80)
    for text in texts:
        shared.add(text)
        assert shared.num_tokens <= 80
    found = shared.propose(3, asked, 0)
    kept = [text[-39:] for text in texts]
    joined = [each for text in kept for each in (*text, END)]
    if found:
        assert any(joined[i : i + len(found)] == found for i in range(len(joined)))
    if kept and len(kept[-1]) > 4:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "PLACES", 1000)
            assert shared.propose(9, kept[-1][:3], 2) != [], "the last text is there, and goes on"


@pytest.mark.slow
@pytest.mark.thorough
def test_time_and_memory_of_a_token_do_not_grow_with_the_text() -> None:
    """Two texts of 100,000 tokens: one in which a match is found at every token, and one of few."""
    for vocab in (7, 4000):
        index, spent, sizes, state = TokenIndex(3, 32), [], [], 1
        for part in range(10):
            began = time.process_time()
            for _ in range(10_000):
                state = (state * 1103515245 + 12345 + part) % (1 << 31)
                index.extend([(state >> 16) % vocab])
                index.propose(8)
            spent.append(time.process_time() - began)
            sizes.append(sum(map(sys.getsizeof, vars(index).values())))
        assert min(spent[5:]) < 3 * max(min(spent[:5]), 0.02), spent
        assert sizes[-1] < 200 * 100_000


def test_of_equal_matches_in_two_texts_the_later_texts_counts() -> None:
    texts = SharedTexts(2, 8, 20)
    for text in ([1, 2, 3, 4, 5, 6, 7], [1, 2, 9]):  # two indexes of ten tokens at most
        texts.add(text)
    assert texts.num_tokens == 12 and texts.propose(1, [8, 1, 2], 0) == [9]
    assert texts.propose(1, [1, 2, 3], 0) == [4], "a longer match in the older one"
