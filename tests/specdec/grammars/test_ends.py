"""Markers and texts with line ends, slashes and special tokens; grammars that begin behind the prompt's own marker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specdec import Grammar, InvalidInputError
from specdec.grammars.compiled import compiler_of
from specdec.grammars.following import FollowedGrammar
from tests.specdec.grammars.spelled import END, MARK, SPELLED, text_of, tokenizer
from tests.specdec.grammars.test_grammars import made, params

pytest.importorskip("llguidance")


def ids_of(text: str) -> list[int]:
    """Its characters, one token each."""
    return [SPELLED.index(character) for character in text]


def allowed(grammar: FollowedGrammar, ids: Sequence[int]) -> set[int]:
    """What may come after these tokens."""
    grammar.follow(ids, 0)
    assert grammar.error_at(len(ids)) is None, text_of(ids)
    assert grammar.vocabulary is not None
    masks = np.zeros((1, grammar.vocabulary.words), np.int32)
    row = grammar.masks([], grammar.vocabulary.words)
    grammar.vocabulary.fill(row.chains, masks)
    for mask in row.ready.values():
        masks[0] = -1 if mask is None else mask
    return {i for i in range(64) if masks[0][i // 32] >> i % 32 & 1}


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar.regex("[0-9]+", begin="a", end="\n"), "a12\n"),
        (Grammar.regex("[a-c]*", begin="a", end="\n,,"), "abcc\n,,"),
        (Grammar.regex("[0-9]+$", begin="a", end="."), "a12."),
        (Grammar.regex("^(?:1|2)$", begin="a", end="."), "a1."),
        (Grammar.regex("(?x) 1 2 # a comment\n", begin="a", end="\n"), "a12\n"),
        (Grammar.regex("a/b", begin="a", end="/"), "aa/b/"),
        (Grammar.regex(r"1\/2|3", begin="a", end=r"]/"), "a1/2]/"),
        (Grammar.regex("1|2", begin="a", end='"'), 'a2"'),
        (Grammar.choice(["a\nb", "c"], begin="a", end=">"), "aa\nb>"),
        (Grammar.choice(["a\nb"]), "a\nb"),
        (Grammar.choice(["b\n", "a/b"], begin="\n", end="\n"), "\nb\n\n"),
        (Grammar.json({"const": 1}, begin="a", end="\n."), "a1\n."),
        (Grammar.lark('start: "1" | "2\\n"', begin="a", end="\n/"), "a2\n\n/"),
    ],
)
def test_markers_and_texts_of_any_characters(grammar: Grammar, text: str) -> None:
    """Each token of the text may come, and behind the end everything."""
    own, ids = FollowedGrammar(compiler_of(tokenizer(), 64, END).compiled(grammar)), ids_of(text)
    for at, token_id in enumerate(ids):
        assert token_id in allowed(own, ids[:at]), text[:at]
    if grammar.end is not None:
        assert 1 < at and len(allowed(own, ids[:-1])) < 20 < len(allowed(own, ids))


def test_an_end_that_has_a_backslash() -> None:
    compiled = compiler_of(wide(), 512, 0).compiled(Grammar.regex("1|2", begin="a", end="\\/"))
    matcher = compiled.matcher()
    assert matcher.try_consume_tokens(list(wide().encode("1\\/"))) == 3 and matcher.is_stopped()


def wide() -> Any:
    """A token for each byte that is a character of its own."""
    own = tokenizer()
    backend = type(own.backend_tokenizer).from_str(own.backend_tokenizer.to_str())
    backend.add_tokens(["\\"])
    return own.__class__(tokenizer_object=backend, eos_token="<end>")


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.choice(["<end>e"]),
        Grammar.choice(["a", "ab<mark>"]),
        Grammar.regex("(?:<end>)?ab"),
        Grammar.regex("a", begin="b", end="<end>e"),
        Grammar.json({"const": "<end>"}),
        Grammar.json({"properties": {"a": {"enum": ["a", "<end>"]}}}),
        Grammar.lark('start: "<mark>" "a"'),
        Grammar.lark('start: "a" T // <end>\nT: /a<end>/'),
    ],
)
def test_texts_with_a_special_token_are_refused_by_name(grammar: Grammar) -> None:
    """As such a token it would end the request, or be missing in its text."""
    with pytest.raises(InvalidInputError, match=r"has <(?:end|mark)>, a special token"):
        made(None, num_speculative_tokens=0).generate([3], params(grammar))


def test_special_tokens_that_are_meant_as_such() -> None:
    compiler = compiler_of(tokenizer(), 64, END)
    for grammar in (
        Grammar.lark('start: "a" <mark> "b" // "<end>"'),
        Grammar.regex("a", begin="<mark>", end="<end>"),
        Grammar.regex("a", begin="e<mark>", end=[MARK, MARK]),
        Grammar.regex("[<]?[end]*>"),
    ):
        assert compiler.compiled(grammar)
