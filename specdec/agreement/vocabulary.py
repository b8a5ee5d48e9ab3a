"""Whether a head's draft ids stand for the tokens that its vocabulary map (d2t) says.

A wrong map leaves a head's own choices intact: the same draft id still comes where the target says the same token, only
another token than d2t says. So what each draft id stands for is learnt from one half of the answers and tried on the
other, and compared with the map.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from drafters.base import Head
from drafters.unroll import unroll
from specdec.agreement.texts import Passage

_RIGHT, _MARGIN, _SIGMAS, _LEAST_IDS = 0.25, 0.1, 4.0, 8
"""A learnt map must hit this share of first drafts, so much more than d2t does, by so many standard errors, and for a
head that says this many different draft ids (one that says a single id hits that of the commonest token)."""


@dataclass(frozen=True)
class MapCheck:
    """The map of the file against one learnt from the answers, on first drafts that it was not learnt from.

    Attributes:
        mapped, learnt: share of first drafts that are the target's own token.
        error: standard error of their difference.
        num_ids: different draft ids that the head says.
        examples: (draft id, token by d2t, token that it comes with, how often, of how many), the commonest first.
    """

    mapped: float
    learnt: float
    error: float
    num_ids: int
    examples: tuple[tuple[int, int, int, int, int], ...]

    @property
    def is_wrong(self) -> bool:
        """Whether the map is wrong beyond doubt."""
        gain = self.learnt - self.mapped
        return self.num_ids >= _LEAST_IDS and self.learnt >= _RIGHT and gain >= max(_MARGIN, _SIGMAS * self.error)

    @property
    def cause(self) -> str:
        """What is said of a wrong map."""
        shown = "; ".join(
            f"draft id {draft} is token {mapped} by d2t, and comes with token {token} in {hits} of {count} places"
            for draft, mapped, token, hits, count in self.examples
        )
        return (
            f"the vocabulary map (d2t) does not belong to the head's lm_head: {self.mapped:.0%} of first drafts are "
            f"the target's token by d2t, {self.learnt:.0%} by a map learnt from other answers ({shown}). Take d2t and "
            "t2d from the same export as the weights"
        )


@torch.no_grad()
def check_map(head: Head, passages: Sequence[Passage], states: Iterable[Mapping[int, torch.Tensor]]) -> MapCheck:
    """Compare a head's vocabulary map with one learnt from answers.

    Args:
        states: the target's, of each passage by layer; the head's aux layers are among them.
    """
    said = [_first_drafts(head, passage, of) for passage, of in zip(passages, states, strict=True)]
    halves = [[pair for pairs in said[half::2] for pair in pairs] for half in (0, 1)]
    ids = sorted({draft for half in halves for draft, _ in half})
    tokens = dict(
        zip(ids, head.to_target_ids(torch.tensor(ids, device=passages[0].token_ids.device)).tolist(), strict=True)
    )
    hits = [
        (float(tokens[draft] == token), float(learnt.get(draft) == token))
        for learnt, tried in ((_learnt(halves[0]), halves[1]), (_learnt(halves[1]), halves[0]))
        for draft, token in tried
    ]
    table = torch.tensor(hits, dtype=torch.float64).reshape(-1, 2)
    gain = table[:, 1] - table[:, 0]
    error = float(gain.std(correction=1)) / max(len(gain), 1) ** 0.5 if len(gain) > 1 else float("inf")
    mapped, learnt = (float(share) for share in table.mean(0)) if len(table) else (0.0, 0.0)
    return MapCheck(mapped, learnt, error, len(ids), _examples([*halves[0], *halves[1]], tokens))


def _first_drafts(head: Head, passage: Passage, states: Mapping[int, torch.Tensor]) -> list[tuple[int, int]]:
    """(draft id of the first draft, the target's own token) at each position of an answer."""
    ids, aux_hidden_states = passage.token_ids, torch.cat([states[layer] for layer in head.aux_layers], dim=-1)
    rows = torch.arange(passage.start - 1, max(len(ids) - 2, passage.start - 1), device=ids.device)
    (outputs,) = unroll(head, ids[None], aux_hidden_states[None], 1)
    return list(zip(head.logits(outputs[rows]).argmax(-1).tolist(), ids[rows + 2].tolist(), strict=True))


def _counted(pairs: Iterable[tuple[int, int]]) -> dict[int, Counter[int]]:
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for draft, token in pairs:
        counts[draft][token] += 1
    return counts


def _learnt(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    """The token that each draft id comes with most."""
    return {draft: seen.most_common(1)[0][0] for draft, seen in _counted(pairs).items()}


def _examples(
    pairs: Iterable[tuple[int, int]], tokens: Mapping[int, int]
) -> tuple[tuple[int, int, int, int, int], ...]:
    """The commonest draft ids that come with another token than the map says."""
    counts = sorted(_counted(pairs).items(), key=lambda item: -item[1].total())
    found = [(draft, tokens[draft], *seen.most_common(1)[0], seen.total()) for draft, seen in counts]
    return tuple(row for row in found if row[1] != row[2])[:3]
