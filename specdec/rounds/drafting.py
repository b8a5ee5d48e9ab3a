"""From the schedule and the row table to what a draft loop starts from, and how many drafts each row may have."""

from __future__ import annotations

import numpy as np

from drafters.loops.base import DraftingRows, DraftInput
from drafters.loops.lengths import drafts_within, tokens_accepted
from specdec.rounds.rows import RowTable
from specdec.rounds.schedule import Schedule
from specdec.rounds.verification import TargetArrays, Verified


def draft_input(
    verified: Verified,
    schedule: Schedule,
    table: RowTable,
    block_table: np.ndarray,
    page_size: int,
    reading: bool = True,
) -> DraftInput | None:
    """What the draft loop after a verification starts from; None when no row has anything for the head to read.

    The head reads the drafting rows, in the order of the schedule, then the prompts not read to their end.
    block_table: [R, P] of the head's pages, by RowTable row. reading: False for the drafting rows alone.
    """
    drafting = schedule.rows[: schedule.num_drafting - schedule.num_arrived]
    alive = (table.previous[verified.rows] >= 0) & (table.drafts[verified.rows] > 0)
    unfinished = alive & table.prefilling(verified.rows) & reading
    order = np.concatenate([table.previous[drafting], np.flatnonzero(unfinished)])
    if not len(order):
        return None
    rows = verified.rows[order]
    return DraftInput(
        query_start_loc=verified.query_start_loc,
        num_drafts=verified.num_drafts,
        num_accepted=verified.num_accepted,
        order=order,
        request_rows=rows,
        committed_lens=table.computed[rows],
        tokens=table.tokens,
        num_drafts_next=schedule.num_drafts[: len(drafting)],
        block_table=block_table[rows],
        page_size=page_size,
        begins=table.begin[rows],
    )


def accepted_by_row(target: TargetArrays, num_accepted: np.ndarray) -> np.ndarray:
    """num_accepted [J] of the decided rows -> [B], 0 for prompts that are not read to their end."""
    if len(target.decided) == len(target.start):
        return num_accepted
    accepted = np.zeros(len(target.start), np.int64)
    accepted[target.decided] = num_accepted
    return accepted


def drafts_after(target: TargetArrays, num_accepted: np.ndarray) -> np.ndarray:
    """[B] drafts of every row after a verification that accepts num_accepted [B]."""
    return drafts_within(target.wanted, target.room - num_accepted)


def rows_after(target: TargetArrays, num_accepted: np.ndarray) -> DraftingRows:
    """Every row of a verification, from num_accepted [B] alone: before its commit.

    A row that the commit will end drafts in vain; one that goes on reading its prompt has no drafts.
    """
    assert target.head_table is not None
    return DraftingRows(
        committed_lens=target.start + tokens_accepted(target.num_new, num_accepted),
        num_drafts=drafts_after(target, num_accepted),
        block_table=target.head_table,
        page_size=target.page_size,
    )
