"""Text while it arrives: complete characters only, never part of a stop string, and in the end the whole text."""

from __future__ import annotations

import pytest
from fakes import EOS, LetterTokenizer
from hypothesis import given
from hypothesis import strategies as st

from specdec.requests.text import StopFinder, TextStream


class ByteTokenizer:
    """Id = byte: a character may need several tokens."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode("utf-8", "replace")


class WordTokenizer:
    """A space before every word but the first of a decoded piece, as sentencepiece tokenizers have it."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return " ".join(f"w{t}" for t in token_ids)


def ids(text: str) -> list[int]:
    return LetterTokenizer()(text)["input_ids"]


def cut_up(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    """Prefixes of `tokens` that grow by cuts[i] tokens."""
    out, at = [], 0
    for cut in [*cuts, len(tokens)]:
        at = min(at + cut, len(tokens))
        out.append(tokens[:at])
        if at == len(tokens):
            return out
    return out


@given(st.text(max_size=12), st.lists(st.integers(1, 4), max_size=30))
def test_pieces_are_complete_characters_and_join_to_the_text(text: str, cuts: list[int]) -> None:
    text = text.replace("\ufffd", "")
    tokens = list(text.encode("utf-8"))
    stream = TextStream(ByteTokenizer(), ())
    pieces = [stream.push(prefix) for prefix in cut_up(tokens, cuts)]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + stream.finish(text) == text


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.lists(st.integers(1, 4), max_size=12))
def test_a_tokenizer_that_drops_the_first_space_keeps_its_spaces(tokens: list[int], cuts: list[int]) -> None:
    stream = TextStream(WordTokenizer(), ())
    pieces = [stream.push(prefix) for prefix in cut_up(tokens, cuts)]
    assert "".join(pieces) == WordTokenizer().decode(tokens)


@given(
    st.text(alphabet="ab", max_size=14),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), max_size=14),
)
def test_what_streamed_is_the_text_before_the_first_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    """The loop that the engine makes: look for a stop, then push or finish."""
    tokens, streamed = ids(text), ""
    stream, finder = TextStream(LetterTokenizer(), stops), StopFinder(LetterTokenizer(), stops)
    kept, known = tokens, 0
    for prefix in cut_up(tokens, cuts):
        found = finder.find(prefix, len(prefix) - known)
        known = len(prefix)
        if found is not None:
            kept = tokens[:found]
            break
        streamed += stream.push(prefix)
    first_end = min((text.find(s) + len(s) for s in stops if s in text), default=len(text))
    assert len(kept) == first_end, "ends with the token that completes the earliest complete stop"
    whole = finder.cut(LetterTokenizer().decode(kept))
    assert not any(stop in whole for stop in stops)
    assert whole.startswith(streamed), "nothing was streamed that the text does not have"
    assert streamed + stream.finish(whole) == whole


def test_a_possible_beginning_of_a_stop_is_held_back() -> None:
    stream = TextStream(LetterTokenizer(), ["abc"])
    assert stream.push(ids("xa")) == "x"
    assert stream.push(ids("xab")) == ""
    assert stream.push(ids("xabd")) == "abd"


def test_a_stop_string_may_be_a_special_token() -> None:
    finder = StopFinder(LetterTokenizer(), ["<end>"])
    assert finder.find([1, 2, EOS, 4], 3) == 3
    assert finder.find([1, 2, 4], 2) is None


@pytest.mark.parametrize("stop", ["q", "pq", "opq", "nopq"])
def test_several_new_tokens_at_once(stop: str) -> None:
    finder = StopFinder(LetterTokenizer(), [stop])
    assert finder.find(ids("abcdefghijklmnopqrstuv"), 8) == 17


def test_without_stops_nothing_is_decoded() -> None:
    assert StopFinder(None, ()).find([1, 2, 3], 3) is None  # type: ignore[arg-type]
