"""How well a head predicts texts that its target wrote: accepted drafts, and whether its vocabulary map is right.

The training-time test runs all chains of drafts at once on the text's own tokens. A chain's step k is what the head
would really have drafted as long as its steps before k hit the text; what comes after the first miss does not count.

A wrong map leaves a head's own choices intact: the same draft id comes where the target generates the same token, only
another token than d2t has. So what each draft id stands for is learnt from one half of the answers and tried on the
other, and compared with the map.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.base import BlockHead, ChainHead, Head
from drafters.training.blocks import block_outputs
from drafters.unroll import Gain, unroll
from specdec.acceptance.accept import accept_greedy
from specdec.requests.request import Completion
from specdec.requests.stats import AcceptanceStats, RoundRecord, pool
from specdec.wrapped.alterations import Alterations
from specdec.wrapped.probing import TargetProbe
from specdec.wrapped.target import AuxStateRecorder

PROMPTS = (
    "Tom has 3 boxes of 12 eggs and sells 7 eggs. How many eggs are left?",
    "Anna buys 4 pens for 2 dollars each and a book for 9 dollars. How much does she pay?",
    "A train drives 60 miles in an hour. How far does it go in 3 hours?",
    "A farmer has 15 cows and buys twice as many sheep. How many animals are there?",
    "Why is the sky blue?",
    "Write a short letter to a friend about a day at the sea.",
    "Name three things that plants need to grow, and say why.",
    "What does a program do that sorts a list of numbers?",
)
"""Questions that any target trained on English answers; a target's own are better: `specdec inspect --file`."""
MAX_NEW_TOKENS = 64
States = Mapping[int, Tensor]
"""The target's states on a passage, [T, Ht] after each of some layers, by layer."""


@dataclass(frozen=True)
class Passage:
    """A prompt with the target's own greedy answer. token_ids: [T] int64. start: where the answer begins."""

    token_ids: Tensor
    start: int

    @classmethod
    def of(cls, completion: Completion, device: torch.device) -> Passage:
        """The text of a greedy completion."""
        prompt = list(completion.prompt_token_ids)
        return cls(torch.tensor(prompt + completion.token_ids, device=device), len(prompt))


@torch.no_grad()
def aux_states(probed: TargetProbe, passages: Sequence[Passage], layers: Sequence[int]) -> list[States]:
    """The target's states on each passage, by its own forward. layers: 0 … N, or `drafters.base.FINAL_NORM`."""
    places = tuple(dict.fromkeys(layers))
    alterations = Alterations(probed)
    try:
        longest = max(len(passage.token_ids) for passage in passages)
        recorder = AuxStateRecorder(probed, places, longest, alterations)
        found: list[States] = []
        for passage in passages:
            length = len(passage.token_ids)
            with recorder.recording(length):
                probed.model(input_ids=passage.token_ids[None], use_cache=False)
            parts = recorder.buffer[:length].clone().chunk(len(places), dim=-1)
            found.append(dict(zip(places, parts, strict=True)))
        return found
    finally:
        alterations.undo()


@dataclass(frozen=True)
class Chains:
    """One chain of drafts from each position of some texts.

    Attributes:
        drafted, accepted: [C] int64, drafts of each chain and how many of them the target generates itself.
    """

    drafted: Tensor
    accepted: Tensor

    @property
    def stats(self) -> AcceptanceStats:
        """As if each chain had been a round."""
        pairs = zip(self.drafted.tolist(), self.accepted.tolist(), strict=True)
        return pool(RoundRecord(drafted, accepted, accepted + 1) for drafted, accepted in pairs)


def runs_in_chains(head: Head) -> bool:
    """Whether the drafts from all positions can be made at once: of a head that drafts blocks, or that reads its own
    output, if the training-time test has its attention."""
    return isinstance(head, BlockHead) or (
        isinstance(head, ChainHead) and not any(k.features for k in head.attention_specs)
    )


@torch.no_grad()
def chains(head: Head, passages: Sequence[Passage], states: Iterable[States], num_drafts: int) -> Chains:
    """Draft from every position of every answer.

    Args:
        states: of each passage; the head's aux layers are among them.
        num_drafts: K, at least 1; fewer where the answer or the head's block ends.
    """
    drafted = []
    accepted = []
    for passage, of in zip(passages, states, strict=True):
        rows, draft_ids, wanted = _draft_ids(head, passage, of, num_drafts)
        drafted.append((len(passage.token_ids) - 2 - rows).clamp(max=draft_ids.shape[1]))
        accepted.append(accept_greedy(head.to_target_ids(draft_ids), drafted[-1], wanted).num_accepted)
    return Chains(torch.cat(drafted), torch.cat(accepted))


