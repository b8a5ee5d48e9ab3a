"""ChainSection: where the arrays of a chain lie in a staging arena, and their device views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic

import numpy as np
import torch

from attention.batch.host import HostBatch
from attention.batch.metadata import BatchArrays, BatchSection, CommonAttentionMetadata
from attention.batch.staging import Staged
from attention.checking import checking
from attention.declared import A, Section, array
from drafters.loops.base import LoopSize
from drafters.loops.chain_arrays import ChainArrays


@dataclass(frozen=True)
class PrefillRows(Generic[A]):
    """Inputs of the draft prefill over T' rows.

    Attributes:
        token_ids: [T'] int64, shifted: the token at position p+1.
        token_indices: [T'] int64, rows of the target's aux hidden states.
        last_row: [R] int64, rows whose output gives draft 1; R may be 0 (prompt chunks only).
    """

    token_ids: A = array(np.int64, "tokens")
    token_indices: A = array(np.int64, "tokens")
    last_row: A = array(np.int64, "rows")


@dataclass(frozen=True)
class DraftPrefill(PrefillRows[torch.Tensor]):
    """The same on the device. metadata: attention of the pass; its rows 0 … R-1 are the drafting rows."""

    metadata: CommonAttentionMetadata = field(kw_only=True)


@dataclass(frozen=True)
class ChainInputs:
    """A chain on the device. steps: attention of drafts 2 … n, one token a row, the same R rows."""

    prefill: DraftPrefill
    steps: tuple[CommonAttentionMetadata, ...]


_PER_STEP = ("seq_lens", "slot_mapping", "positions", "page_indices", "page_indptr", "last_page_len")


class StepSection:
    """All steps of a chain in an arena: a batch whose arrays, but for two, have the step as their first dimension.

    Attributes:
        fields: their places. arrays: their section.
    """

    def __init__(self, table: bool = True) -> None:
        """table: with the block table; a fixed shape sends none."""
        leading = dict.fromkeys(_PER_STEP, "steps")
        shared = {"tokens": "step.rows"}
        self.arrays = Section(BatchArrays, "step", () if table else ("block_table",), shared, leading)
        self.fields = self.arrays.fields

    @staticmethod
    def sizes(rows: int, pages: int, steps: int, entries: int | None = None) -> dict[str, int]:
        """Sizes for at most so many rows, pages a row and steps; entries: of a list of pages, default rows · pages."""
        own = {"step.rows": rows, "step.rows_plus_1": rows + 1, "step.pages": pages, "steps": steps}
        return own | {"step.entries": rows * pages if entries is None else entries}

    def buffers(self, host: Mapping[str, np.ndarray]) -> BatchArrays[np.ndarray]:
        """One of the arena's host buffers of a fixed shape, whole."""
        return self.arrays.of(host)

    def of(self, batches: Sequence[HostBatch], staged: Staged) -> tuple[CommonAttentionMetadata, ...]:
        """Metadata of every step; views that are the same in every step are made once."""
        if not batches:
            return ()
        whole: BatchArrays[torch.Tensor] = self.arrays.of(staged.views)
        per_step = zip(*(getattr(whole, name).unbind(0) for name in _PER_STEP), strict=True)
        steps = []
        for host, views in zip(batches, per_step, strict=True):
            if checking():
                host.validate()
            seq_lens, slot_mapping, positions, page_indices, page_indptr, last_page_len = views
            step = CommonAttentionMetadata(
                host=host,
                query_start_loc=whole.query_start_loc,
                block_table=whole.block_table,
                seq_lens=seq_lens,
                slot_mapping=slot_mapping,
                positions=positions,
                page_indices=page_indices[: int(host.page_counts.sum())],
                page_indptr=page_indptr,
                last_page_len=last_page_len,
                staged=staged,
            )
            steps.append(step)
        return tuple(steps)


class ChainSection:
    """A whole chain in the arena; a `drafters.loops.base.LoopSection`."""

    def __init__(self) -> None:
        self._batch = BatchSection("prefill")
        self._rows = Section(PrefillRows, "prefill")
        self._steps = StepSection()
        self.fields = (*self._batch.fields, *self._rows.fields, *self._steps.fields)

    def sizes(self, size: LoopSize) -> dict[str, int]:
        """See `LoopSection.sizes`."""
        prefill = self._batch.sizes(size.rows, size.tokens, size.pages)
        return prefill | self._steps.sizes(size.rows, size.pages, size.steps)

    def values(self, arrays: ChainArrays) -> dict[str, np.ndarray]:
        """See `LoopSection.values`."""
        prefill, accepted = arrays.prefill, arrays.prefill.accepted
        rows = PrefillRows(prefill.token_ids, accepted.token_indices, accepted.last_row[: arrays.num_drafting])
        return (
            self._batch.values(prefill.batch) | self._rows.values(rows) | self._steps.arrays.values(arrays.steps.sent)
        )

    def of(self, arrays: ChainArrays, staged: Staged) -> ChainInputs:
        """See `LoopSection.of`."""
        metadata = self._batch.metadata(arrays.prefill.batch, staged)
        prefill = self._rows.of(staged.views, DraftPrefill, metadata=metadata)
        return ChainInputs(prefill, self._steps.of(arrays.steps.batches, staged))
