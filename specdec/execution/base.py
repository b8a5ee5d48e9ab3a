"""The device's part of a round: its protocol, and what goes in and out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from attention.runner import GroupRunner
from drafters.base import Head
from drafters.loops.base import Draft, DraftInput, DraftLoop
from specdec.execution.moving import Arrived
from specdec.execution.readback import HostReads
from specdec.execution.round import Round
from specdec.execution.verification import Verification
from specdec.rounds.randomness import SamplingRound
from specdec.rounds.verification import TargetArrays


@dataclass(frozen=True)
class Drafter:
    """A head, its draft loop, and the cache group it drafts on."""

    head: Head
    loop: DraftLoop[Any, Any]
    runner: GroupRunner


class Executor(Protocol):
    """The device's part of a round."""

    @property
    def transfers(self) -> int:
        """Host-to-device copies of ours so far."""

    @property
    def reads(self) -> HostReads:
        """What starts and finishes the rounds' device-to-host reads."""

    def send(self, draft: DraftInput | None, target: TargetArrays, sampling: SamplingRound | None) -> Round:
        """Lay out a round and send it; `draft` is None when no draft loop starts from aux hidden states."""

    def draft(self, round_: Round, aux_hidden_states: torch.Tensor) -> Draft | None:
        """Launch the draft loop that was sent; None when the round has none."""

    def pack(self, row: int, drafts: bool) -> dict[str, torch.Tensor]:
        """What the request in a RowTable row carries from round to round, copied on the device; drafts: whether its
        drafts were made."""

    def receive(self, round_: Round, draft: Draft | None, arrived: Sequence[Arrived]) -> Draft | None:
        """Take over, into their rows, what requests have brought from another engine; the drafts of the whole round.

        Args:
            round_: sent, its last drafting rows being those of `arrived` that have drafts. draft: of the others.
        """

    def verify(self, round_: Round, draft: Draft | None) -> Verification:
        """Launch the target forward and the acceptance of its drafts, and start reading the result."""
