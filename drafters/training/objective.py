"""What a head is trained for, and how well it does it: soft cross-entropy and greedy chain acceptance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from drafters.base import Head
from drafters.training.batches import Batch
from drafters.unroll import shift_left, unroll

Features = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(token ids [B, S] int64, attention mask [B, S] bool) -> (aux hidden states [B, S, A·Ht], final logits [B, S, V])."""


@dataclass(frozen=True)
class Outcome:
    """Loss and counts of one batch; tensors, so that nothing waits for the device.

    Attributes:
        loss: scalar, the decayed sum over steps.
        accepted: [steps] chains whose drafts are all right up to and including this step.
        possible: [steps] chains that reach this far inside their answer.
    """

    loss: torch.Tensor
    accepted: torch.Tensor
    possible: torch.Tensor


def chain_mask(answer: torch.Tensor, step: int) -> torch.Tensor:
    """Rows [B, S] whose chain is inside an answer up to the token that `step` predicts.

    Row p's chain has its bonus token at p+1 and predicts p+2 at step 0; all of p+1 … p+2+step must be answer tokens.
    answer [B, S] bool.
    """
    mask = shift_left(answer, 1)
    for offset in range(2, step + 3):
        mask = mask & shift_left(answer, offset)
    return mask


def draft_targets(logits: torch.Tensor, target_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's distribution as the head can express it.

    Args:
        logits: [B, S, V] of the target.
        target_ids: [Vd] int64, the draft vocabulary.

    Returns:
        Probabilities [B, S, Vd] float32, restricted to the draft vocabulary and renormalised; and [B, S] bool, whether
        the target's first choice is in it (elsewhere the restricted distribution is only a tail and is not trained on).

    Source: SafeAILab/EAGLE, eagle/traineagle3/cnets.py (target_p, position_mask).
    """
    known = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    known[target_ids] = True
    whole = len(target_ids) == logits.shape[-1]
    restricted = logits if whole else logits.index_select(-1, target_ids)
    return restricted.float().softmax(-1), known[logits.argmax(-1)]


def evaluate_batch(
    head: Head, batch: Batch, aux_hidden_states: torch.Tensor, logits: torch.Tensor, steps: int, decay: float
) -> Outcome:
    """Run the training-time test on a batch and score every step.

    A draft counts as accepted when it is the answer's own token and all drafts before it were: on answers that the
    target generated greedily, that is what greedy verification accepts.

    Args:
        aux_hidden_states, logits: the target's features of `batch.token_ids`, [B, S, A·Ht] and [B, S, V].
    """
    ids = head.to_target_ids(torch.arange(head.draft_vocab_size, device=logits.device))
    probabilities, known = draft_targets(logits, ids)
    losses, accepted, possible = [], [], []
    right = torch.ones_like(batch.answer)  # of the whole chain so far: one wrong draft ends it
    for step, x in enumerate(unroll(head, batch.token_ids, aux_hidden_states, steps)):
        scores = head.logits(x).view(*batch.token_ids.shape, -1)  # [B, S, Vd]
        mask = chain_mask(batch.answer, step)
        wanted = shift_left(probabilities, step + 1)
        losses.append(_soft_cross_entropy(scores, wanted, mask & shift_left(known, step + 1)) * decay**step)
        drafts = head.to_target_ids(scores.detach().argmax(-1))
        right = right & (drafts == shift_left(batch.token_ids, step + 2)) & mask
        accepted.append(right.sum())
        possible.append(mask.sum())
    return Outcome(torch.stack(losses).sum(), torch.stack(accepted), torch.stack(possible))


def _soft_cross_entropy(scores: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of -sum(wanted · log softmax(scores)) over the masked rows; zero when there are none."""
    rows = -(wanted * F.log_softmax(scores.float(), dim=-1)).sum(-1)
    return torch.where(mask, rows, 0.0).sum() / mask.sum().clamp(min=1)
