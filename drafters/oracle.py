"""The draft oracle: a head without cache. Recomputes the whole prefix from true hidden states for every round.

Lossless verification hides a broken drafter: tokens stay right while fewer drafts are accepted. So the engine's draft
ids are compared, round by round, with this function's result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attention.backends.reference import attend as dense_attend
from drafters.base import BlockHead, ChainHead, Head
from drafters.loops.base import Attend
from drafters.loops.block.chains import drafts_along

ChooseDraft = Callable[[int, Tensor], Tensor]
"""(position of the token to be drafted, logits [1, Vd]) -> its id in the draft vocabulary [1] int64."""


def most_probable(position: int, logits: Tensor) -> Tensor:
    """The `ChooseDraft` of greedy drafts."""
    return logits.argmax(-1)


def oracle_drafts(
    head: Head, token_ids: Tensor, aux_hidden_states: Tensor, num_drafts: int, choose: ChooseDraft = most_probable
) -> list[int]:
    """Drafts after a committed prefix, recomputed without a cache.

    Args:
        token_ids: [L+1] int64: the prefix t_0 … t_L, t_L being the bonus token (sampled, not yet read by the target).
        aux_hidden_states: [L, A·Ht] true target states at positions 0 … L-1.
        num_drafts: how many drafts to make. choose: how; sampled drafts are drawn with the uniform of their position.

    Returns:
        Target-vocabulary ids of drafts 1 … num_drafts.
    """
    if isinstance(head, BlockHead):
        return [] if not num_drafts else block_drafts(head, token_ids, aux_hidden_states, num_drafts, choose)
    assert isinstance(head, ChainHead)
    return drafts_of((head,), token_ids, head.fuse(aux_hidden_states), num_drafts, choose)


def drafts_of(
    modules: Sequence[ChainHead], token_ids: Tensor, base: Tensor, num_drafts: int, choose: ChooseDraft
) -> list[int]:
    """Drafts of modules that take turns, or of one head; base: [L, H], what the first one reads.

    Of M modules every one runs every row of every prefix. Where L < M, there are rows for L+1 drafts only.
    """
    ids = token_ids
    drafts = list[int]()
    for step in range(num_drafts):
        hidden = base
        rows = len(base)
        m = step % len(modules)
        positions = torch.arange(rows, device=ids.device)
        for k, module in enumerate(modules[: m + 1]):
            x = module.forward(ids[1 + k : 1 + k + rows], hidden, positions, full_attend(module, rows))
            hidden = module.feedback(x)
        chosen = choose(len(token_ids) + len(drafts), module.logits(x[-1:]))
        drafts.append(int(module.to_target_ids(chosen)[0]))
        ids = torch.cat([ids, ids.new_tensor(drafts[-1:])])
        if m == len(modules) - 1:
            base = torch.cat([base, hidden[-len(modules) :]])
    return drafts


def block_drafts(
    head: BlockHead, token_ids: Tensor, aux_hidden_states: Tensor, num_drafts: int, choose: ChooseDraft
) -> list[int]:
    """`oracle_drafts` of a head that drafts in blocks: the whole context anew, and one mask over it and the block."""
    length = len(aux_hidden_states)
    context = head.context(head.fuse(aux_hidden_states), torch.arange(length, device=token_ids.device))
    positions = torch.arange(length, length + head.block_size, device=token_ids.device)
    ids = torch.full_like(positions, head.mask_token_id)
    ids[0] = token_ids[-1]

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = context[layer]
        return _dense(head, layer, length, query, torch.cat([keys, key]), torch.cat([values, value]))

    x = head.block(ids, positions, attend)[None]
    draft = drafts_along(head, x, ids[:1], num_drafts, lambda slot, row: (choose(length + 1 + slot, row), None))
    return draft.token_ids[0].tolist()


def full_attend(head: Head, length: int) -> Attend:
    """Attention over `length` positions, of each to those up to it."""
    return lambda layer, query, key, value: _dense(head, layer, 0, query, key, value)


def _dense(head: Head, layer: int, first: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of query [Q, Hq, D] at positions `first` on to key and value [S, Hkv, D] from 0 on -> [Q, Hq, D]."""
    spec = head.attention_specs[layer]
    theirs = torch.arange(len(key), device=query.device)
    distance = first + torch.arange(len(query), device=query.device)[:, None] - theirs  # [Q, S]
    mask = distance >= 0 if spec.causal else torch.ones_like(distance, dtype=torch.bool)
    if spec.window is not None:
        mask &= distance.abs() < spec.window
    q, k, v = (states.transpose(0, 1)[None] for states in (query, key, value))
    out = dense_attend(q, k, v, mask[None, None], spec)  # [1, Hq, Q, D]
    return out[0].transpose(0, 1).to(query.dtype)
