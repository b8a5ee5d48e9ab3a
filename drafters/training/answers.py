"""AnswerSet: prompts with the target's own answers as token ids, in three flat arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from attention.errors import InvalidInputError

Regenerate = Callable[[list[list[int]]], list[list[int]]]
"""Prompts as token ids -> the target's answers as token ids (with the end token when it was reached)."""


@dataclass(frozen=True)
class AnswerSet:
    """N sequences, each a prompt followed by its answer.

    Attributes:
        tokens: [sum of lengths] int64, all sequences one after the other.
        starts: [N+1] int64, where each begins.
        answer_starts: [N] int64, offset of the answer inside its sequence.
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

    def token_counts(self, vocab_size: int) -> torch.Tensor:
        """How often each token occurs in the answers: [V] int64, for `drafters.vocab.most_frequent`."""
        return torch.from_numpy(np.bincount(self.tokens[self.answer_mask()], minlength=vocab_size))

    def subset(self, indices: np.ndarray) -> AnswerSet:
        """The sequences at `indices` [n], in that order."""
        return _flatten([self.sequence(int(i)) for i in indices], self.answer_starts[indices])

    def split(self, held_out: int, seed: int) -> tuple[AnswerSet, AnswerSet]:
        """Split off `held_out` sequences at random: (rest, held out).

        Raises:
            InvalidInputError: nothing would remain on one side.
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
        """SHA-256 of all of it, in hex."""
        arrays = (self.tokens, self.starts, self.answer_starts)
        return hashlib.sha256(b"".join(np.ascontiguousarray(array, "<i8").tobytes() for array in arrays)).hexdigest()


def answer(prompts: Sequence[Sequence[int]], regenerate: Regenerate, max_length: int) -> AnswerSet:
    """Let the target answer the prompts.

    Args:
        prompts: token ids of each prompt.
        regenerate: generates the answers.
        max_length: longer sequences are cut; one whose answer keeps fewer than two tokens is left out (a draft
            needs a bonus token and a token after it).

    Raises:
        InvalidInputError: the number of answers differs from that of the prompts, or no sequence is left.
    """
    answers = regenerate([list(prompt) for prompt in prompts])
    if len(answers) != len(prompts):
        raise InvalidInputError(f"{len(prompts)} prompts got {len(answers)} answers")
    sequences = [np.array([*p, *a], dtype=np.int64)[:max_length] for p, a in zip(prompts, answers, strict=True)]
    kept = [i for i, sequence in enumerate(sequences) if len(sequence) >= len(prompts[i]) + 2]
    if not kept:
        raise InvalidInputError(f"no answer has two tokens within {max_length} tokens of prompt and answer")
    return _flatten([sequences[i] for i in kept], np.array([len(prompts[i]) for i in kept], dtype=np.int64))


def _flatten(sequences: list[np.ndarray], answer_starts: np.ndarray) -> AnswerSet:
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    return AnswerSet(np.concatenate(sequences), starts, answer_starts)
