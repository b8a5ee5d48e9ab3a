"""Host arrays of a block's draft loop: the context rows and the block behind them. numpy only.

Running example: q=[4,4,4], seq=[20,33,48], accepted=[1,3,0], page size 16, Q=4. A context row is an accepted position:
the head keeps the target's state at p as keys and values at p, without a shift to the token at p+1. The block of each
row that drafts lies behind them, at seq' … seq'+Q-1, and reads the bonus token and Q-1 masks. Q is the head's constant:
slots see each other in both directions, so a shorter block would have other drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

import numpy as np

from attention.batch.host import HostBatch, offsets_within, owners_of, rows_batch, slots_of
from attention.staging import A, array
from drafters.loops.base import DraftInput, LoopSize
from drafters.loops.prefill import accepted_rows
from drafters.loops.steps import StepTokens


@dataclass(frozen=True)
class BlockRows(Generic[A]):
    """Arrays of a block's draft loop, without those of the block's attention.

    Attributes:
        sources: [T'] int64, token rows of the verification whose states become context.
        positions, slots: [T'] int64 of their keys and values.
        token_ids: [R·Q] int64, of each drafting row the bonus token, then masks.
    """

    sources: A = array(np.int64, "tokens")
    positions: A = array(np.int64, "tokens")
    slots: A = array(np.int64, "tokens")
    token_ids: A = array(np.int64, "block")


@dataclass(frozen=True, kw_only=True)
class HostBlock(BlockRows[np.ndarray]):
    """The arrays on the host; a `drafters.loops.base.LoopArrays`.

    batch: the block's attention, of the R drafting rows. size: see `LoopArrays`.
    """

    batch: HostBatch
    size: LoopSize


def block_arrays(draft: DraftInput, block_size: int, mask_token_id: int) -> HostBlock:
    """All arrays of a round; block_size: Q.

    >>> tokens = np.arange(3 * 50, dtype=np.int32).reshape(3, 50)
    >>> table = np.array([[7, 9, 0, 0], [3, 4, 8, 0], [1, 2, 5, 6]], np.int32)
    >>> drafted, accepted, rows = np.array([3, 3, 3]), np.array([1, 3, 0]), np.arange(3)
    >>> draft = DraftInput(np.array([0, 4, 8, 12]), drafted, accepted, rows, rows, np.array([18, 33, 45]), tokens,
    ...                    np.array([3, 3, 2]), table, 16)
    >>> arrays = block_arrays(draft, 4, 99)
    >>> arrays.sources.tolist(), arrays.positions.tolist()
    ([0, 1, 4, 5, 6, 7, 8], [16, 17, 29, 30, 31, 32, 44])
    >>> arrays.slots.tolist(), arrays.token_ids.tolist()
    ([144, 145, 77, 78, 79, 128, 92], [18, 99, 99, 99, 83, 99, 99, 99, 145, 99, 99, 99])
    >>> arrays.batch.query_start_loc.tolist(), arrays.batch.seq_lens.tolist(), arrays.batch.positions[:4].tolist()
    ([0, 4, 8, 12], [22, 37, 49], [18, 19, 20, 21])
    >>> arrays.batch.slot_mapping.tolist()
    [146, 147, 148, 149, 129, 130, 131, 132, 93, 94, 95, 96]
    """
    accepted = accepted_rows(draft.query_start_loc, draft.num_drafts, draft.num_accepted, draft.order)
    lens = np.diff(accepted.query_start_loc)
    owner = owners_of(lens)
    positions = (draft.committed_lens - lens)[owner] + offsets_within(lens)
    rows = draft.drafting
    count = len(rows.num_drafts)
    token_ids = np.full((count, block_size), mask_token_id, np.int64)
    token_ids[:, 0] = draft.tokens[draft.request_rows[:count], rows.committed_lens]
    starts = np.arange(count + 1) * block_size
    return HostBlock(
        sources=accepted.token_indices,
        positions=positions,
        slots=slots_of(draft.block_table, owner, positions, draft.page_size),
        token_ids=token_ids.reshape(-1),
        batch=rows_batch(starts, rows.committed_lens, rows.block_table, draft.page_size),
        size=LoopSize(len(lens), len(positions), draft.block_table.shape[1], int(rows.num_drafts.max(initial=0))),
    )


def block_tokens(rows: int, block_size: int) -> StepTokens:
    """The tokens of the one step in which `rows` rows run their blocks, for rounds of a fixed shape.

    >>> tokens = block_tokens(2, 3)
    >>> tokens.owner.tolist(), tokens.within.tolist(), tokens.slices
    ([0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2], (slice(0, 6, None),))
    """
    owner = np.repeat(np.arange(rows), block_size)
    none = np.zeros((1, 1), np.int64)
    width = np.full((1, 1), block_size, np.int64)
    within = np.tile(np.arange(block_size), rows)
    return StepTokens(none, width, none, none, owner, within, owner, (slice(0, len(owner)),))
