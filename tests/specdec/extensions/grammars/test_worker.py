"""Grammars from which llguidance does not return: their requests end by name, all others go on."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec import Grammar
from specdec.extensions.grammars.compiled import _can_loop
from specdec.extensions.grammars.worker import GrammarThread, GrammarThreads
from tests.rank_server import run_python

__all__ = ["run_python"]

ROOT = Path(__file__).resolve().parents[4]
LIB = SimpleNamespace(LLExecutor=object)
HANGS = """
import sys
import specdec.extensions.grammars.compiled as compiled
compiled.FILL_SECONDS = 1.0
from specdec import Grammar, SamplingParams, SpeculativeModel
from specdec.errors import InvalidInputError, RequestFailedError
drafts = int(sys.argv[1])
model = SpeculativeModel.from_pretrained("gsm-llama", "auto" if drafts else None, device="cpu")
params = SamplingParams(grammar=Grammar.lark('start: /a*/ "a"'), max_new_tokens=8)
streams = [model.stream("Is it?", params), model.stream("How many?", SamplingParams(max_new_tokens=8))]
try:
    for update in streams[0]:
        pass
except RequestFailedError as error:
    print(error)
print(sum(len(update.token_ids) for update in streams[1]))
try:
    model.generate("Is it?", params)
except InvalidInputError as error:
    print("refused:", error)
"""


def test_a_call_that_does_not_return_is_left_behind() -> None:
    workers, never = GrammarThreads(LIB), threading.Event()
    assert workers.returns(lambda worker: None, 5.0) and workers.lost == 0
    assert not workers.returns(lambda worker: never.wait(), 0.05) and workers.lost == 1  # type: ignore[func-returns-value]
    assert workers.returns(lambda worker: None, 5.0), "the next call has a worker of its own"
    never.set()


def test_a_call_waits_for_no_other() -> None:
    """Masks of a round are not late because a grammar is being compiled; and an idle worker is taken again."""
    workers, began, done = GrammarThreads(LIB), threading.Event(), threading.Event()

    def compiles(worker: GrammarThread) -> None:
        began.set()
        assert done.wait(60.0)

    slow = threading.Thread(target=workers.returns, args=(compiles, 60.0))
    slow.start()
    assert began.wait(60.0)
    seen: list[GrammarThread] = []
    assert workers.returns(seen.append, 5.0) and workers.returns(seen.append, 5.0)
    done.set()
    slow.join(60.0)
    assert seen[0] is seen[1] and workers.lost == 0


@pytest.mark.parametrize("kind", [ValueError, TimeoutError])
def test_what_a_call_raises_is_raised(kind: type[Exception]) -> None:
    def fails(worker: GrammarThread) -> None:
        raise kind("planted")

    with pytest.raises(kind, match="planted"):
        GrammarThreads(LIB).returns(fails, 5.0)


def test_grammars_whose_forced_tokens_are_not_asked_for() -> None:
    """The call for them holds the GIL, so it must return."""
    structure = {"begin": "<a>", "schema": {"type": "integer"}, "end": "1</a>"}
    looping = [
        Grammar.lark('start: "a"'),
        Grammar.json({"type": "integer"}, begin="<", end="1"),
        Grammar.structural_tag([structure], ["<a>"]),
        Grammar.json(own := {"type": "array", "x-guidance": {"item_separator": ",1*"}}),
        Grammar.json({"type": "array", "x-guidance": {"whitespace_pattern": "[ 1]*"}}),
        Grammar.json(json.dumps(own).replace("item", "\\u0069tem")),
        Grammar.structural_tag([structure | {"schema": own, "end": "</a>"}], ["<a>"]),
    ]
    safe = [
        Grammar.json({"type": "array", "x-guidance": {"whitespace_flexible": False}}),
        Grammar.json({"type": "integer"}, begin="<", end=">"),
        Grammar.choice(["1"]),
        Grammar.regex("1", begin="<", end="1"),
        Grammar.structural_tag([structure | {"end": "</a>"}], ["<a>"]),
    ]
    assert all(map(_can_loop, looping)) and not any(map(_can_loop, safe))


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [pytest.param(0, marks=pytest.mark.long), 3])
@pytest.mark.thorough
def test_a_grammar_that_hangs_ends_its_request_alone(drafts: int, run_python: Any) -> None:
    """In a process of its own, because the threads left behind stay busy."""
    done = run_python(HANGS, str(drafts), env={**os.environ, "PYTHONPATH": str(ROOT)})
    said = done.stdout.splitlines()
    assert done.returncode == 0 and len(said) >= 3, done.stderr[-2000:]
    assert "its grammar raised SpecdecError: the grammar cannot go on: llguidance did not say within" in said[0]
    assert "8" in said[1:-1] or "8" in said, said
    assert any(line.startswith("refused: grammar lark") for line in said)
