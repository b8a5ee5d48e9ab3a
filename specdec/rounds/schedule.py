"""Schedule: the rows of the next target forward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Schedule:
    """The rows of the next target forward: those with drafts, then others whose token it decides, then unread prompts.

    Attributes:
        rows: [B] int64 RowTable rows.
        num_new: [B] committed tokens each row reads (1 for a verification, the chunk length for a prompt).
        num_drafts: [B] n_i; rows 0 … num_drafting-1 have n_i >= 1.
        num_arrived: how many of those, the last ones, have drafts that came with them from another engine.
    """

    rows: np.ndarray
    num_new: np.ndarray
    num_drafts: np.ndarray
    num_arrived: int = 0

    @property
    def num_drafting(self) -> int:
        """R."""
        return int(np.count_nonzero(self.num_drafts))

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.num_new.sum() + self.num_drafts.sum())
