"""A launched verification, in the type of the pipeline that it belongs to.

The type says what the device can go on with, and so where the next round comes from:

    Verification         nothing: the draft loop and the next round are made after the commit
    DraftedVerification  the draft prefill runs after it: the draft steps need only the accepted counts
    ChainedVerification  no drafts: the next verification reads its bonus tokens on the device
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from drafters.loops.base import Draft
from specdec.execution.readback import Readback
from specdec.execution.round import Round
from specdec.rounds.randomness import SamplingRound
from specdec.rounds.verification import TargetArrays


@dataclass(frozen=True)
class Verification:
    """A target forward and the acceptance of its drafts, launched. The draft loop starts from `aux_hidden_states`.

    Attributes:
        packed: the `PackedResult` of the J decided rows on its way to the host.
        aux_hidden_states: [T, A·Ht] aux hidden states on the device, valid until the next forward.
    """

    packed: Readback
    aux_hidden_states: torch.Tensor


@dataclass(frozen=True)
class DraftedVerification(Verification):
    """One with the draft prefill launched after it, from graphs.

    Attributes:
        launch_steps: launches the draft steps of all its rows, given num_accepted [J], and returns the drafts, first
            one included, in the order of its rows.
    """

    launch_steps: Callable[[np.ndarray], Draft]


@dataclass(frozen=True)
class ChainedVerification(Verification):
    """One from a CUDA graph, of rows without drafts: each decides one token, the next bonus token.

    Attributes:
        launch_next: launches the verification of the same rows after it. The bonus tokens of those arrays are ignored:
            they are copied on the device. Returns what `Executor.send` would have, and the verification.
    """

    launch_next: Callable[[TargetArrays, SamplingRound | None], tuple[Round, Verification]]
