"""Batches: which sequences are in which step, and how they become tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from drafters.training.answers import AnswerSet

_MEGABATCH = 16
"""Batches that are sorted by length together, so that a batch has sequences of similar length."""


@dataclass(frozen=True)
class Batch:
    """B right-padded sequences of S tokens.

    Attributes:
        token_ids: [B, S] int64, 0 in the padding.
        real: [B, S] bool, False in the padding (the target's attention mask).
        answer: [B, S] bool, the answers' tokens.
    """

    token_ids: torch.Tensor
    real: torch.Tensor
    answer: torch.Tensor


def epoch_order(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Indices of every batch of an epoch: a function of its arguments alone, so that a resumed run sees the same.

    Sequences are shuffled, sorted by length inside groups of `16 * batch_size` (give or take a fifth, so that
    neighbours change from epoch to epoch), cut into batches, and the batches shuffled. An incomplete last batch is
    left out, unless it is the only one.
    """
    rng = np.random.default_rng((seed, epoch))
    order = rng.permutation(len(lengths))
    batches: list[np.ndarray] = []
    for start in range(0, len(order), _MEGABATCH * batch_size):
        group = order[start : start + _MEGABATCH * batch_size]
        group = group[np.argsort(lengths[group] * rng.uniform(0.8, 1.2, len(group)), kind="stable")]
        # An incomplete batch would weigh its sequences more and be another shape to compile.
        rest = len(group) % batch_size if len(order) >= batch_size else 0
        group = np.delete(group, rng.choice(len(group), rest, replace=False))
        batches += [group[i : i + batch_size] for i in range(0, len(group), batch_size)]
    return [batches[i] for i in rng.permutation(len(batches))]


def training_batches(
    answers: AnswerSet, batch_size: int, pad_multiple: int, seed: int, device: torch.device, first_step: int = 0
) -> Iterator[Batch]:
    """Endless batches from step `first_step` on."""
    epoch, skip = divmod(first_step, len(epoch_order(answers.lengths, batch_size, seed, 0)))
    while True:
        for indices in epoch_order(answers.lengths, batch_size, seed, epoch)[skip:]:
            yield collate(answers, indices, pad_multiple, device)
        epoch, skip = epoch + 1, 0


def held_out_batches(answers: AnswerSet, batch_size: int, pad_multiple: int, device: torch.device) -> Iterator[Batch]:
    """Every sequence once, shortest first."""
    order = np.argsort(answers.lengths, kind="stable")
    for start in range(0, len(order), batch_size):
        yield collate(answers, order[start : start + batch_size], pad_multiple, device)


def collate(answers: AnswerSet, indices: np.ndarray, pad_multiple: int, device: torch.device) -> Batch:
    """Pad the sequences at `indices` [B] on the right to a common multiple of `pad_multiple`."""
    lengths = answers.lengths[indices]
    width = -(-int(lengths.max()) // pad_multiple) * pad_multiple
    token_ids = np.zeros((len(indices), width), dtype=np.int64)
    for row, index in enumerate(indices):
        token_ids[row, : lengths[row]] = answers.sequence(int(index))
    columns = np.arange(width)
    real = columns < lengths[:, None]
    answer = real & (columns >= answers.answer_starts[indices][:, None])
    ids, real_t, answer_t = (torch.from_numpy(x).to(device, non_blocking=True) for x in (token_ids, real, answer))
    return Batch(ids, real_t, answer_t)
