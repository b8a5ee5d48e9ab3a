"""Holds the conversations: one chunk of questions under every configuration.

A pure function of its arguments, the times aside. It is the unit of work of every executor, so that one process and
many machines give the same answers.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from evals.data.datasets import Question
from evals.data.prompts import opening, render
from evals.runs.answers import Answer, Turn
from evals.runs.segments import segments
from specdec.errors import SpecdecError
from specdec.requests.sampling import SamplingParams


class Model(Protocol):
    """What the evaluations need of `specdec.SpeculativeModel`."""

    tokenizer: Any

    def generate(self, prompts: Any, params: Any) -> Sequence[Any]:
        """One completion a prompt, in order."""


@dataclass(frozen=True)
class Configuration:
    """One way of generating that is measured.

    Attributes:
        name: shown in every output; k: drafts a round, 0 for the target alone; model: key of the loaded model.
    """

    name: str
    k: int
    model: str = "main"


@dataclass(frozen=True)
class Asking:
    """How every question is asked, the same for all configurations.

    Attributes:
        params: sampling; its seed is replaced by one drawn from `seed`, the question and the turn.
        templated: apply the chat template; system: a system prompt, or None.
        return_drafts: keep the drafted tokens as coloured segments of the text.
    """

    params: SamplingParams
    templated: bool
    system: str | None = None
    seed: int = 0
    return_drafts: bool = False


def run_chunk(
    models: Mapping[str, Model],
    arms: Sequence[Configuration],
    chunk: Sequence[Question],
    asking: Asking,
    rotation: int = 0,
) -> list[Answer]:
    """Answer a chunk under every configuration; the configurations start at `rotation`, so that none is always first.

    A chunk that raises is asked again question by question; what still raises becomes an answer with `error`.
    """
    shift = rotation % len(arms)
    answers: list[Answer] = []
    for arm in [*arms[shift:], *arms[:shift]]:
        answers += _guarded(models[arm.model], arm, chunk, asking)
    rank = {arm.name: i for i, arm in enumerate(arms)}
    return sorted(answers, key=lambda answer: rank[answer.arm])


def _guarded(model: Model, arm: Configuration, chunk: Sequence[Question], asking: Asking) -> list[Answer]:
    try:
        return _converse(model, arm, chunk, asking)
    except (SpecdecError, RuntimeError) as error:  # RuntimeError: what torch raises, out of memory included
        if len(chunk) > 1:
            return [answer for question in chunk for answer in _guarded(model, arm, [question], asking)]
        question = chunk[0]
        text = f"{type(error).__name__}: {error}"
        return [Answer(question.id, arm.name, question.category, question.task, error=text)]


def _converse(model: Model, arm: Configuration, chunk: Sequence[Question], asking: Asking) -> list[Answer]:
    messages = [opening(question, asking.system) for question in chunk]
    turns: list[list[Turn]] = [[] for _ in chunk]
    for number in range(max(len(question.turns) for question in chunk)):
        active = [i for i, question in enumerate(chunk) if number < len(question.turns)]
        for i in active:
            messages[i].append({"role": "user", "content": chunk[i].turns[number]})
        asked = [(chunk[i], messages[i]) for i in active]
        for i, turn in zip(active, _ask(model, arm, asked, number, asking), strict=True):
            turns[i].append(turn)
            messages[i].append({"role": "assistant", "content": turn.text})
    return [
        Answer(question.id, arm.name, question.category, question.task, tuple(own))
        for question, own in zip(chunk, turns, strict=True)
    ]


def _ask(
    model: Model,
    arm: Configuration,
    asked: Sequence[tuple[Question, list[dict[str, str]]]],
    number: int,
    asking: Asking,
) -> list[Turn]:
    prompts = [render(model.tokenizer, messages, asking.templated) for _, messages in asked]
    params = [
        replace(
            asking.params,
            seed=question_seed(asking.seed, question.id, number),
            num_speculative_tokens=arm.k,
            return_drafts=asking.return_drafts,
        )
        for question, _ in asked
    ]
    start = time.perf_counter()
    completions = model.generate(prompts, params)
    wall_s = (time.perf_counter() - start) / len(prompts)
    return [to_turn(model.tokenizer, completion, wall_s) for completion in completions]


def to_turn(tokenizer: Any, completion: Any, wall_s: float) -> Turn:
    """The record of one completion. `wall_s`: its share of the generate call's wall time."""
    stats = completion.stats
    return Turn(
        text=completion.text,
        token_ids=tuple(completion.token_ids),
        finish_reason=completion.finish_reason,
        prompt_tokens=stats.prompt_tokens,
        text_tokens=len(tokenizer(completion.text)["input_ids"]),
        rounds=stats.rounds,
        segments=segments(tokenizer, completion),
        wall_s=wall_s,
        prefill_s=stats.prefill_s,
        decode_s=stats.decode_s,
    )


def question_seed(seed: int, question_id: str, turn: int) -> int:
    """The seed of one turn: a function of the run's seed, the question and the turn, never of order or worker."""
    text = f"{seed}/{question_id}/{turn}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big")
