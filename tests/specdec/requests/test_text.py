"""Text while it arrives, against the definition: decode every prefix, one token at a time, and look for the stops."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes import EOS, LetterTokenizer, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import specdec
from specdec.requests.text import TextStream, Vocabulary

UNFINISHED = "\ufffd"
SPECIAL = "<end>"


def bpe(words: Sequence[str], decoder: Any, **options: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(dict.fromkeys(words))}, [], **options))
    tokenizer.decoder = decoder
    return tokenizer


def fast(tokenizer: Tokenizer, **options: Any) -> Any:
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def byte_fallback() -> Any:
    """As Llama-2's: pieces with ▁ for a space, bytes for what has no piece, one space dropped at the start."""
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a", "▁▁", "ab", "é", "€"]
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast(bpe(pieces, decoder, byte_fallback=True, unk_token="<unk>"))


def byte_level() -> Any:
    """As GPT-2's and Llama-3's: a token is any string of bytes, written in printable characters."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    tokens = [bytes([b]) for b in range(256)]
    tokens += [b"ab", b"\xe2\x82", b"\x82\xac", b"b\xe2", b"\xaca", b" a", "😀a".encode(), "a�".encode()]
    return fast(bpe(["".join(letters[b] for b in t) for t in tokens], decoders.ByteLevel()))


def metaspace() -> Any:
    """As sentencepiece's: the space of the first token is dropped."""
    return fast(bpe(["▁", "▁a", "a", "b", "▁b", "▁▁a", ".", "é"], decoders.Metaspace()))


def word_piece() -> Any:
    """Words joined by spaces, which are cleaned up before punctuation."""
    words = ["[UNK]", "a", "##b", ".", "'", "n", "t", "n't", "s", "!", "##t", "##'t", "do"]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    from tokenizers import pre_tokenizers

    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.normalizer = normalizers.NFC()
    return fast(tokenizer, clean_up_tokenization_spaces=True)


TOKENIZERS = {make.__name__: make() for make in (byte_fallback, byte_level, metaspace, word_piece, LetterTokenizer)}
# ids that a run of tokens is likely to be made of: pieces, pieces of characters, the special token, an unknown id
COMMON = {
    "byte_fallback": [
        *range(257, 265),
        1 + 0x20,
        1 + 0x0A,
        1 + 0xE2,
        1 + 0x82,
        1 + 0xAC,
        1 + 0xFF,
        1 + 0x61,
        265,
        9999,
    ],
    "byte_level": [*range(256, 265), 0x61, 0x20, 0xE2, 0x82, 0xAC, 0xEF, 0xBF, 0xBD, 0xF0, 0x9F, 9999],
    "metaspace": [*range(9), 9999],
    "word_piece": [*range(1, 14), 9999],
    "LetterTokenizer": [0, 1, 2, 62, EOS],
}
STOPS = {
    "byte_fallback": "ab €é\n",
    "byte_level": "ab €😀�",
    "metaspace": "ab .é",
    "word_piece": "ab.'nts! ",
    "LetterTokenizer": "abc ",
}


def naive(tokenizer: Any, ids: list[int], stops: list[str]) -> tuple[int | None, str]:
    """The definition: with how many tokens a request of these tokens ends, and its text."""
    specials: list[tuple[int, str]] = []
    before = ""
    for n in range(1, len(ids) + 1):
        shown = tokenizer.decode([ids[n - 1]], skip_special_tokens=False)
        if shown != tokenizer.decode([ids[n - 1]], skip_special_tokens=True):
            specials.append((len(before), shown))
        before = tokenizer.decode(ids[:n], skip_special_tokens=True).rstrip(UNFINISHED)
        places = [before.find(stop) for stop in stops]
        woven: list[tuple[int, str]] = []  # (characters of the text before it, character)
        done = 0
        for at, special in [*specials, (len(before), "")]:
            woven += [(i, before[i]) for i in range(done, min(at, len(before)))] + [(at, c) for c in special]
            done = max(done, min(at, len(before)))
        written = "".join(c for _, c in woven)
        places += [woven[written.find(stop)][0] if stop in written else -1 for stop in stops]
        found = [at for at in places if at >= 0]
        if found:
            return n, tokenizer.decode(ids[:n], skip_special_tokens=True)[: min(found)]
    return None, tokenizer.decode(ids, skip_special_tokens=True)


