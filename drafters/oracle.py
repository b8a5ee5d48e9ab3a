"""The draft oracle: a head without cache. Recomputes the whole prefix from true hidden states for every round.

Lossless verification hides a broken drafter: tokens stay right while fewer drafts are accepted. So the engine's draft
ids are compared, round by round, with this function's result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attention.backends.reference import attend as dense_attend
from attention.errors import InvalidInputError
from drafters.base import Head
from drafters.loops.base import Attend
from drafters.mtp.head import MtpStack

ChooseDraft = Callable[[int, Tensor], Tensor]
"""(position of the token to be drafted, logits [1, Vd]) -> its id in the draft vocabulary [1] int64."""


def most_probable(position: int, logits: Tensor) -> Tensor:
    """The `ChooseDraft` of greedy drafts."""
    return logits.argmax(-1)


def oracle_drafts(
    head: Head,
    token_ids: Tensor,
    aux_hidden_states: Tensor,
    num_drafts: int,
    choose: ChooseDraft = most_probable,
    only_last: bool = False,
) -> list[int]:
    """Drafts after a committed prefix, recomputed without a cache.

    Args:
        token_ids: [L+1] int64: the prefix t_0 … t_L, t_L being the bonus token (sampled, not yet read by the target).
        aux_hidden_states: [L, A·Ht] true target states at positions 0 … L-1.
        num_drafts: how many drafts to make. choose: how; sampled drafts are drawn with the uniform of their position.
        only_last: attend only for the last position, in L steps instead of L². Of a head with one attention layer no
            other position's attention reaches a draft; for prefixes too long for an [L, L] mask.

    Returns:
        Target-vocabulary ids of drafts 1 … num_drafts.

    Raises:
        InvalidInputError: `only_last` for a head with several attention layers.
    """
    if only_last and len(head.attention_specs) > 1:
        raise InvalidInputError(
            f"only_last is for heads with one attention layer; this one has {len(head.attention_specs)}"
        )
    return _drafts((head,), token_ids, head.fuse(aux_hidden_states), num_drafts, choose, only_last)


def oracle_module_drafts(
    stack: MtpStack, token_ids: Tensor, states: Tensor, num_drafts: int, choose: ChooseDraft = most_probable
) -> list[int]:
    """As `oracle_drafts`, for M modules: every module runs every row of every prefix.

    token_ids: [L+1] int64; states: [L, H] the target's states after its final norm. A request with fewer than M
    committed states has too few rows for some modules: it gets at most L+1 drafts.
    """
    most = num_drafts if len(states) >= stack.num_modules else len(states) + 1
    return _drafts(stack.mtp_modules, token_ids, states, min(num_drafts, most), choose)


def _drafts(
    modules: Sequence[Head],
    token_ids: Tensor,
    base: Tensor,
    num_drafts: int,
    choose: ChooseDraft,
    only_last: bool = False,
) -> list[int]:
    """Drafts of modules that take turns, or of one head; base: [L, H], what the first one reads."""
    ids, drafts = token_ids, list[int]()
    for step in range(num_drafts):
        hidden, rows, m = base, len(base), step % len(modules)
        positions = torch.arange(rows, device=ids.device)
        for k, module in enumerate(modules[: m + 1]):
            attend = _full_attend(module, rows, 1 if only_last else rows)
            x = module.forward(ids[1 + k : 1 + k + rows], hidden, positions, attend)
            hidden = module.feedback(x)
        chosen = choose(len(token_ids) + len(drafts), module.logits(x[-1:]))
        drafts.append(int(module.to_target_ids(chosen)[0]))
        ids = torch.cat([ids, ids.new_tensor(drafts[-1:])])
        if m == len(modules) - 1:
            base = torch.cat([base, hidden[-len(modules) :]])
    return drafts


def _full_attend(head: Head, length: int, queries: int) -> Attend:
    """Attention over `length` positions, of the last `queries` of them; 0 for the others."""
    first = length - queries

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attention_spec = head.attention_specs[layer]
        position = torch.arange(length, device=query.device)
        mask = position <= position[first:, None]  # [queries, L]
        if attention_spec.window is not None:
            mask &= position > position[first:, None] - attention_spec.window
        q, k, v = (states.transpose(0, 1)[None] for states in (query[first:], key, value))
        out = dense_attend(q, k, v, mask[None, None], attention_spec)  # [1, Hq, queries, Dv]
        own = out[0].transpose(0, 1).to(query.dtype)
        return own if not first else torch.cat([own.new_zeros(first, *own.shape[1:]), own])

    return attend
