"""The verification result: packed on the device into one tensor, unpacked on the host. Only this file has its columns.

[J, 2n+2] int64: num_accepted | n+1 tokens, valid up to num_accepted | n drafts
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedResult:
    """The device's side: `packed` in the layout above, of J rows with up to n drafts; accessors are views."""

    packed: Tensor

    @classmethod
    def pack(cls, num_accepted: Tensor, next_token: Tensor, drafts: Tensor) -> PackedResult:
        """num_accepted, next_token [J]; drafts [J, n], all int64. Accepted drafts and next_token become the tokens.

        >>> result = PackedResult.pack(torch.tensor([1]), torch.tensor([9]), torch.tensor([[5, 6]]))
        >>> result.packed.tolist(), result.tokens.tolist(), result.drafts.tolist()
        ([[1, 5, 9, 0, 5, 6]], [[5, 9, 0]], [[5, 6]])
        """
        tokens = torch.cat([drafts, drafts.new_zeros(len(drafts), 1)], 1)
        tokens.scatter_(1, num_accepted[:, None], next_token[:, None])
        return cls(torch.cat([num_accepted[:, None], tokens, drafts], 1))

    @classmethod
    def empty(cls, rows: int, num_drafts: int, device: torch.device) -> PackedResult:
        """A result that is still to be written, through the accessors."""
        return cls(torch.empty(rows, _columns(num_drafts), dtype=torch.int64, device=device))

    @classmethod
    def zeros(cls, rows: int, num_drafts: int, device: torch.device) -> PackedResult:
        """A result in which nothing is accepted."""
        return cls(torch.zeros(rows, _columns(num_drafts), dtype=torch.int64, device=device))

    @staticmethod
    def numel(rows: int, num_drafts: int) -> int:
        """Elements of a result of `rows` rows with up to num_drafts drafts."""
        return rows * _columns(num_drafts)

    @property
    def num_rows(self) -> int:
        """J."""
        return len(self.packed)

    @property
    def num_accepted(self) -> Tensor:
        """[J]."""
        return self.packed[:, 0]

    @property
    def tokens(self) -> Tensor:
        """[J, n+1], valid up to num_accepted: the last valid one is the next bonus token."""
        return self.packed[:, 1 : 1 + self.packed.shape[1] // 2]

    @property
    def first_token(self) -> Tensor:
        """[J], all that a row without drafts commits."""
        return self.packed[:, 1]

    @property
    def drafts(self) -> Tensor:
        """[J, n]."""
        return self.packed[:, 1 + self.packed.shape[1] // 2 :]

    def rows(self, count: int) -> PackedResult:
        """The first `count` rows."""
        return PackedResult(self.packed[:count])


@dataclass(frozen=True)
class Outcome:
    """The round's one device-to-host read.

    num_accepted [J]; tokens [J, n+1], valid up to num_accepted; drafts [J, n]. notes: further arrays read with them,
    see `specdec.rounds.extras.RoundExtra.notes`; () if no row has any.
    """

    num_accepted: np.ndarray
    tokens: np.ndarray
    drafts: np.ndarray
    notes: tuple[np.ndarray, ...] = ()


def unpack_outcome(packed: np.ndarray) -> Outcome:
    """packed [J, 2n+2] as `PackedResult` has it, on the host."""
    middle = 1 + packed.shape[1] // 2
    return Outcome(packed[:, 0], packed[:, 1:middle], packed[:, middle:])


def _columns(num_drafts: int) -> int:
    return 2 * num_drafts + 2
