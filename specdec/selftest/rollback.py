"""Verifications of a recurrent target in the self-tests: drafts are rejected, and the next round replays the others.

A row is read up to its bonus token, verified with drafts of which the last is wrong where there are two or more, and
verified again from the token after the accepted ones. What the second verification says shows whether rejected drafts
have left a trace in a state, and whether each accepted one is replayed, once. Where storing states may be put off, the
first does that and the second does not, and a third one follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from attention.recurrence.index import StateIndex, slots_of_rows
from specdec.selftest.rereading import read_paged
from specdec.wrapped.target import Target

_MOST_DRAFTS, _MOST_OF_THREE = 3, 2


@dataclass(frozen=True)
class Rollback:
    """How rows are verified after their prompts.

    Attributes:
        drafts, accepted: of every verification but the last, which accepts all.
        num_new: of each verification, see `StateIndex`.
    """

    drafts: int
    accepted: int
    num_new: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens after a prompt that the verifications read."""
        return (len(self.num_new) - 1) * (1 + self.accepted) + 1 + self.drafts


def rollback_of(target: Target) -> Rollback:
    """As many drafts as K allows, three at most, two in three verifications, which so read seven tokens as well (at K=1
    six in place of four); one is rejected where there are two or more."""
    assert target.states is not None
    rule = target.states.group.rule
    num_new = (0, 1, 1) if rule.defers else (1, 1)
    drafts = min(rule.num_drafts, _MOST_DRAFTS if len(num_new) == 2 else _MOST_OF_THREE)
    return Rollback(drafts, min(drafts, max(drafts - 1, 1)), num_new)


def read_rollback(
    target: Target,
    ids: list[torch.Tensor],
    prompts: np.ndarray,
    table: np.ndarray,
    read: Callable[..., list[torch.Tensor]] = read_paged,
) -> list[tuple[np.ndarray, np.ndarray, list[torch.Tensor]]]:
    """Verify rows whose `prompts` [B] tokens were read.

    Args:
        read: `read_paged`, or what keeps something of it besides.

    Returns:
        Of each verification first and last position [B] of what is right, and its logits [last - first, V] by row.
    """
    plan, rows, found = rollback_of(target), np.arange(len(ids)), []
    start, replay, accepted = prompts, np.zeros_like(prompts), plan.accepted
    for left, num_new in zip(reversed(range(len(plan.num_new))), plan.num_new, strict=True):
        end = start + 1 + plan.drafts
        right = start + 1 + accepted if left else end
        given = [row.clone() for row in ids]
        for row, bad, last in zip(given, right, end, strict=True):
            row[bad:last] = (row[bad:last] + 1) % target.num_embeddings
        logits = read(target, given, start, end, table, states=verifying(rows, start, replay, num_new))
        found.append((start, right, [x[:n] for x, n in zip(logits, right - start, strict=True)]))
        start, replay = start + 1 + accepted, accepted + (0 * replay if num_new else 1 + replay)
    return found


def verifying(rows: np.ndarray, start: np.ndarray, replay: np.ndarray, num_new: int = 1) -> StateIndex:
    """The states of verifications of these rows from their bonus tokens at `start` on; num_new: of each row."""
    return StateIndex.of(slots_of_rows(rows), start, replay, np.full_like(start, num_new))
