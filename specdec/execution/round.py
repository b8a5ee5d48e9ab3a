"""Round: a round that an executor has sent."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.rounds.randomness import SamplingRound
from specdec.rounds.transfer import SentRound
from specdec.rounds.verification import TargetArrays


@dataclass(frozen=True)
class Round:
    """A sent round; target: its host arrays.

    Attributes:
        sent: the round in its own shape on the device; None where all of it runs from graphs.
        bucket: rows of the CUDA graphs that verify it; None where it runs by segments or operator by operator.
        sampling: of a round from graphs with sampled rows: sent once its verification is launched, which does not need
            it; then the sampled rows are decided again, after the graph has decided all rows greedily.
    """

    target: TargetArrays
    sent: SentRound | None
    bucket: int | None
    sampling: SamplingRound | None = None

    @property
    def sampled(self) -> bool:
        """Whether any row of a round from graphs is sampled."""
        return self.sampling is not None

    @property
    def num_rows(self) -> int:
        """J."""
        return len(self.target.decided)