def stream(tokenizer: Any, ids: list[int], stops: list[str], cuts: list[int]) -> tuple[int | None, str, list[str]]:
    """The loop that a request makes, with rounds of cuts[i] tokens."""
    text, known, pieces, end = TextStream(Vocabulary(tokenizer), stops), 0, [], None
    turn = 0
    while known < len(ids) and end is None:
        known = min(known + cuts[turn % len(cuts)], len(ids))
        turn += 1
        end = text.push(ids[:known], known)
        if end is None:
            pieces.append(text.show())
    whole, rest = text.finish(ids[: end or len(ids)])
    return end, whole, [*pieces, rest]


def check(name: str, ids: list[int], stops: list[str], cuts: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    end, whole, pieces = stream(tokenizer, ids, stops, cuts)
    assert (end, whole) == naive(tokenizer, ids, stops)
    assert "".join(pieces) == whole, "the pieces are the text"


@st.composite
def requests(draw: st.DrawFn, name: str, most: int) -> tuple[list[int], list[str], list[int]]:
    ids = draw(st.lists(st.sampled_from(COMMON[name]), min_size=1, max_size=most))
    letters = [*STOPS[name], SPECIAL]
    stops = draw(st.lists(st.lists(st.sampled_from(letters), min_size=1, max_size=3).map("".join), max_size=3))
    return ids, stops, draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(("most", "whole"), [pytest.param(12, 150, marks=pytest.mark.slow), (90, 40)])
@pytest.mark.cases(1)
def test_every_stream_is_what_the_definition_says(name: str, most: int, whole: int) -> None:
    @settings(max_examples=examples(whole), deadline=None)
    @given(requests(name, most))
    def run(request: tuple[list[int], list[str], list[int]]) -> None:
        check(name, *request)

    run()


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.cases(1)
def test_the_text_of_a_request_without_stops_is_the_tokenizers(name: str) -> None:
    @settings(max_examples=examples(60), deadline=None)
    @given(requests(name, 200))
    def run(request: tuple[list[int], list[str], list[int]]) -> None:
        ids, _, cuts = request
        check(name, ids, [], cuts)

    run()


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.decoded = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def decode(self, token_ids: list[int], **options: Any) -> str:
        self.decoded += len(token_ids)
        return str(self.tokenizer.decode(token_ids, **options))


LONG = {
    "pieces": ("byte_fallback", [257, 258, 259]),
    "a run of bytes": ("byte_fallback", [1 + b for b in "€😀".encode()]),
    "a run of broken bytes": ("byte_fallback", [1 + 0xFF, 1 + 0xE2]),
    "broken characters": ("byte_level", [0xFF, 0xE2]),
    "special tokens": ("byte_level", [264]),
    "unknown ids": ("byte_level", [9999]),
    "words": ("word_piece", [1, 2, 3]),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("stops", [[], ["zzz"]])
@pytest.mark.cases(1)
def test_a_long_answer_is_decoded_in_windows(kind: str, stops: list[str]) -> None:
    """Tokens decoded grow with the length, not with its square."""
    name, cycle = LONG[kind]

    def decoded(length: int) -> int:
        tokenizer = Counting(TOKENIZERS[name])
        ids = (cycle * length)[:length]
        _, whole, pieces = stream(tokenizer, ids, stops, [3])
        assert "".join(pieces) == whole
        return tokenizer.decoded

    short, long = decoded(400), decoded(1600)
    assert long < 4.5 * short + 200


def test_a_possible_beginning_of_a_stop_is_held_back() -> None:
    ids = LetterTokenizer()("xabd")["input_ids"]
    text = TextStream(Vocabulary(LetterTokenizer()), ["abc"])
    shown = []
    for n in (2, 3, 4):
        assert text.push(ids, n) is None
        shown.append(text.show())
    assert shown == ["x", "", "abd"]


def test_characters_before_an_unfinished_one_are_shown() -> None:
    text = TextStream(Vocabulary(TOKENIZERS["byte_level"]))
    ids = [0x61, 259]  # "a", and "b" with the first byte of the next character
    text.push(ids, 2)
    assert text.show() == "ab"


def test_a_run_of_bytes_is_shown_when_nothing_can_change_it() -> None:
    """A byte that is not valid UTF-8 turns the whole run into U+FFFD."""
    tokenizer = TOKENIZERS["byte_fallback"]
    text = TextStream(Vocabulary(tokenizer))
    ids = [258, *(1 + b for b in "€".encode()), 258]
    text.push(ids, 4)
    assert text.show() == "a"
    text.push(ids, 5)
    assert text.show() == "€a"
    assert tokenizer.decode([*ids[:4], 1 + 0xFF]) == "a" + 4 * UNFINISHED


@pytest.mark.parametrize("cuts", [[1], [3]])
def test_the_space_that_is_dropped_at_the_start_is_no_text(cuts: list[int]) -> None:
    """Also where it is spelled as a byte."""
    for ids in ([1 + 0x20, 258], [1 + 0x20, 1 + 0x61, 1 + 0x20, 258], [265, 1 + 0x20, 1 + 0x20, 1 + 0x61]):
        check("byte_fallback", ids, [" "], cuts)


@pytest.mark.parametrize("stops", [[], ["xyz"]])
def test_a_stream_that_goes_back_shows_nothing_twice(stops: list[str]) -> None:
    """After a failed round a request goes on from what was reported, tokens and characters."""
    ids = LetterTokenizer()("abcdefgh")["input_ids"]
    text = TextStream(Vocabulary(LetterTokenizer()), stops)
    text.push(ids, 3)
    assert text.show() == "abc"
    text.push(ids, 7)
    assert text.show() == "defg", "of a round that failed after it: never reported"
    text.rewind(ids[:3], 3)
    assert text.num_shown == 3 and text.show() == ""
    other = [*ids[:3], *LetterTokenizer()("mn")["input_ids"]]
    text.push(other, 5)
    assert text.show() == "mn" and text.finish(other) == ("abcmn", "")


def test_a_stream_that_goes_back_holds_what_may_become_a_stop() -> None:
    ids = LetterTokenizer()("abxyz")["input_ids"]
    text = TextStream(Vocabulary(LetterTokenizer()), ["xyz"])
    text.push(ids, 4)
    assert text.show() == "ab"
    text.rewind(ids[:4], 2)
    assert text.show() == "" and text.push(ids, 5) == 5 and text.finish(ids) == ("ab", "")


def test_two_stop_strings_cut_at_the_first() -> None:
    ids = LetterTokenizer()("qqabc")["input_ids"]
    text = TextStream(Vocabulary(LetterTokenizer()), ["bc", "abc"])
    assert text.push(ids, 5) == 5 and text.finish(ids)[0] == "qq"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_short_streams_are_what_the_definition_says(name: str) -> None:
    """The property above on fixed sequences, for the quick tests."""
    rng = random.Random(name)
    for _ in range(60):
        ids = [rng.choice(COMMON[name]) for _ in range(rng.randrange(1, 14))]
        ids = [token for token in ids if token != 9999]
        stops = ["".join(rng.choice(STOPS[name]) for _ in range(rng.randrange(1, 4))) for _ in range(rng.randrange(3))]
        if rng.random() < 0.4:
            stops.append(rng.choice((SPECIAL, "a" + SPECIAL, SPECIAL + "b", SPECIAL + SPECIAL)))
        check(name, ids, stops, [rng.randrange(1, 4) for _ in range(3)])


@pytest.mark.parametrize("name", ["byte_fallback", "byte_level", "metaspace", "word_piece"])
def test_windows_of_a_long_answer_join_without_a_seam(name: str) -> None:
    """Long enough for the window to move several times, at every place of a short cycle of tokens."""
    rng = random.Random(name)
    for length in range(3, 9):
        cycle = [token for token in (rng.choice(COMMON[name]) for _ in range(length)) if token != 9999] or [1]
        check(name, (cycle * 40)[:90], [], [1 + length % 3])


def test_a_later_beginning_of_a_stop_string_is_held_back_too() -> None:
    ids = LetterTokenizer()("acabac")["input_ids"]
    text = TextStream(Vocabulary(LetterTokenizer()), ["abac"])
    text.push(ids, 3)
    assert text.show() == "ac", "'aca' is no beginning of 'abac', its last letter is"
    assert text.push(ids, 6) == 6 and text.finish(ids) == ("ac", "")


def test_a_character_after_many_broken_ones_is_not_shown_unfinished() -> None:
    """Text that never looks finished is final some tokens back: further than a character has bytes."""
    for length in range(58, 68):
        ids = [0xE2] * length + [0x82, 0xAC, 0x61]
        check("byte_level", ids, [], [1])
        check("byte_level", ids, ["xyz"], [1])


@pytest.mark.parametrize(
    ("ids", "stops", "cuts"),
    [
        (
            [258, 258, 258, 258, 131, 131, 258, 258, 131, 258, 131, 258, 131, 258, 258, 33, 258, 258, 33, 33, 131],
            [],
            [2, 4, 3],
        ),
        (
            [264, 264, 264, 258, 258, 264, 258, 258, 264, 264, 264, 264, 258, 264, 258, 264, 258, 258, 258],
            ["a \n"],
            [3, 4, 3],
        ),
        ([258] * 20 + [1 + 0xE2, 1 + 0x82, 1 + 0xAC, 1 + 0xE2, 258] * 8, [], [1]),
        ([258] * 20 + [1 + 0xC3, 1 + 0xA9, 1 + 0x20, 1 + 0x61] * 10, ["zz"], [2]),
    ],
)
def test_streams_that_once_went_wrong(ids: list[int], stops: list[str], cuts: list[int]) -> None:
    """Where a window moves in the midst of bytes, spaces and beginnings of stop strings; found by planted defects."""
    check("byte_fallback", ids, stops, cuts)


def written(tokenizer: Any, ids: Sequence[int]) -> bytes:
    """The bytes of these tokens, those that leave text."""
    vocabulary, found = Vocabulary(tokenizer), []
    for token_id in ids:
        own, is_special = vocabulary.written(token_id, first=not found)
        found += [] if is_special else [own]
    return b"".join(found)


@pytest.mark.parametrize("name", ["byte_fallback", "byte_level", "metaspace", "LetterTokenizer"])
@settings(max_examples=examples(150))
@given(data=st.data())
@pytest.mark.cases(1)
def test_bytes_of_tokens_are_those_of_their_text(name: str, data: st.DataObject) -> None:
    """Also of tokens that are parts of a character, and of decoders that drop the first space."""
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.sampled_from(COMMON[name]), max_size=12))
    text, found = tokenizer.decode(ids, skip_special_tokens=True), written(tokenizer, ids)
    if name == "byte_fallback" and UNFINISHED in text:  # it shows a whole run of bytes as U+FFFD where one is wrong
        return
    assert found.decode("utf-8", "replace") == text
    assert UNFINISHED in text or found == text.encode()


