"""The device's part of a round: its protocol, and what goes in and out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from attention.runner import GroupRunner
from drafters.base import Head
from drafters.loops.base import Draft, DraftInput, DraftLoop
from specdec.execution.moving import Moves
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


@runtime_checkable
class CapturesLate(Protocol):
    """An executor that may compile and capture between rounds, too.

    Attributes:
        before_capture: called before it does; raises where the model is not what it was.
    """

    before_capture: Callable[[], None] | None


class Executor(Protocol):
    """The device's part of a round."""

    @property
    def moves(self) -> Moves:
        """Its part in requests that move between engines."""

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

    def verify(self, round_: Round, draft: Draft | None) -> Verification:
        """Launch the target forward and the acceptance of its drafts, and start reading the result."""
