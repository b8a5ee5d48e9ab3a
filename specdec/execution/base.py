"""Executor: the protocol of the device's part of a round, with its inputs and results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from attention.runner import GroupRunner
from drafters.base import Head
from drafters.loops.base import Draft, DraftInput, DraftLoop, FixedLoop
from specdec.acceptance.judge import Drafted
from specdec.execution.readback import HostReads, Readback
from specdec.execution.sampled import SampledDrafts
from specdec.rounds.randomness import SamplingRound
from specdec.rounds.transfer import DeviceRound
from specdec.rounds.verification import TargetArrays


@dataclass(frozen=True)
class GraphReport:
    """Number, time and memory of the captured graphs.

    Attributes:
        graphs: number of graphs for the buckets' rounds; sampled_graphs: additional graphs that only rounds with
            sampled rows run; segment_graphs: graphs for rounds of any shape (more are captured on demand).
        rows: the buckets; seconds: time of compiling and capturing; bytes: memory reserved meanwhile; fused_groups:
            groups of sibling projections fused into one matmul; products: how matmul algorithms were chosen.
    """

    graphs: int
    sampled_graphs: int
    segment_graphs: int
    rows: tuple[int, ...]
    seconds: float
    bytes: int
    fused_groups: int
    products: str


@dataclass(frozen=True)
class Round:
    """A sent round; target: its host arrays.

    Attributes:
        sent: the verification in its own shape on the device; None where all of the round runs from graphs.
        bucket: rows of the CUDA graphs that verify it; None where it runs by segments or operator by operator.
        drafting: the draft loop's arrays, for that loop alone; None where no row drafts or goes on reading its prompt.
        sampling: only for a round from graphs with sampled rows. It is sent after the launch of the verification, which
            does not need it; the graph decides all rows greedily, then the sampled rows are decided again.
    """

    target: TargetArrays
    sent: DeviceRound | None
    bucket: int | None
    drafting: object | None = None
    sampling: SamplingRound | None = None

    @property
    def sampled(self) -> bool:
        """Whether any row of a round from graphs is sampled."""
        return self.sampling is not None

    @property
    def num_rows(self) -> int:
        """J."""
        return len(self.target.decided)


@dataclass(frozen=True)
class Verification:
    """A target forward and the acceptance of its drafts, launched. The draft loop starts from `aux_hidden_states`.

    Attributes:
        packed: the `PackedResult` of the J decided rows on its way to the host.
        aux_hidden_states: [T, A·Ht] aux hidden states on the device, valid until the next forward.
    """

    packed: Readback
    aux_hidden_states: Tensor


@dataclass(frozen=True)
class DraftedVerification(Verification):
    """A verification with the draft prefill launched after it, from graphs.

    Attributes:
        launch_steps: launches the draft steps of all its rows, given num_accepted [J], and returns the drafts, first
            one included, in the order of its rows.
    """

    launch_steps: Callable[[np.ndarray], Draft]


@dataclass(frozen=True)
class ChainedVerification(Verification):
    """A verification from a CUDA graph, of rows without drafts: each decides one token, the next bonus token.

    Attributes:
        launch_next: launches the verification of the same rows after it. The bonus tokens of those arrays are ignored:
            they are copied on the device. Returns the sent round and its verification.
    """

    launch_next: Callable[[TargetArrays, SamplingRound | None], tuple[Round, Verification]]


@dataclass(frozen=True)
class Drafter:
    """A head, its draft loop, and the cache group it drafts on."""

    head: Head
    loop: DraftLoop[Any, Any]
    runner: GroupRunner


@dataclass(frozen=True)
class DraftBuffers:
    """Where rounds from graphs find their drafts: at fixed places, by row of the verification before.

    Attributes:
        loop: has the buffer of drafts. drawn: distributions of the drafts of sampled rows; None if none are drawn.
    """

    loop: FixedLoop
    drawn: SampledDrafts | None


@runtime_checkable
class CapturesLate(Protocol):
    """An executor that may compile and capture between rounds, too.

    Attributes:
        before_capture: called before it does; raises if the model has changed.
    """

    before_capture: Callable[[], None] | None


class Executor(Protocol):
    """The device's part of a round."""

    @property
    def draft_buffers(self) -> DraftBuffers | None:
        """Where drafts lie between two rounds; None if each round makes new tensors for them."""

    @property
    def transfers(self) -> int:
        """Host-to-device copies that this executor has made so far."""

    @property
    def reads(self) -> HostReads:
        """Starts and finishes the rounds' device-to-host reads."""

    def send(self, draft: DraftInput | None, target: TargetArrays, sampling: SamplingRound | None) -> Round:
        """Lay out a round and send it; `draft` is None when no draft loop starts from aux hidden states."""

    def draft(self, round_: Round, aux_hidden_states: Tensor) -> Drafted:
        """Launch the draft loop that was sent; None when the round has none."""

    def verify(self, round_: Round, draft: Drafted) -> Verification:
        """Launch the target forward and the acceptance of its drafts, and start reading the result."""
