"""The verification result: packed on the device, read on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Outcome:
    """The round's one device-to-host read.

    num_accepted [J]; tokens [J, n+1], valid up to num_accepted; drafts [J, n].
    """

    num_accepted: np.ndarray
    tokens: np.ndarray
    drafts: np.ndarray


def unpack_outcome(packed: np.ndarray, num_drafts: np.ndarray) -> Outcome:
    """packed [J, 2n+2] as `judge` made it, on the host, of rows with num_drafts [J] drafts."""
    width = packed.shape[1] // 2
    return Outcome(packed[:, 0], packed[:, 1 : 1 + width], packed[:, 1 + width :])
