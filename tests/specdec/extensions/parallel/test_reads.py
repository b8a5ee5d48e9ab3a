"""The round's read among several ranks, with collectives and a channel that a test writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import CPU

from specdec.acceptance.packed import Outcome, PackedResult
from specdec.errors import InvalidInputError, RanksLostError
from specdec.execution.readback import HostReads, Readback
from specdec.extensions.parallel.ranks import Ranks


class Scripted:
    """What rank 0 has, for a rank that runs alone in a test."""

    name = "scripted"

    def __init__(self, first: torch.Tensor) -> None:
        self.first = first

    def from_first(self, x: torch.Tensor) -> None:
        x.copy_(self.first)


def ranks_of(first: torch.Tensor) -> Any:
    collectives: Any = Scripted(first)
    channel: Any = None
    return Ranks(1, 2, CPU, collectives, channel)


def test_a_rank_reads_what_rank_0_decided_and_counts_what_it_would_have_said_itself() -> None:
    first = torch.tensor([[1, 5, 9, 5], [0, 7, 0, 6]])
    ranks = ranks_of(first)
    reads = HostReads(64, CPU, ranks)
    own = PackedResult(torch.tensor([[0, 4, 0, 5], [0, 7, 0, 6]]))
    outcome = reads.finish(reads.start(own, torch.tensor([1, 1])), np.array([1, 1]))
    assert outcome.num_accepted.tolist() == [1, 0] and outcome.tokens.tolist() == [[5, 9], [7, 0]]
    assert torch.equal(own.packed, first), "what is launched next reads it on the device"
    assert ranks.count_differing() == 3


def test_before_read_of_rank_0_counts_for_all_and_after_read_may_only_look() -> None:
    ranks = ranks_of(torch.tensor([[0, 3]]))
    reads = HostReads(64, CPU, ranks)
    reads.before_read = lambda result, num_drafts: result.first_token.fill_(9) and None  # type: ignore[assignment]
    seen: list[Outcome] = []

    def look(outcome: Outcome, num_drafts: np.ndarray) -> Outcome:
        seen.append(outcome)
        return outcome

    reads.after_read = look
    result = PackedResult(torch.tensor([[0, 1]]))
    none = np.array([0])
    assert reads.finish(reads.start(result, torch.tensor([0])), none).tokens.tolist() == [[3]] and len(seen) == 1
    reads.after_read = lambda outcome, num_drafts: replace(outcome)
    with pytest.raises(InvalidInputError, match="another result than the one that all ranks have read"):
        reads.finish(reads.start(result, torch.tensor([0])), none)


def test_a_lost_rank_ends_the_wait_for_the_device() -> None:
    class Never:
        def query(self) -> bool:
            return False

    class Lost:
        looks = 0

        def check(self) -> None:
            self.looks += 1
            if self.looks > 3:
                raise RanksLostError("rank 1 is lost")

    collectives: Any = Scripted(torch.zeros(1))
    event: Any = Never()
    channel: Any = Lost()
    ranks = Ranks(0, 2, CPU, collectives, channel)
    with pytest.raises(RanksLostError, match="rank 1 is lost"):
        Readback(torch.zeros(1, 2), event, ranks).wait()
