"""Training of heads that draft whole blocks: anchors, one forward for all their blocks, and the losses.

An anchor is a position of an answer at which a round could begin: its token is the bonus token, and the target's states
before it are the context. The blocks of all anchors go through the head in one pass, and each sees the context before
its anchor and itself, as when drafting.

    Q = 3, anchor 4: slots at 4, 5, 6 read t4, mask, mask, and see the context at 0 … 3 and each other;
    slots 0, 1, 2 should predict t5, t6, t7 (anchor-first), or slots 1, 2 t5, t6 (fill-in).

Source: DSpark, arXiv 2607.05147, and deepseek-ai/DeepSpec (anchors, losses); z-lab/dflash (weights of slots).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.backends.reference import attend as dense_attend
from drafters.base import BlockHead, RatesDrafts
from drafters.loops.base import Attend, KeysAndValues
from drafters.loops.block.chains import drafting_slots, go_along
from drafters.training.objective import Batch, BatchLoss


class LossWeights(NamedTuple):
    """Weights of a draft's losses.

    Attributes:
        cross_entropy: with the answer's token. distance: Σ|q - p| from the target's p. confidence: binary cross-entropy
            of a confidence head with the probability 1 - Σ|q - p|/2 that a draft from q is accepted.
    """

    cross_entropy: float
    distance: float
    confidence: float = 0.0


LOSSES = {"dflash": LossWeights(1.0, 0.0), "dspark": LossWeights(0.1, 0.9, 1.0)}
"""By the kind of head."""


def chosen_anchors(batch: Batch, count: int) -> tuple[Tensor, Tensor]:
    """Positions in answers that another token of the answer follows, at random by `batch.draws`.

    Returns:
        Positions [B, A], A being at most `count`; and [B, A] bool, False where a sequence has fewer.
    """
    possible = batch.answer[:, :-1] & batch.answer[:, 1:]
    scores, positions = torch.where(possible, batch.draws[:, :-1], -1.0).topk(min(count, possible.shape[1]))
    return positions, scores >= 0


def block_outputs(
    head: BlockHead, token_ids: Tensor, aux_hidden_states: Tensor, anchors: Tensor, wanted: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs and logits of drafts behind each anchor, as drafting has them once the drafts before are the wanted ones.

    Args:
        token_ids, aux_hidden_states: [B, S] int64 and [B, S, A'·Ht], right-padded sequences and their true states.
        anchors: [B, A]. wanted: [B, A, n] tokens that follow, n at most the head's drafts.

    Returns:
        Outputs [B, A, n, H] of the drafts' slots, and logits [B, A, n, V].
    """
    batch_size, length = token_ids.shape
    device = token_ids.device
    context = head.context(
        head.fuse(aux_hidden_states.flatten(0, 1)), torch.arange(length, device=device).repeat(batch_size)
    )
    positions = anchors[..., None] + torch.arange(head.block_size, device=device)  # [B, A, Q]
    ids = torch.full_like(positions, head.mask_token_id)
    ids[..., 0] = token_ids.gather(1, anchors)
    x = head.block(ids.flatten(), positions.flatten(), blocks_attend(head, context, positions))
    x = x.unflatten(0, (-1, head.block_size))
    true, logits = wanted.flatten(0, 1), list[Tensor]()

    def forced(slot: int, row: Tensor) -> Tensor:
        logits.append(row)
        return true[:, slot]

    go_along(head, x, ids[..., 0].flatten(), true.shape[1], forced)
    own = drafting_slots(head, x, true.shape[1])
    return own.unflatten(0, anchors.shape), torch.stack(logits, 1).unflatten(0, anchors.shape)


def blocks_attend(head: BlockHead, context: KeysAndValues, positions: Tensor) -> Attend:
    """Attention of blocks at positions [B, A, Q] to the context before each and to itself.

    context: keys and values [B·S, Hkv, D] of each layer.
    """
    batch_size, anchors, slots = positions.shape
    length = len(context[0][0]) // batch_size
    queries = positions.flatten(1)  # [B, A·Q]
    before = torch.arange(length, device=positions.device).expand(batch_size, length)
    distance = queries[..., None] - torch.cat((before, queries), 1)[:, None]  # [B, A·Q, S + A·Q]
    starts = positions[..., :1].expand(-1, -1, slots).flatten(1)
    block = torch.arange(anchors, device=positions.device).repeat_interleave(slots)
    own = (block[:, None] == block).expand(batch_size, -1, -1)
    visible = torch.cat((before[:, None] < starts[..., None], own), -1)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        spec, mask = head.attention_specs[layer], visible
        if spec.causal:
            mask = mask & (distance >= 0)
        if spec.window is not None:
            mask = mask & (distance.abs() < spec.window)
        k, v = (
            torch.cat((old.unflatten(0, (batch_size, -1)), new.unflatten(0, (batch_size, -1))), 1).transpose(1, 2)
            for old, new in zip(context[layer], (key, value), strict=True)
        )
        out = dense_attend(query.unflatten(0, (batch_size, -1)).transpose(1, 2), k, v, mask[:, None], spec)
        return out.transpose(1, 2).flatten(0, 1).to(query.dtype)

    return attend


def evaluate_blocks(
    head: BlockHead,
    batch: Batch,
    aux_hidden_states: Tensor,
    logits: Tensor,
    steps: int,
    decay: float,
    *,
    num_anchors: int,
    weights: LossWeights,
) -> BatchLoss:
    """Draft behind anchors of each sequence and score every draft; as `evaluate_batch`.

    The drafts of an anchor end with its answer. A Markov head reads the true tokens before each draft.

    Args:
        aux_hidden_states, logits: the target's features of `batch.token_ids`, [B, S, A'·Ht] and [B, S, V].
        steps: drafts of a block. decay: weight of draft i+1 against that of draft i.
        num_anchors: the most of a sequence. weights: of the losses.
    """
    anchors, real = chosen_anchors(batch, num_anchors)
    order = torch.arange(steps, device=anchors.device)
    places = anchors[..., None] + 1 + order  # [B, A, n]
    inside = places < batch.answer.shape[1]
    places = places.where(inside, 1)
    rows = torch.arange(len(anchors), device=anchors.device)[:, None, None]
    wanted = batch.token_ids[rows, places]
    counted = (batch.answer[rows, places] & inside & real[..., None]).cumprod(-1)
    x, scores = block_outputs(head, batch.token_ids, aux_hidden_states, anchors, wanted)
    scores, rated = scores.float(), None
    losses = weights.cross_entropy * -scores.log_softmax(-1).gather(-1, wanted[..., None])[..., 0]
    if weights.distance or weights.confidence:
        theirs = logits[rows, places - 1].float().softmax(-1)
        distances = (scores.softmax(-1) - theirs).abs().sum(-1)
        losses = losses + weights.distance * distances
        if weights.confidence and isinstance(head, RatesDrafts) and head.has_confidence:
            odds = head.confidence_logits(x, batch.token_ids[rows, places - 1])
            share = 1 - distances.detach() / 2
            losses = losses + weights.confidence * F.binary_cross_entropy_with_logits(odds, share, reduction="none")
            rated = torch.stack((odds.detach(), share)).where(counted.bool(), torch.nan).flatten(1, 2)
    shares = decay**order * counted
    right = ((scores.argmax(-1) == wanted) * counted).cumprod(-1)
    loss = (shares * losses).sum() / shares.sum().clamp(min=1)
    return BatchLoss(loss, right.sum((0, 1)), counted.sum((0, 1)), rated)