def _draft_ids(head: Head, passage: Passage, states: States, num_drafts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rows [C] of an answer that draft, what each drafts [C, K], and the answer's tokens from there [C, K + 1].

    Row p has the target's state at p and the token at p + 1, the bonus token of a round; it drafts from p + 2 on. Past
    the end nothing is drafted. K is at most what a block has.
    """
    ids = passage.token_ids
    aux_hidden_states = torch.cat([states[layer] for layer in head.aux_layers], dim=-1)[None]
    rows = torch.arange(passage.start - 1, max(len(ids) - 2, passage.start - 1), device=ids.device)
    if isinstance(head, BlockHead):
        num_drafts = min(num_drafts, head.block_size - head.first_slot)
    places = rows[:, None] + torch.arange(2, num_drafts + 3, device=ids.device)  # [C, K + 1]
    wanted = ids[places.clamp(max=len(ids) - 1)]
    if isinstance(head, BlockHead):
        logits = block_outputs(head, ids[None], aux_hidden_states, rows[None] + 1, wanted[None, :, :-1])[1][0]
        return rows, logits.argmax(-1), wanted
    assert isinstance(head, ChainHead)
    outputs = unroll(head, ids[None], aux_hidden_states, num_drafts)
    return rows, torch.stack([head.logits(x[rows]).argmax(-1) for x in outputs], dim=1), wanted


_RIGHT = 0.25
_LEAST_IDS = 8
"""A learnt map must hit this share of first drafts, clearly more than d2t does, and for a head that drafts this many
different ids (one that drafts a single id hits that of the commonest token)."""


Pairs = Sequence[tuple[int, int]]
"""(draft id, the target's own token)."""


@dataclass(frozen=True)
class MapCheck:
    """The map of the file against one learnt from the answers, on first drafts that it was not learnt from.

    mapped, learnt: share of first drafts that are the target's own token; gain: their difference.
    num_ids: different draft ids that the head emits. examples: of ids that come with another token, in words.
    """

    mapped: float
    learnt: float
    gain: Gain
    num_ids: int
    examples: tuple[str, ...]

    @property
    def is_wrong(self) -> bool:
        """Whether the map is wrong beyond doubt."""
        return self.num_ids >= _LEAST_IDS and self.learnt >= _RIGHT and self.gain.is_clear

    @property
    def cause(self) -> str:
        """The message about a wrong map."""
        return (
            f"the vocabulary map (d2t) does not belong to the head's lm_head: {self.mapped:.0%} of first drafts are "
            f"the target's token by d2t, {self.learnt:.0%} by a map learnt from other answers "
            f"({'; '.join(self.examples)}). Take d2t and t2d from the same export as the weights"
        )


@torch.no_grad()
def check_map(head: Head, passages: Sequence[Passage], states: Iterable[States]) -> MapCheck:
    """Compare a head's vocabulary map with one learnt from answers.

    Args:
        states: of each passage; the head's aux layers are among them.
    """
    said = []  # (draft id of the first draft, the target's own token) at each position of each answer
    for passage, of in zip(passages, states, strict=True):
        _, draft_ids, wanted = _draft_ids(head, passage, of, 1)
        said.append(list(zip(draft_ids[:, 0].tolist(), wanted[:, 0].tolist(), strict=True)))
    halves = [[pair for pairs in said[half::2] for pair in pairs] for half in (0, 1)]
    pairs = halves[0] + halves[1]
    ids = sorted({draft for draft, _ in pairs})
    mapped = head.to_target_ids(torch.tensor(ids, device=passages[0].token_ids.device)).tolist()
    tokens = dict(zip(ids, mapped, strict=True))
    right = [
        (tokens[draft] == token, learnt.get(draft) == token)
        for learnt, tried in ((_learnt(halves[0]), halves[1]), (_learnt(halves[1]), halves[0]))
        for draft, token in tried
    ]
    table = torch.tensor(right, dtype=torch.float64).reshape(-1, 2)
    by_map, by_learning = table.mean(0).nan_to_num().tolist()
    learnt = _learnt(pairs)
    hits = Counter(pairs)
    examples = [
        f"draft id {draft} is token {tokens[draft]} by d2t, and comes with token {learnt[draft]} in "
        f"{hits[draft, learnt[draft]]} of {total} places"
        for draft, total in Counter(draft for draft, _ in pairs).most_common()
        if learnt[draft] != tokens[draft]
    ]
    return MapCheck(by_map, by_learning, Gain.of(table[:, 1] - table[:, 0]), len(ids), tuple(examples[:3]))


def _learnt(pairs: Pairs) -> dict[int, int]:
    """The token that each draft id comes with most often."""
    return {draft: token for (draft, token), _ in reversed(Counter(pairs).most_common())}
