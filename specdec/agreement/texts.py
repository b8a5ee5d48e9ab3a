"""Texts that a target writes itself, and its hidden states on them: what a head's drafts are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from specdec.requests.request import Completion
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


@dataclass(frozen=True)
class Passage:
    """A prompt with the target's own greedy answer.

    Attributes:
        token_ids: [T] int64. start: where the answer begins.
    """

    token_ids: torch.Tensor
    start: int

    @classmethod
    def of(cls, completion: Completion, device: torch.device) -> Passage:
        """The text of a greedy completion."""
        prompt = list(completion.prompt_token_ids)
        return cls(torch.tensor([*prompt, *completion.token_ids], device=device), len(prompt))


@torch.no_grad()
def boundary_states(
    probed: TargetProbe, passages: Sequence[Passage], layers: Sequence[int]
) -> list[Mapping[int, torch.Tensor]]:
    """The target's states on each passage, by its own forward: [T, Ht] after each of these layers.

    Args:
        layers: boundaries 0 … N, or `drafters.base.FINAL_NORM`.
    """
    places = tuple(dict.fromkeys(layers))
    alterations = Alterations(probed)
    try:
        longest = max(len(passage.token_ids) for passage in passages)
        recorder = AuxStateRecorder(probed, places, longest, alterations)
        found: list[Mapping[int, torch.Tensor]] = []
        for passage in passages:
            length = len(passage.token_ids)
            with recorder.recording(length):
                probed.model(input_ids=passage.token_ids[None], use_cache=False)
            parts = recorder.buffer[:length].clone().chunk(len(places), dim=-1)
            found.append(dict(zip(places, parts, strict=True)))
        return found
    finally:
        alterations.undo()
