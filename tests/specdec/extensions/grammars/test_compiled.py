"""Masks of a vocabulary, and which compiled grammars are kept."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed")

from specdec.extensions.grammars import compiled
from specdec.extensions.grammars.compiled import compiler_of
from specdec.requests.grammar import Grammar
from tests.specdec.extensions.grammars.spelled import END, tokenizer


def test_a_mask_without_some_tokens_has_all_others() -> None:
    mask = compiler_of(tokenizer(), 64, END).without([0, 5, 31, 32, 63])
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits == 0).tolist() == [0, 5, 31, 32, 63]


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
