"""Verifications of a recurrent target in the self-tests: drafts are rejected, and the next round replays the others.

A row is read up to its bonus token, verified with drafts of which the last is wrong where there are two or more, and
verified again from the token after the accepted ones. What the second verification says shows whether rejected drafts
have left a trace in a state, and whether each accepted one is replayed, once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from attention.recurrence.index import StateIndex, slots_of_rows
from specdec.target.rereading import read_paged
from specdec.target.target import Target

_MOST_DRAFTS = 3


@dataclass(frozen=True)
class Rollback:
    """How rows are verified after their prompts.

    Attributes:
        drafts, accepted: of the first verification; the second one has as many drafts.
    """

    drafts: int
    accepted: int

    @property
    def num_tokens(self) -> int:
        """Tokens after a prompt that the two verifications read."""
        return 2 + self.accepted + self.drafts


def rollback_of(target: Target) -> Rollback:
    """As many drafts as K allows, three at most; one is rejected where there are two or more."""
    assert target.states is not None
    drafts = min(target.states.group.num_drafts, _MOST_DRAFTS)
    return Rollback(drafts, min(drafts, max(drafts - 1, 1)))


def read_rollback(
    target: Target,
    ids: list[torch.Tensor],
    prompts: np.ndarray,
    table: np.ndarray,
    read: Callable[..., list[torch.Tensor]] = read_paged,
) -> list[tuple[np.ndarray, np.ndarray, list[torch.Tensor]]]:
    """Verify rows twice whose `prompts` [B] tokens were read.

    Args:
        read: `read_paged`, or what keeps something of it besides.

    Returns:
        Of each verification first and last position [B] of what is right, and its logits [last - first, V] by row.
    """
    plan, rows = rollback_of(target), np.arange(len(ids))
    second = prompts + 1 + plan.accepted
    wrong = [row.clone() for row in ids]
    for row, bad, end in zip(wrong, second, prompts + 1 + plan.drafts, strict=True):
        row[bad:end] = (row[bad:end] + 1) % target.num_embeddings
    none, a, b = np.zeros_like(prompts), prompts, prompts + 1 + plan.drafts
    first = read(target, wrong, a, b, table, states=verifying(rows, a, none))
    right = [logits[: 1 + plan.accepted] for logits in first]
    end, replay = second + 1 + plan.drafts, none + plan.accepted
    again = read(target, ids, second, end, table, states=verifying(rows, second, replay))
    return [(a, second, right), (second, end, again)]


def verifying(rows: np.ndarray, start: np.ndarray, replay: np.ndarray) -> StateIndex:
    """The states of verifications of these rows from their bonus tokens at `start` on."""
    return StateIndex.of(slots_of_rows(rows), start, replay, np.ones_like(start))
