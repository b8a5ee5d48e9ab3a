"""The host arrays of a loop of M modules: their parts of the draft prefill, then up to M tokens a row and step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attention.batch.host import HostBatch
from drafters.loops.base import DraftInput, LoopSize
from drafters.loops.chain.arrays import prefill_arrays
from drafters.loops.modules.index import module_batch, module_rows, module_step


@dataclass(frozen=True)
class ModulePassArrays:
    """Host arrays of one module's part of the draft prefill.

    Attributes:
        token_ids, sources: [T_m] int64; last_row: [B'] int64. See `drafters.loops.modules.index.ModuleRows`.
        batch: its attention; requests without rows are not in it.
    """

    token_ids: np.ndarray
    sources: np.ndarray
    last_row: np.ndarray
    batch: HostBatch


@dataclass(frozen=True)
class ModuleArrays:
    """Host arrays of one draft loop by M modules.

    Attributes:
        request_rows: [B'] int64 of the draft prefill, see `DraftInput`; the R drafting ones come first.
        num_drafting: R.
        passes: of each module. steps: attention of drafts 2 … n.
    """

    request_rows: np.ndarray
    num_drafting: int
    passes: tuple[ModulePassArrays, ...]
    steps: tuple[HostBatch, ...]

    @property
    def size(self) -> LoopSize:
        """See `LoopArrays`."""
        first = self.passes[0]
        pages = first.batch.block_table.shape[1]
        return LoopSize(len(self.request_rows), len(first.token_ids), pages, len(self.steps) + 1)


def module_arrays(draft: DraftInput, num_modules: int) -> ModuleArrays:
    """All arrays of M modules."""
    prefill = prefill_arrays(draft)
    first, page_size = prefill.batch, draft.page_size
    passes = [ModulePassArrays(prefill.token_ids, prefill.accepted.token_indices, prefill.accepted.last_row, first)]
    for rows in module_rows(first.num_computed_tokens, first.query_lens, num_modules, draft.begins):
        batch = module_batch(rows, first.block_table, page_size)
        passes.append(ModulePassArrays(prefill.token_ids[rows.tokens], rows.sources, rows.last_row, batch))
    own = draft.drafting
    steps = (
        module_step(s, own.committed_lens, own.num_drafts, own.block_table, page_size, num_modules)
        for s in range(1, own.num_steps + 1)
    )
    return ModuleArrays(draft.request_rows, len(own.num_drafts), tuple(passes), tuple(steps))
