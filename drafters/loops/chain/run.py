"""The draft loop that every head shares: a first pass over the target's true hidden states, then one row a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from attention.batch.metadata import CommonAttentionMetadata
from attention.runner import GroupRunner, PlannedBatch
from drafters.base import Attend, Head

Choose = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""(step j from 0, draft logits [R, Vd]) -> (draft ids [R] int64 on the draft vocabulary, probabilities q [R, Vd] or
None for a one-hot q). How to choose is the caller's business: acceptance must know q."""


@dataclass(frozen=True)
class FirstPass:
    """Inputs of the head's first pass over T' rows.

    Attributes:
        token_ids: [T'] int64, shifted: the token at position p+1.
        token_indices: [T'] int64, rows of the target's tapped states.
        last_row: [R] int64, rows whose output gives draft 1; R may be 0 (prompt chunks only).
        metadata: attention of the pass; its rows 0 … R-1 are the drafting rows.
    """

    token_ids: torch.Tensor
    token_indices: torch.Tensor
    last_row: torch.Tensor
    metadata: CommonAttentionMetadata


@dataclass(frozen=True)
class Draft:
    """What a round of drafting gives back; stays on the device.

    Attributes:
        token_ids: [R, n] int64 target-vocabulary ids, n = number of steps made.
        probs: [R, n, Vd] draft distributions, or None when every draft is greedy (one-hot q).
    """

    token_ids: torch.Tensor
    probs: torch.Tensor | None


def paged_attend(runner: GroupRunner, planned: PlannedBatch) -> Attend:
    """The head's attention over its paged cache for one planned batch."""

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return runner.attend(planned, layer, query, key, value)

    return attend


def draft_chain(
    head: Head,
    runner: GroupRunner,
    tapped: torch.Tensor,
    first: FirstPass,
    steps: Sequence[CommonAttentionMetadata],
    choose: Choose,
) -> Draft:
    """Draft a chain: step 1 from the first pass, steps 2 … n by feeding the head its own output.

    The first pass rewrites the head's KV of all kept positions from the target's true hidden states; what the later
    steps write is scratch.

    Args:
        tapped: [T, A·Ht] tapped states of the target's last forward.
        steps: attention of steps 2 … n, one token a row, the same R rows.
        choose: picks the draft token from logits.

    Source: EAGLE-3, arXiv 2503.01840, section 3; SafeAILab/EAGLE eagle/model/cnets.py (topK_genrate, stable_kv).
    """
    x = first_pass(head, runner, tapped, first)
    if x is None:
        return Draft(first.token_ids.new_empty(0, 0), None)
    ids, probs = choose(0, head.logits(x))
    chosen, token_ids = [probs], [head.to_target_ids(ids)]
    for step, metadata in enumerate(steps, 1):
        attend = paged_attend(runner, runner.plan(metadata))
        x = head.forward(token_ids[-1], head.feedback(x), metadata.positions, attend)
        ids, probs = choose(step, head.logits(x))
        chosen.append(probs)
        token_ids.append(head.to_target_ids(ids))
    sampled = [p for p in chosen if p is not None]
    return Draft(torch.stack(token_ids, 1), torch.stack(sampled, 1) if sampled else None)


def first_pass(head: Head, runner: GroupRunner, tapped: torch.Tensor, first: FirstPass) -> torch.Tensor | None:
    """The head's pass over the kept rows: output rows [R, H] that give draft 1, or None when no row drafts."""
    hidden = head.fuse(tapped.index_select(0, first.token_indices))  # [T', H]
    attend = paged_attend(runner, runner.plan(first.metadata))
    x = head.forward(first.token_ids, hidden, first.metadata.positions, attend)
    return x.index_select(0, first.last_row) if len(first.last_row) else None
