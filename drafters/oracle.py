"""The draft oracle: a head without cache. Recomputes the whole prefix from true hidden states for every round.

Lossless verification hides a broken drafter: tokens stay right while fewer drafts are accepted. So the engine's draft
ids are compared, round by round, with this function's result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attention.backends.reference import attend as dense_attend
from drafters.base import Head
from drafters.loops.base import Attend

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
    return drafts_of((head,), token_ids, head.fuse(aux_hidden_states), num_drafts, choose)


def drafts_of(
    modules: Sequence[Head], token_ids: Tensor, base: Tensor, num_drafts: int, choose: ChooseDraft
) -> list[int]:
    """Drafts of modules that take turns, or of one head; base: [L, H], what the first one reads.

    Of M modules every one runs every row of every prefix. Where L < M, there are rows for L+1 drafts only.
    """
    ids, drafts = token_ids, list[int]()
    for step in range(num_drafts):
        hidden, rows, m = base, len(base), step % len(modules)
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


def full_attend(head: Head, length: int) -> Attend:
    """Attention over `length` positions, of each to those up to it."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attention_spec = head.attention_specs[layer]
        position = torch.arange(length, device=query.device)
        mask = position <= position[:, None]  # [L, L]
        if attention_spec.window is not None:
            mask &= position > position[:, None] - attention_spec.window
        q, k, v = (states.transpose(0, 1)[None] for states in (query, key, value))
        out = dense_attend(q, k, v, mask[None, None], attention_spec)  # [1, Hq, L, Dv]
        return out[0].transpose(0, 1).to(query.dtype)

    return attend
