"""Markers and texts with line ends, slashes and special tokens; grammars that begin behind the prompt's own marker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specdec import Grammar, InvalidInputError
from specdec.extensions.grammars.compiled import compiler_of
from specdec.extensions.grammars.following import FollowedGrammar
from tests.specdec.extensions.grammars.spelled import END, MARK, SPELLED, text_of, tokenizer
from tests.specdec.extensions.grammars.test_grammars import made, params

pytest.importorskip("llguidance")


def ids_of(text: str) -> list[int]:
    """Its characters, one token each."""
    return [SPELLED.index(character) for character in text]


def allowed(grammar: FollowedGrammar, ids: Sequence[int]) -> set[int]:
    """What may come after these tokens."""
    grammar.follow(ids)
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
        assert at > 1 and len(allowed(own, ids[:-1])) < 20 < len(allowed(own, ids))


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
        compiler_of(tokenizer(), 64, END).compiled(grammar)


def test_special_tokens_that_are_meant_as_such() -> None:
    compiler = compiler_of(tokenizer(), 64, END)
    for grammar in (
        Grammar.lark('start: "a" <mark> "b" // "<end>"'),
        Grammar.regex("a", begin="<mark>", end="<end>"),
        Grammar.regex("a", begin="e<mark>", end=[MARK, MARK]),
        Grammar.regex("[<]?[end]*>"),
    ):
        assert compiler.compiled(grammar)


@pytest.mark.parametrize(
    ("begin", "behind", "before"),
    [
        ("e>", ["e>", "e>\n", "ae> \n\n ", "e>e>"], ["e", "e>.", "e>\n.", ".", "\n"]),
        ("e>\n", ["e>\n", "e>\n\n", "e>\n  "], ["e>", "e> \n"]),
        ([MARK], ["<mark>", "ab<mark>\n "], ["<mark>a", "ab", "\n"]),
        ("<mark>", ["<mark>", "<mark>\n"], ["<mark><"]),
        (ids_of("e>"), ["e>", "e> "], ["e>a"]),
        ("e<mark>.", ["e<mark>.", "e<mark>.\n"], ["<mark>."]),
        ("\n", ["\n", "\n\n", "a\n "], ["a", " "]),
    ],
)
def test_a_grammar_begins_at_once_where_the_prompt_ends_behind_its_marker(
    begin: Any, behind: Sequence[str], before: Sequence[str]
) -> None:
    """White space may be between; the end marker frees what follows, and another begin marker binds it again."""
    compiled = compiler_of(tokenizer(), 64, END).compiled(Grammar.regex("[0-9]{2}", begin=begin, end="."))
    for inside, prompts in ((True, behind), (False, before)):
        for prompt in prompts:
            own = FollowedGrammar(compiled, (), tokenizer().encode(prompt, add_special_tokens=False))
            assert (len(allowed(own, [])) < 20) == inside, prompt
            if inside:
                assert len(allowed(own, ids_of("1"))) < len(allowed(own, ids_of("12.")))
                assert len(allowed(own, [])) < 20, "begun anew"
    assert not compiled.begins_after([]) and not compiled.begins_after(ids_of("\n" * 500)[: 400 * (begin != "\n")])


@pytest.mark.slow
def test_completions_say_whether_their_grammar_started() -> None:
    """A marker that never comes leaves an answer free, which nothing else would tell."""
    model, own = made(), Grammar.json({"const": 12}, begin="e>")
    unlikely = {i: -50.0 for i, text in enumerate(SPELLED) if ">" in text}
    (free,) = model.generate([3], params(own, logit_bias=unlikely))
    assert free.grammar_started is False and not free.text.startswith("12")
    for prompt in ("e>", "ae>\n\n"):
        for k in (0, 1, 4):
            (bound,) = model.generate(ids_of(prompt), params(own, num_speculative_tokens=k))
            assert bound.grammar_started is True and bound.text.strip() == "12" and bound.finish_reason == "stop"
    likely = {SPELLED.index("e>"): 50.0}
    (late,) = model.generate([3], params(own, logit_bias=likely))
    assert late.grammar_started is True and late.text.startswith("e>")
    (always,) = model.generate([3], params(Grammar.choice(["ab"])))
    (without,) = model.generate([3], replace(params(None), max_new_tokens=2))
    assert (always.grammar_started, without.grammar_started) == (True, None)


def test_tokens_that_end_a_marker_and_go_on_as_the_grammar_cannot() -> None:
    own = FollowedGrammar(compiler_of(tokenizer(), 64, END).compiled(Grammar.regex("[0-9]{2}", begin="e>")))
    assert len(allowed(own, [])) == 64
    assert set(range(64)) - allowed(own, ids_of("e")) == {SPELLED.index(">{")}
    assert allowed(own, [*ids_of("e"), SPELLED.index(">7")]) == set(ids_of("0123456789"))
