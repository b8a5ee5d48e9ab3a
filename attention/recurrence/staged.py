"""Recurrent states in the arena of a batch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from attention.batch.metadata import CommonAttentionMetadata, ExtraSection
from attention.recurrence.index import StateArrays, StateIndex
from attention.recurrence.rows import StateRows


class StateSection(ExtraSection):
    """The arrays of a `StateIndex` in the arena of a batch; rows that are added are on the null slot."""

    def __init__(self, name: str, shared: Mapping[str, str], most_replayed: int | None = None) -> None:
        """name, shared: see `MakeSection`. most_replayed: see `StateIndex`, for rounds that are written in place."""
        super().__init__(StateArrays, "states", name, shared)
        self._most_replayed = most_replayed

    def of(self, metadata: CommonAttentionMetadata, views: Mapping[str, torch.Tensor]) -> StateRows | None:
        """See `ExtraSection.of`."""
        own = metadata.host.extra(StateIndex)
        if own is None:
            return None
        most = {"max_query_len": metadata.max_query_len, "max_replay": own.max_replay}
        found: StateRows = self.arrays.of(views, StateRows, query_start_loc=metadata.query_start_loc, **most)
        return found

    def buffers(self, host: Mapping[str, np.ndarray]) -> StateIndex:
        """See `ExtraSection.buffers`."""
        found: StateIndex = self.arrays.of(host, StateIndex, most_replayed=self._most_replayed)
        return found
