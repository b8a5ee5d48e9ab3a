"""The host arrays of a chain: the draft prefill over the accepted rows, then one token a row and step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attention.batch.host import HostBatch, rows_batch
from attention.cached import cached_property
from drafters.loops.base import DraftingRows, DraftInput, LoopSize
from drafters.loops.chain.index import (
    AcceptedRows,
    DraftSteps,
    accepted_rows,
    draft_steps,
    shifted_token_ids,
    step_batch,
)


@dataclass(frozen=True)
class PrefillArrays:
    """Host arrays of a draft prefill.

    Attributes:
        accepted: the verification's token rows that it reads. token_ids: [T'] int64, the token at p+1 of each.
        batch: its attention on the head's pages, B' rows.
    """

    accepted: AcceptedRows
    token_ids: np.ndarray
    batch: HostBatch


@dataclass(frozen=True)
class StepArrays:
    """Host arrays of the steps after the draft prefill."""

    rows: DraftingRows

    @cached_property
    def steps(self) -> DraftSteps:
        """Positions, lengths and slots of every step."""
        rows = self.rows
        return draft_steps(rows.committed_lens, rows.num_drafts, rows.block_table, rows.page_size, rows.num_steps)

    @cached_property
    def batches(self) -> tuple[HostBatch, ...]:
        """The attention of every step."""
        rows = self.rows
        return tuple(step_batch(self.steps, j, rows.block_table, rows.page_size) for j in range(rows.num_steps))


@dataclass(frozen=True)
class ChainArrays:
    """Host arrays of one chain. steps: of the R drafting rows, which are the first rows of the prefill."""

    prefill: PrefillArrays
    steps: StepArrays

    @property
    def num_drafting(self) -> int:
        """R."""
        return len(self.steps.rows.num_drafts)

    @property
    def size(self) -> LoopSize:
        """See `LoopArrays`."""
        batch = self.prefill.batch
        return LoopSize(batch.num_reqs, batch.num_tokens, batch.block_table.shape[1], self.steps.rows.num_steps + 1)


def prefill_arrays(draft: DraftInput) -> PrefillArrays:
    """The draft prefill of a round.

    A prompt row of which 3 tokens were read, and a verification of 3 drafts of which 1 was accepted:

    >>> tokens = np.array([[10, 11, 12, 13, 0, 0], [20, 21, 22, 23, 24, 0]])
    >>> table, n = np.array([[5, 0], [7, 9]], np.int32), np.array([2])
    >>> draft = DraftInput(np.array([0, 3, 7]), np.array([0, 3]), np.array([0, 1]), np.array([1, 0]),
    ...                    np.array([1, 0]), np.array([4, 3]), tokens, n, table[[1, 0]], 16)
    >>> arrays = prefill_arrays(draft)
    >>> arrays.accepted.token_indices.tolist(), arrays.batch.positions.tolist(), arrays.token_ids.tolist()
    ([3, 4, 0, 1, 2], [2, 3, 0, 1, 2], [23, 24, 11, 12, 13])
    """
    accepted = accepted_rows(draft.query_start_loc, draft.num_drafts, draft.num_accepted, draft.order)
    lens = np.diff(accepted.query_start_loc)
    batch = rows_batch(accepted.query_start_loc, draft.committed_lens - lens, draft.block_table, draft.page_size)
    return PrefillArrays(
        accepted, shifted_token_ids(draft.tokens, np.repeat(draft.request_rows, lens), batch.positions), batch
    )


def chain_arrays(draft: DraftInput) -> ChainArrays:
    """All arrays of a chain."""
    return ChainArrays(prefill_arrays(draft), StepArrays(draft.drafting))
