"""Training data of a head: questions from a JSONL file, and the target's answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention.batch.host import starts_of
from attention.errors import InvalidInputError

Message = dict[str, str]


def read_questions(path: str | Path) -> list[list[Message]]:
    """Read conversations that end with the user's turn; the target will answer them. One list of {"role", "content"} a
    line.

    A line holds `messages` (a chat; assistant turns at its end are dropped), or `prompt` or `question` (one user turn).

    Raises:
        InvalidInputError: the file is missing, empty or no UTF-8 text, or a line (named by its number) is none of
            these.
    """
    return [_messages(content, place) for place, _, content in question_lines(Path(path))]


def question_lines(path: Path) -> list[tuple[str, dict[str, Any], Any]]:
    """The lines of a JSONL file: where each stands, its object, and the messages, prompt or question in it.

    Raises:
        InvalidInputError: see `read_questions`.
    """
    keys = ("messages", "prompt", "question")
    found = []
    for number, line in enumerate(
        read_text(path, "questions").split("\n"), 1
    ):  # not splitlines: a string may hold U+2028
        if line.strip():
            place = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InvalidInputError(f"{place}: not JSON ({error})") from error
            contents = [row[key] for key in keys if isinstance(row, dict) and row.get(key) is not None]
            if not contents:
                raise InvalidInputError(f"{place}: no field of {', '.join(keys)}")
            found.append((place, row, contents[0]))
    if not found:
        raise InvalidInputError(f"{path} has no questions; give one JSON object a line, with {', '.join(keys)}")
    return found


def read_text(path: Path, what: str) -> str:
    """A file in UTF-8. Raises InvalidInputError: it cannot be read; what: it should hold."""
    try:
        return path.read_text(encoding="utf-8-sig")  # files of Windows begin with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"cannot read {what} from {path} as UTF-8 text: {error}") from error


def _messages(content: Any, place: str) -> list[Message]:
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise InvalidInputError(f"{place}: messages must be texts with role and content")
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages or messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise InvalidInputError(f"{place}: there is no user's turn to answer")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


@dataclass(frozen=True)
class AnswerSet:
    """N sequences, each a prompt followed by its answer: tokens [sum of lengths] int64, one after the other.

    starts: [N+1] int64, where each begins. answer_starts: [N] int64, offset of the answer inside its sequence.
    """

    tokens: np.ndarray
    starts: np.ndarray
    answer_starts: np.ndarray

    def __len__(self) -> int:
        return len(self.answer_starts)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence [N]."""
        return np.diff(self.starts)

    def sequence(self, index: int) -> np.ndarray:
        """Token ids of one sequence [its length]."""
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    def answer_mask(self) -> np.ndarray:
        """[sum of lengths] bool: which of `tokens` belong to answers."""
        offsets = np.arange(len(self.tokens)) - np.repeat(self.starts[:-1], self.lengths)
        return offsets >= np.repeat(self.answer_starts, self.lengths)

    def token_counts(self, vocab_size: int) -> Tensor:
        """How often each token occurs in the answers: [V] int64, for `drafters.vocab.most_frequent`."""
        return torch.from_numpy(np.bincount(self.tokens[self.answer_mask()], minlength=vocab_size))

    def subset(self, indices: np.ndarray) -> AnswerSet:
        """The sequences at `indices` [n], in that order."""
        return _flatten([self.sequence(int(i)) for i in indices], self.answer_starts[indices])

    def split(self, held_out: int, seed: int) -> tuple[AnswerSet, AnswerSet]:
        """Split off `held_out` sequences at random: (rest, held out).

        Raises:
            InvalidInputError: one side would be empty.
        """
        if not 0 < held_out < len(self):
            raise InvalidInputError(f"of {len(self)} sequences 1 to {len(self) - 1} can be held out, not {held_out}")
        order = np.random.default_rng(seed).permutation(len(self))
        return self.subset(np.sort(order[held_out:])), self.subset(np.sort(order[:held_out]))

    @classmethod
    def joined(cls, parts: Sequence[AnswerSet]) -> AnswerSet:
        """All sequences of several sets, in order."""
        sequences = [part.sequence(i) for part in parts for i in range(len(part))]
        return _flatten(sequences, np.concatenate([part.answer_starts for part in parts]))

    def digest(self) -> str:
        """SHA-256 of tokens and offsets, in hex."""
        arrays = (self.tokens, self.starts, self.answer_starts)
        return hashlib.sha256(b"".join(np.ascontiguousarray(array, "<i8").tobytes() for array in arrays)).hexdigest()


def answer_set(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], max_length: int) -> AnswerSet:
    """Join prompts and the target's answers (token ids of each; with the end token when it was reached).

    Longer sequences than `max_length` are cut; one whose answer keeps fewer than two tokens is left out (a draft needs
    a bonus token and a token after it).

    Raises:
        InvalidInputError: the numbers of answers and prompts differ, or no sequence is left.
    """
    if len(answers) != len(prompts):
        raise InvalidInputError(f"{len(prompts)} prompts got {len(answers)} answers")
    sequences = [np.array([*p, *a], dtype=np.int64)[:max_length] for p, a in zip(prompts, answers, strict=True)]
    kept = [i for i, sequence in enumerate(sequences) if len(sequence) >= len(prompts[i]) + 2]
    if not kept:
        raise InvalidInputError(f"no answer has two tokens within {max_length} tokens of prompt and answer")
    return _flatten([sequences[i] for i in kept], np.array([len(prompts[i]) for i in kept], dtype=np.int64))


def _flatten(sequences: list[np.ndarray], answer_starts: np.ndarray) -> AnswerSet:
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    return AnswerSet(np.concatenate(sequences), starts_of(lengths), answer_starts)
