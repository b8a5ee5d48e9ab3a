"""Which rounds run from the graphs of one bucket of rows, and as what they are sent to them.

Rounds in which every row verifies, and those that read short prompts, alone or beside other rows: these prompts stand
in virtual rows (`specdec/rounds/virtual_rows.py`), so that the whole round is one replay. By segments the host launches
a graph and two kernels of attention for each layer, which takes it 4 ms at the Llama-3.1-8B shape: as long as the
device is at work.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from attention.batch.staging import Field, StagingArena, bucket_of
from specdec.config import EngineConfig
from specdec.rounds.buckets import TILE_TOKENS
from specdec.rounds.static import FixedTarget
from specdec.rounds.verification import TargetArrays
from specdec.rounds.virtual_rows import num_virtual_rows, virtual_rows

MOST_KEYS = 32_768
"""Keys that the virtual rows of a round may read beside those that its own rows read.

A virtual row reads all keys before it, where a prompt in one piece would read them once. At the Llama-3.1-8B shape
(4 KB of keys and values for each token and layer, 32 layers) so many take an H200 1.4 ms at 3 TB/s where all come from
its memory, and less where they come from its second-level cache. Calculated, not measured."""


@dataclass(frozen=True)
class FixedRound:
    """A round as the graphs of a bucket run it.

    Attributes:
        bucket: its rows. target: what is sent.
        num_own, following: see `FixedTarget.send` and `VirtualRows`; None where every row verifies.
    """

    bucket: int
    target: TargetArrays
    num_own: int | None = None
    following: np.ndarray | None = None


class FixedRounds:
    """Chooses the bucket of a round."""

    def __init__(
        self, config: EngineConfig, fixed: Mapping[int, FixedTarget], num_modules: int, device: torch.device
    ) -> None:
        """fixed: by rows of the bucket; num_modules: M of the loop whose draft prefills follow, 0 where none do."""
        self._fixed = fixed
        self._sizes = sorted(fixed)
        self._query_len = config.num_speculative_tokens + 1
        self._num_modules = num_modules
        most = [rows for rows in self._sizes if rows * self._query_len <= TILE_TOKENS]
        self._most_virtual = (
            most[-1] if most and num_modules == 1 and not config.windowed and not config.recurrent else 0
        )
        field = Field("following", np.int64, ("rows", "tokens"))
        self._bucket = bucket_of(rows=max(self._most_virtual, 1), tokens=self._query_len)
        self._arena = StagingArena([field], self._bucket, device)

    @property
    def transfers(self) -> int:
        """Host-to-device copies of `send_following` so far."""
        return self._arena.generation

    def fitting(self, rows: int) -> int:
        """The smallest bucket that holds so many rows."""
        return self._sizes[bisect_left(self._sizes, rows)]

    def choose(self, target: TargetArrays) -> FixedRound | None:
        """None for a round that has no fixed shape.

        Before position M-1 a request has no rows yet for the later ones of M modules; a fixed shape has them all.
        """
        if not target.only_bonus_tokens:
            return self._in_virtual_rows(target)
        if self._num_modules > 1 and target.start.min() < self._num_modules - 1:
            return None
        return FixedRound(self.fitting(len(target.start)), target)

    def send_following(self, round_: FixedRound) -> torch.Tensor | None:
        """The round's `following` on the device, until the next is sent."""
        if round_.following is None:
            return None
        return self._arena.send(self._bucket, {"following": round_.following})["following"]

    def _in_virtual_rows(self, target: TargetArrays) -> FixedRound | None:
        """A round with short prompts.

        Only in buckets of one tile of tokens, in which a matmul takes as long for any number of them. Without drafts a
        row holds one token. Virtual rows are computed side by side, which a recurrent layer's tokens are not. Of M > 1
        modules each takes an output of the row before, which lies in another virtual row.
        """
        query_len, rows = self._query_len, num_virtual_rows(target, self._query_len)
        if rows > self._most_virtual:
            return None
        laid = virtual_rows(target, query_len)
        fitting, num_own = self.fitting(rows), len(target.start)
        if int(laid.target.start[num_own:].sum()) > MOST_KEYS or not self._fixed[fitting].holds(laid.target):
            return None
        return FixedRound(fitting, laid.target, num_own, laid.following)
