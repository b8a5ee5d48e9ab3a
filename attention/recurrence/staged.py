"""Recurrent states in the arena of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from attention.batch.host import BatchExtra, HostBatch, extra_of
from attention.batch.metadata import CommonAttentionMetadata
from attention.declared import Section, array_names
from attention.recurrence.index import StateArrays, StateIndex
from attention.recurrence.rows import StateRows

_NAMES = array_names(StateArrays)


class StateSection:
    """The arrays of a `StateIndex` in the arena of a batch: see `ExtraSection`.

    Attributes:
        fields: their places.
    """

    def __init__(self, name: str, shared: Mapping[str, str], most_replayed: int | None = None) -> None:
        """name, shared: see `MakeSection`. most_replayed: see `StateIndex`, for rounds that are written in place."""
        self._section = Section(StateArrays, f"{name}.states", shared=shared)
        self._most_replayed = most_replayed
        self.fields = self._section.fields

    def values(self, batch: HostBatch) -> dict[str, np.ndarray]:
        """See `ExtraSection.values`."""
        own = batch.extra(StateIndex)
        return {} if own is None else self._section.values(own)

    def of(self, metadata: CommonAttentionMetadata, views: Mapping[str, torch.Tensor]) -> StateRows | None:
        """See `ExtraSection.of`."""
        own = metadata.host.extra(StateIndex)
        if own is None:
            return None
        most = {"max_query_len": metadata.max_query_len, "max_replay": own.max_replay}
        found: StateRows = self._section.of(views, StateRows, query_start_loc=metadata.query_start_loc, **most)
        return found

    def buffers(self, host: Mapping[str, np.ndarray]) -> StateIndex:
        """See `ExtraSection.buffers`."""
        found: StateIndex = self._section.of(host, StateIndex, most_replayed=self._most_replayed)
        return found

    def write(self, place: BatchExtra, extras: Sequence[BatchExtra | None]) -> None:
        """See `ExtraSection.write`; rows that are added are on the null slot."""
        own = extra_of(extras, StateIndex)
        for name in _NAMES:
            buffer = getattr(place, name)
            count = 0 if own is None else len(own.slots)
            buffer[count:] = 0
            if own is not None:
                buffer[:count] = getattr(own, name)
