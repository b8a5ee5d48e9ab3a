"""Batches for training a head, its loss (soft cross-entropy) and its metric (greedy chain acceptance)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.base import ChainHead
from drafters.training.data import AnswerSet
from drafters.unroll import shift_left, unroll

_MEGABATCH = 16
"""Batches whose sequences are sorted by length together, so that a batch has similar lengths."""


@dataclass(frozen=True)
class Batch:
    """B right-padded sequences of S tokens: token_ids [B, S] int64, 0 in the padding.

    real: [B, S] bool, False in the padding (the target's attention mask). answer: [B, S] bool, the answers' tokens.
    draws: [B, S] float64 in [0, 1), uniform, for objectives that take some positions alone.
    """

    token_ids: Tensor
    real: Tensor
    answer: Tensor
    draws: Tensor


def epoch_order(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Indices of every batch of an epoch, determined by the arguments, so that a resumed run sees the same.

    Sequences are shuffled, sorted by length inside groups of `16 * batch_size` (with lengths scaled by up to a fifth,
    so that neighbours change from epoch to epoch), cut into batches, and the batches shuffled. An incomplete last batch
    is left out, unless it is the only one.
    """
    rng = np.random.default_rng((seed, epoch))
    order = rng.permutation(len(lengths))
    batches = []
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
        batches = epoch_order(answers.lengths, batch_size, seed, epoch)
        for number in range(skip, len(batches)):
            yield collate(answers, batches[number], pad_multiple, device, (seed, epoch, number))
        epoch = epoch + 1
        skip = 0


def held_out_batches(answers: AnswerSet, batch_size: int, pad_multiple: int, device: torch.device) -> Iterator[Batch]:
    """Every sequence once, shortest first."""
    order = np.argsort(answers.lengths, kind="stable")
    for start in range(0, len(order), batch_size):
        yield collate(answers, order[start : start + batch_size], pad_multiple, device)


def collate(
    answers: AnswerSet, indices: np.ndarray, pad_multiple: int, device: torch.device, seed: tuple[int, ...] = (0,)
) -> Batch:
    """Pad the sequences at `indices` [B] on the right to a common multiple of `pad_multiple`. seed: of the draws."""
    lengths = answers.lengths[indices]
    width = -(-int(lengths.max()) // pad_multiple) * pad_multiple
    token_ids = np.zeros((len(indices), width), dtype=np.int64)
    for row, index in enumerate(indices):
        token_ids[row, : lengths[row]] = answers.sequence(int(index))
    columns = np.arange(width)
    real = columns < lengths[:, None]
    answer = real & (columns >= answers.answer_starts[indices][:, None])
    arrays = token_ids, real, answer, np.random.default_rng(seed).random(token_ids.shape)
    return Batch(*(torch.from_numpy(x).to(device, non_blocking=True) for x in arrays))


Features = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(token ids [B, S] int64, attention mask [B, S] bool) -> (aux hidden states [B, S, A·Ht], final logits [B, S, V])."""


@dataclass(frozen=True)
class BatchLoss:
    """Loss (scalar, the decayed sum over steps) and counts of one batch: tensors, so that nothing waits for the device.

    accepted: [steps] chains whose drafts are all right up to and including this step.
    possible: [steps] chains that reach this far inside their answer.
    rated: [2, C, steps] float32, of each chain the head's log odds that a draft is accepted once those before it are,
        and the probability of that; NaN behind the answer's end; None of a head without confidence.
    """

    loss: Tensor
    accepted: Tensor
    possible: Tensor
    rated: Tensor | None = None


def calibration(rated: Tensor) -> tuple[tuple[float, ...], ...]:
    """Fit a temperature for each draft by binary cross-entropy; rated: see `BatchLoss`, of any number of batches.

    Returns:
        Of draft 1, 2, … the mean confidence, the mean probability of acceptance, the mean confidence with log odds
        divided by its temperature, and this temperature, one of 81 from 1/4 to 4; 0, 0, 0 and 1 of a draft that no
        block has.

    Source: DSpark, arXiv 2607.05147 (a temperature for each position).
    """
    odds, share = rated
    grid = torch.logspace(-2, 2, 81, 2.0, device=rated.device)
    scaled = odds / grid[:, None, None]
    known = share.isfinite().any(0)
    best = grid[(F.softplus(scaled) - share * scaled).nanmean(1).argmin(0)].where(known, 1.0)
    means = torch.stack((odds.sigmoid(), share, (odds / best).sigmoid(), best.expand_as(odds))).nanmean(1)
    return tuple(map(tuple, means.nan_to_num(0.0).tolist()))


Objective = Callable[[Any, Batch, Tensor, Tensor, int, float], BatchLoss]
"""Scores a head on a batch; arguments as of `evaluate_batch`."""


def chain_mask(answer: Tensor, step: int) -> Tensor:
    """Rows [B, S] whose chain is inside an answer up to the token that `step` predicts. answer [B, S] bool.

    Row p's chain has its bonus token at p+1 and predicts p+2 at step 0; all of p+1 … p+2+step must be answer tokens.
    """
    mask = shift_left(answer, 1)
    for offset in range(2, step + 3):
        mask = mask & shift_left(answer, offset)
    return mask


def draft_targets(logits: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The target's distribution as the head can express it, from its logits [B, S, V] and the draft vocabulary [Vd]
    int64.

    Returns:
        Probabilities [B, S, Vd] float32, restricted to the draft vocabulary and renormalised; and [B, S] bool, whether
        the target's first choice is in it (elsewhere the restricted distribution is only a tail and is not trained on).

    Source: SafeAILab/EAGLE, eagle/traineagle3/cnets.py (target_p, position_mask).
    """
    known = logits.new_zeros(logits.shape[-1], dtype=torch.bool)
    known[target_ids] = True
    whole = len(target_ids) == logits.shape[-1]
    restricted = logits if whole else logits.index_select(-1, target_ids)
    return restricted.float().softmax(-1), known[logits.argmax(-1)]


def evaluate_batch(
    head: ChainHead, batch: Batch, aux_hidden_states: Tensor, logits: Tensor, steps: int, decay: float
) -> BatchLoss:
    """Run the training-time test on a batch and score every step.

    A draft counts as accepted when it is the answer's own token and all drafts before it were: greedy verification
    accepts just these, as the target generated the answers greedily.

    Args:
        aux_hidden_states, logits: the target's features of `batch.token_ids`, [B, S, A·Ht] and [B, S, V].
    """
    ids = head.to_target_ids(torch.arange(head.draft_vocab_size, device=logits.device))
    probabilities, known = draft_targets(logits, ids)
    losses = []
    accepted = []
    possible = []
    right = torch.ones_like(batch.answer)  # of the whole chain so far: one wrong draft ends it
    for step, x in enumerate(unroll(head, batch.token_ids, aux_hidden_states, steps)):
        scores = head.logits(x).view(*batch.token_ids.shape, -1)  # [B, S, Vd]
        mask = chain_mask(batch.answer, step)
        wanted = shift_left(probabilities, step + 1)
        entropies = -(wanted * F.log_softmax(scores.float(), dim=-1)).sum(-1)
        trained = mask & shift_left(known, step + 1)
        mean = torch.where(trained, entropies, 0.0).sum() / trained.sum().clamp(min=1)
        losses.append(mean * decay**step)
        drafts = head.to_target_ids(scores.detach().argmax(-1))
        right = right & (drafts == shift_left(batch.token_ids, step + 2)) & mask
        accepted.append(right.sum())
        possible.append(mask.sum())
    return BatchLoss(torch.stack(losses).sum(), torch.stack(accepted), torch.stack(possible))