def test_words_that_are_joined_by_spaces_have_them() -> None:
    tokenizer = word_piece()
    tokenizer.clean_up_tokenization_spaces = False
    ids = [12, 10, 1, 2, 3]
    assert written(tokenizer, ids) == tokenizer.decode(ids).encode() == b"do##t a##b .".replace(b"##", b"")


class Short(LetterTokenizer):
    """Its decode raises for ids beyond its table, as those of slow tokenizers do."""

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join("abc"[token_id] for token_id in token_ids)


def test_what_leaves_no_text_is_written_out_or_has_no_bytes() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    special = tokenizer.convert_tokens_to_ids(SPECIAL)
    assert Vocabulary(tokenizer).written(special) == (SPECIAL.encode(), True)
    assert Vocabulary(tokenizer).written(9999) == (b"", True)
    assert Vocabulary(Short()).written(9999) == (b"", True), "which its decode refuses"


@pytest.mark.parametrize("name", ["byte_fallback", "byte_level", "gsm-llama"])
def test_grammars_read_the_same_bytes(name: str) -> None:
    """llguidance has its own function, which its matchers follow; both say the same of every token."""
    made = pytest.importorskip("llguidance.hf")
    folder = Path(specdec.__file__).parent / "models" / name
    tokenizer = TOKENIZERS.get(name) or AutoTokenizer.from_pretrained(folder)
    other, vocabulary = made.from_tokenizer(tokenizer, eos_token=0), Vocabulary(tokenizer)
    each = [(vocabulary.written(i)[0], other.decode_bytes([i])) for i in range(len(tokenizer))]
    assert [pair for pair in each if pair[0] != pair[1]] in ([], [(b"\xff", b"")]), "FF is in no text, and its mark"
