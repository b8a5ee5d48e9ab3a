"""Masks of a vocabulary, and which compiled grammars are kept."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed")

from specdec.extensions.grammars import compiled
from specdec.extensions.grammars.compiled import compiler_of
from specdec.extensions.grammars.following import FollowedGrammar
from specdec.loading.tokenizers import load_tokenizer
from specdec.requests.grammar import Grammar
from tests.specdec.extensions.grammars.spelled import END, tokenizer


def test_a_mask_without_some_tokens_has_all_others() -> None:
    mask = compiler_of(tokenizer(), 64, END).without([0, 5, 31, 32, 63])
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits == 0).tolist() == [0, 5, 31, 32, 63]


@pytest.mark.parametrize("limits", [{"maxLength": 12}, {"minLength": 3, "maxLength": 9}, {"pattern": "^[a-h ]{2,7}$"}])
def test_masks_near_a_limit_are_those_of_other_slices(limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which tokens are allowed at once is a matter of speed alone."""
    masks: list[list[bytes]] = []
    for slices in (compiled.SLICES, []):
        monkeypatch.setattr(compiled, "SLICES", slices)
        own = load_tokenizer("gsm-llama")
        compiler = compiled.GrammarCompiler(own, len(own), own.eos_token_id)
        matcher = compiler.compiled(Grammar.json({"type": "string"} | limits)).matcher()
        masks.append([])
        for text in '"abcdefghijkl':
            found = np.full((1, compiler.words), -1, np.int32)
            assert compiler.fill([(matcher.deep_copy(), 0, [])], found)
            masks[-1].append(found.tobytes())
            matcher.try_consume_tokens(own.encode(text, add_special_tokens=False))
    assert masks[0] == masks[1] and len(set(masks[0])) > 6


def test_requests_of_a_grammar_copy_several_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of one take turns at its lock. One that compiles slowly has one, and texts behind a marker make none."""
    monkeypatch.setattr(compiled, "MOST_TEMPLATES", 3)
    compiler = compiled.GrammarCompiler(tokenizer(), 64, END)
    for seconds, count in ((100.0, 3), (0.0, 1)):
        monkeypatch.setattr(compiled, "_QUICK_SECONDS", seconds)
        own = compiler.compile(Grammar.regex("[ab]{3}"))
        grown = []
        for _ in range(5):
            FollowedGrammar(own)
            matchers = [own.matcher() for _ in range(4)]
            masks = np.full((4, compiler.words), -1, np.int32)
            assert compiler.fill([(each, row, []) for row, each in enumerate(matchers)], masks, own.can_loop)
            assert len({mask.tobytes() for mask in masks}) == 1
            grown.append(len({id(each) for each in own.templates}))
        assert grown == [min(count, i) for i in range(1, 6)]


def test_many_threads_make_no_more_templates_and_an_error_is_no_request_s(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = compiled.GrammarCompiler(tokenizer(), 64, END)
    monkeypatch.setattr(compiled, "_QUICK_SECONDS", 100.0)
    own = compiler.compile(Grammar.regex("[ab]{3}"))
    with ThreadPoolExecutor(24) as pool:
        assert all(pool.map(lambda _: FollowedGrammar(own).masks([], compiler.words).chains, range(48)))
    assert len(own.templates) == compiled.MOST_TEMPLATES

    def late() -> None:
        raise ValueError("llguidance did not compile it within 30 s")

    other = replace(compiler.compile(Grammar.regex("[ab]{3}")), another=late)
    assert all(FollowedGrammar(other).masks([], compiler.words).chains for _ in range(3)) and len(other.templates) == 1


def test_the_last_grammars_that_were_used_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_KEPT", 2)
    compiler, made = compiled.GrammarCompiler(tokenizer(), 64, END), list[str]()
    plain = compiler.compile
    monkeypatch.setattr(compiler, "compile", lambda grammar: (made.append(grammar.source), plain(grammar))[1])
    for text in ("a", "b", "a", "c", "a", "b"):
        compiler.compiled(Grammar.regex(text))
    assert made == ["a", "b", "c", "b"] and len(compiler.kept) == 2


def test_a_grammar_that_is_there_waits_for_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds ask for grammars, and the compiler may take half a minute for another one."""
    compiler, began, goes_on = compiled.GrammarCompiler(tokenizer(), 64, END), threading.Event(), threading.Event()
    kept, plain = compiler.compiled(Grammar.regex("a")), compiler.compile

    def slow(grammar: Grammar) -> compiled.CompiledGrammar:
        began.set()
        assert goes_on.wait(60)
        return plain(grammar)

    monkeypatch.setattr(compiler, "compile", slow)
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(compiler.compiled, Grammar.regex("b")) for _ in range(2)]
        assert began.wait(60)
        try:
            assert pool.submit(compiler.compiled, Grammar.regex("a")).result(10) is kept
        finally:
            goes_on.set()
        assert both[0].result(60) is both[1].result(60)
