"""The target answers the questions that a head is trained on; what it has answered is kept as it comes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from drafters.training.answer_store import AnswerStore
from drafters.training.answers import AnswerSet, answer
from specdec.errors import InvalidInputError
from specdec.model import SpeculativeModel
from specdec.requests.prompts import encode_prompts
from specdec.requests.sampling import SamplingParams
from specdec.training.run_folder import FORMAT, locked
from specdec.wrapped.fingerprint import target_fingerprint

_SHORTEST = 2
"""Tokens of an answer that can be learned from: a bonus token and one after it."""


@dataclass(frozen=True)
class AnswerLimits:
    """max_new_tokens of an answer, max_length of a training sequence."""

    max_new_tokens: int = 512
    max_length: int = 1024

    def __post_init__(self) -> None:
        """Raises InvalidInputError for limits under which no answer can be learned from."""
        if self.max_new_tokens < _SHORTEST or self.max_length <= _SHORTEST:
            raise InvalidInputError(
                f"max_new_tokens must be at least {_SHORTEST} and max_length at least {_SHORTEST + 1} (a prompt, a "
                f"bonus token and a draft), not {self.max_new_tokens} and {self.max_length}"
            )


@dataclass(frozen=True)
class Questions:
    """Prompts ready for the target, nothing answered yet.

    Attributes:
        prompts: token ids of each.
        room: tokens that each one's answer can have in a training sequence.
        digest: of the prompts, 16 hex digits.
        key: identifies prompts, target and the longest answer: what the answers depend on.
        limits: of answers and training sequences.
    """

    prompts: list[list[int]]
    room: list[int]
    digest: str
    key: str
    limits: AnswerLimits

    @property
    def usable(self) -> list[int]:
        """Indices of the questions whose answers can be learned from."""
        return [i for i, room in enumerate(self.room) if room >= _SHORTEST]


def prepare_questions(model: SpeculativeModel, questions: Sequence[Any], limits: AnswerLimits) -> Questions:
    """Encode questions and find out which of them leave room for an answer.

    Args:
        questions: prompts as `SpeculativeModel.generate` takes them.

    Raises:
        InvalidInputError: a prompt that cannot be encoded, a token outside the vocabulary, or no usable question.
    """
    prompts = encode_prompts(questions, model.tokenizer)
    vocab = model.target.vocab_size
    for number, prompt in enumerate(prompts, 1):
        if not prompt or not 0 <= min(prompt) <= max(prompt) < vocab:
            raise InvalidInputError(f"question {number} is empty or has a token outside the vocabulary of {vocab}")
    longest = min(limits.max_length, model.config.max_model_len)
    room = [min(longest - len(prompt), limits.max_new_tokens) for prompt in prompts]
    digest = _hash(prompts)[:16]
    target = target_fingerprint(model.hf_model)
    key = _hash((FORMAT, target, model.backend_name, model.config.max_model_len, limits.max_new_tokens, digest))
    ready = Questions(prompts, room, digest, key, limits)
    if not ready.usable:
        raise InvalidInputError(
            f"all {len(prompts)} questions are too long: the shortest has {min(map(len, prompts))} tokens, and prompt "
            f"and answer together may have {longest}; raise max_length (the model allows {model.config.max_model_len})"
        )
    return ready


def answer_prepared(model: SpeculativeModel, questions: Questions, output: Path, console: Console) -> AnswerSet:
    """The target's own greedy answers. Each is kept in `output` as it comes; those kept before are not asked again.

    Raises:
        RunFolderError: another process answers the same questions there, or `output` cannot be written.
        InvalidInputError: no answer has two tokens.
    """
    name = f"answers-{questions.key[:16]}"
    left_out = len(questions.prompts) - len(questions.usable)
    if left_out:
        line = f"{left_out} of {len(questions.prompts)} questions leave no room for an answer; they are left out"
        console.print(line, highlight=False)
    with locked(output, name), AnswerStore(output / f"{name}.jsonl", questions.key) as store:
        if store.damaged:
            line = f"{store.damaged} lines of {store.path.name} are damaged; those questions are answered again"
            console.print(line, highlight=False)
        _answer_rest(model, questions, store, console)
        answers = [store.answers.get(i, []) if room >= _SHORTEST else [] for i, room in enumerate(questions.room)]
    return answer(questions.prompts, lambda prompts: answers, questions.limits.max_length)


def _hash(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()


def _answer_rest(model: SpeculativeModel, questions: Questions, store: AnswerStore, console: Console) -> None:
    rest = [i for i in questions.usable if i not in store.answers]
    if not rest:
        return
    if len(rest) < len(questions.usable):
        line = f"{len(questions.usable) - len(rest)} answers are kept from an earlier run, {len(rest)} are missing"
        console.print(line, highlight=False)
    # Without the prefix cache: which questions an interrupted run has answered must not change how others round.
    params = SamplingParams(max_new_tokens=questions.limits.max_new_tokens, cache_prefix=False)
    each = model.generate_iter([questions.prompts[i] for i in rest], params)
    for index, completion in track(each, "the target answers", total=len(rest), console=console):
        store.add(rest[index], completion.token_ids)
