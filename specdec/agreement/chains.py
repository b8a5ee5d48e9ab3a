"""What a head would have had accepted on a text, from every position of it.

The training-time test runs all chains of drafts at once on the text's own tokens. A chain's step k is what the head
would really have drafted as long as its steps before k hit the text; what comes after the first miss does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from drafters.base import Head
from drafters.unroll import unroll
from specdec.acceptance.accept import accept_greedy
from specdec.agreement.texts import Passage
from specdec.requests.stats import AcceptanceStats, RoundRecord, pool


@dataclass(frozen=True)
class Chains:
    """One chain of drafts from each position of some texts.

    Attributes:
        drafted, accepted: [C] int64, drafts of each chain and how many of them the target says itself.
    """

    drafted: torch.Tensor
    accepted: torch.Tensor

    @property
    def stats(self) -> AcceptanceStats:
        """As if each chain had been a round."""
        pairs = zip(self.drafted.tolist(), self.accepted.tolist(), strict=True)
        return pool(RoundRecord(drafted, accepted, accepted + 1) for drafted, accepted in pairs)

    def gain_over(self, other: Chains) -> tuple[float, float]:
        """Mean of the further drafts accepted per chain, and its standard error."""
        more = (self.accepted - other.accepted).double()
        return float(more.mean()), float(more.std(correction=1)) / max(len(more), 1) ** 0.5


def runs_in_chains(head: Head) -> bool:
    """Whether the training-time test can run a head's attention."""
    return not any(k.window is not None or k.softcap is not None or k.has_sinks for k in head.attention_specs)


@torch.no_grad()
def chains(
    head: Head, passages: Sequence[Passage], states: Iterable[Mapping[int, torch.Tensor]], num_drafts: int
) -> Chains:
    """Draft from every position of every answer.

    Args:
        states: the target's, of each passage by layer; the head's aux layers are among them.
        num_drafts: K, at least 1; fewer where the answer ends.
    """
    found = [
        _chains_of(head, passage, torch.cat([of[layer] for layer in head.aux_layers], dim=-1), num_drafts)
        for passage, of in zip(passages, states, strict=True)
    ]
    return Chains(torch.cat([c.drafted for c in found]), torch.cat([c.accepted for c in found]))


def _chains_of(head: Head, passage: Passage, aux_hidden_states: torch.Tensor, num_drafts: int) -> Chains:
    """Row p has the target's state at p and the token at p + 1, the bonus token of a round; it drafts from p + 2 on."""
    ids, device = passage.token_ids, passage.token_ids.device
    rows = torch.arange(passage.start - 1, max(len(ids) - 2, passage.start - 1), device=device)  # [C]
    drafted = (len(ids) - 2 - rows).clamp(max=num_drafts)
    outputs = unroll(head, ids[None], aux_hidden_states[None], num_drafts)
    drafts = torch.stack([head.to_target_ids(head.logits(x[rows]).argmax(-1)) for x in outputs], dim=1)  # [C, K]
    places = rows[:, None] + torch.arange(2, num_drafts + 3, device=device)  # [C, K + 1]
    wanted = ids[places.clamp(max=len(ids) - 1)]  # past the end nothing is drafted
    return Chains(drafted, accept_greedy(drafts, drafted, wanted).num_accepted)
