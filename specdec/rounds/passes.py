"""The passes of a draft prefill over the rows of a verification, in an arena: their attention on the head's pages.

Pass m > 0, of module m, stands m positions further back than the verification, so it has lengths and positions of its
own; pass 0 has slots and pages of its own alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from attention.batch.host import HostBatch
from attention.batch.metadata import (
    BatchArrays,
    BatchSection,
    CommonAttentionMetadata,
    GroupArrays,
    batch_sizes,
    on_pages,
)
from attention.batch.staging import Staged
from attention.declared import Field, Section
from drafters.loops.base import CarriedRows

TARGET = "target"
"""A verification's name in the arena."""
OF_TARGET = {name: f"target.{name}" for name in ("rows", "tokens", "entries", "drafts_plus_1")}
"""Dimensions of a verification by their names in the arena."""


def target_sizes(
    rows: int, tokens: int, pages: int, drafts: int, entries: int | None = None, groups: Sequence[int] = ()
) -> dict[str, int]:
    """Sizes of a verification of at most so many rows, tokens, pages and drafts a row; others: see `batch_sizes`."""
    return batch_sizes(TARGET, rows, tokens, pages, entries, groups) | {OF_TARGET["drafts_plus_1"]: drafts + 1}


class PassesSection:
    """All M passes of a draft prefill.

    Attributes:
        fields: their places; () where there is no head.
    """

    def __init__(self, num_passes: int) -> None:
        """num_passes: M; 0 without a head."""
        self._first = Section(GroupArrays, "head", ("page_indptr",), OF_TARGET)
        self._later = tuple(BatchSection(f"passes.{m}", table=False) for m in range(1, num_passes))
        self._carried = Section(CarriedRows, "passes")
        first = self._first.fields if num_passes else ()
        later = tuple(field for section in self._later for field in section.fields)
        self.fields: tuple[Field, ...] = (*first, *later, *(self._carried.fields if self._later else ()))

    def sizes(self, rows: int, tokens: int, pages: int, entries: int | None = None) -> dict[str, int]:
        """Sizes beside those of the verification, for at most so many of its rows, tokens and pages a row.

        A request may be two rows of a pass, see `drafters.loops.modules.index.shifted_batch`; but not in a fixed shape,
        of which `entries` on the lists of pages are given.
        """
        found = {"passes.requests": rows, "passes.tokens": tokens}
        for section in self._later:
            found |= section.sizes(2 * rows if entries is None else rows, tokens, pages, entries)
        return found

    def values(self, batches: Sequence[HostBatch], carried: CarriedRows[np.ndarray] | None) -> dict[str, np.ndarray]:
        """What is sent of a round of any shape."""
        first, *later = batches
        found = self._first.values(first)
        for section, batch in zip(self._later, later, strict=True):
            found |= section.values(batch)
        return found if carried is None else found | self._carried.values(carried)

    def buffers(
        self, host: Mapping[str, np.ndarray], target: BatchArrays[np.ndarray]
    ) -> tuple[list[BatchArrays[np.ndarray]], CarriedRows[np.ndarray] | None]:
        """One of the arena's host buffers: of every pass, and of what is carried. target: the verification's."""
        first = self._first.of(host)
        own = replace(target, slot_mapping=first.slot_mapping, page_indices=first.page_indices)
        later = [section.buffers(host) for section in self._later]
        return [own, *later], self._carried.of(host) if self._later else None

    def metadata(
        self, target: CommonAttentionMetadata, batches: Sequence[HostBatch], staged: Staged
    ) -> tuple[CommonAttentionMetadata, ...]:
        """The attention of every pass as it arrived. target: the verification's."""
        first, *later = batches
        passes = (section.metadata(batch, staged) for section, batch in zip(self._later, later, strict=True))
        return (on_pages(target, self._first, first, staged.views), *passes)

    def carried(self, staged: Staged) -> CarriedRows[torch.Tensor] | None:
        """What the passes carry as it arrived; None of one pass."""
        return self._carried.of(staged.views) if self._later else None
