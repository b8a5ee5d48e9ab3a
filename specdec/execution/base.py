"""The device's part of a round: its protocol, and what goes in and out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from attention.runner import GroupRunner
from drafters.base import Head
from drafters.loops.base import Draft, DraftInput, DraftLoop
from specdec.execution.readback import HostReads, Readback
from specdec.rounds.randomness import SamplingRound
from specdec.rounds.transfer import SentRound
from specdec.rounds.verification import TargetArrays, Verified


@dataclass(frozen=True)
class Drafter:
    """A head, its draft loop, and the cache group it drafts on."""

    head: Head
    loop: DraftLoop[Any, Any]
    runner: GroupRunner


@dataclass(frozen=True)
class Round:
    """A sent round.

    Attributes:
        target: its host arrays.
        sent: the round in its own shape on the device; None where all of it runs from graphs.
        bucket: rows of the CUDA graphs that verify it; None where it runs operator by operator.
        sampled: whether rows are sampled: a graph gives the logits then, and they are judged apart.
    """

    target: TargetArrays
    sent: SentRound | None
    bucket: int | None
    sampled: bool

    @property
    def num_rows(self) -> int:
        """J."""
        return len(self.target.judged)


@dataclass(frozen=True)
class Verification:
    """What a target forward decided.

    Attributes:
        packed: the `PackedVerdict` of the J judged rows on its way to the host.
        tapped: [T, A·Ht] aux hidden states on the device, valid until the next forward.
        draft_on: where the draft prefill runs after the verification already: launches the further draft steps
            of all its rows, given num_accepted [J]. None where the draft loop starts from `tapped`.
        follow: where a round can be launched after this one before it is read: launches a verification whose bonus
            tokens are those that this one decides. Else None.
    """

    packed: Readback
    tapped: torch.Tensor
    draft_on: Callable[[np.ndarray], Draft] | None = None
    follow: Callable[[TargetArrays], tuple[Round, Verification]] | None = None


class Executor(Protocol):
    """The device's part of a round."""

    @property
    def transfers(self) -> int:
        """Host-to-device copies of ours so far."""

    @property
    def reads(self) -> HostReads:
        """What starts the rounds' device-to-host reads."""

    def verified(self, verified: Verified, round_: Round) -> Verified:
        """A verification after its commit, with the token rows where the executor put them."""

    def send(self, draft: DraftInput | None, target: TargetArrays, sampling: SamplingRound | None) -> Round:
        """Lay out a round and send it; `draft` is None when no draft loop starts from aux hidden states."""

    def draft(self, round_: Round, tapped: torch.Tensor) -> Draft | None:
        """Launch the draft loop that was sent; None when the round has none."""

    def verify(self, round_: Round, draft: Draft | None) -> Verification:
        """Launch the target forward and the judgement of its logits, and start reading the result."""
