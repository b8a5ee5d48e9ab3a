"""The host arrays of a loop of M modules: their parts of the draft prefill, then up to M tokens a row and step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic

import numpy as np

from attention.batch.host import HostBatch
from attention.declared import A, array
from drafters.loops.base import DraftInput, LoopSize
from drafters.loops.chain.arrays import prefill_arrays
from drafters.loops.modules.index import module_batch, module_rows, module_step


@dataclass(frozen=True)
class PassRows(Generic[A]):
    """One module's part of a draft prefill over B' requests.

    Attributes:
        token_ids: [T_m] int64.
        sources: [T_m] int64; for module 0 rows of the target's aux hidden states, for others see `ModuleRows.sources`.
        last_row: [B'] int64, each request's last row.
    """

    token_ids: A = array(np.int64, "tokens")
    sources: A = array(np.int64, "tokens")
    last_row: A = array(np.int64, "requests")


@dataclass(frozen=True)
class ModulePassArrays(PassRows[np.ndarray]):
    """The same on the host. batch: its attention; requests without rows are not in it."""

    batch: HostBatch = field(kw_only=True)


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
    passes = [
        ModulePassArrays(prefill.token_ids, prefill.accepted.token_indices, prefill.accepted.last_row, batch=first)
    ]
    for rows in module_rows(first.num_computed_tokens, first.query_lens, num_modules, draft.begins):
        batch = module_batch(rows, first.block_table, page_size)
        passes.append(ModulePassArrays(prefill.token_ids[rows.tokens], rows.sources, rows.last_row, batch=batch))
    own = draft.drafting
    steps = (
        module_step(s, own.committed_lens, own.num_drafts, own.block_table, page_size, num_modules)
        for s in range(1, own.num_steps + 1)
    )
    return ModuleArrays(draft.request_rows, len(own.num_drafts), tuple(passes), tuple(steps))
