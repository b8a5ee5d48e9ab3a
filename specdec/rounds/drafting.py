"""Inputs of a draft loop, from the schedule and the row table; and the number of drafts of each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

import numpy as np
from numpy import ndarray

from attention.batch.host import HostBatch, offsets_within, owners_of, rows_batch
from attention.staging import A, array
from drafters.loops.base import CarriedRows, DraftingRows, DraftInput, PrefillPasses
from specdec.rounds.rows import RowTable, Schedule, drafts_within
from specdec.rounds.verification import TargetArrays, Verified


def draft_input(
    verified: Verified,
    schedule: Schedule,
    table: RowTable,
    block_table: ndarray,
    page_size: int,
    reading: bool = True,
) -> DraftInput | None:
    """Inputs of the draft loop after a verification; None when the head has nothing to read.

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


def accepted_by_row(target: TargetArrays, num_accepted: ndarray) -> ndarray:
    """num_accepted [J] of the decided rows -> [B], 0 for prompts that are not read to their end."""
    if len(target.decided) == len(target.start):
        return num_accepted
    accepted = np.zeros(len(target.start), np.int64)
    accepted[target.decided] = num_accepted
    return accepted


def drafts_after(target: TargetArrays, num_accepted: ndarray) -> ndarray:
    """[B] drafts of every row after a verification that accepts num_accepted [B]."""
    return drafts_within(target.wanted, target.room - num_accepted)


def rows_after(target: TargetArrays, num_accepted: ndarray) -> DraftingRows:
    """Every row of a verification, from num_accepted [B] alone: before its commit.

    A row that the commit will end drafts in vain; a row that continues reading its prompt has no drafts.
    """
    assert target.pages.head is not None
    return DraftingRows(
        committed_lens=target.start + target.num_new + num_accepted,
        num_drafts=drafts_after(target, num_accepted),
        block_table=target.pages.head,
        page_size=target.pages.page_size,
    )


@dataclass(frozen=True)
class AheadArrays(Generic[A]):
    """A draft prefill that is launched before its verification is read.

    Attributes:
        token_ids: [T] int64, the token at p+1 of every token row, 0 where the verification decides it; of a loop that
            `ReadsBonus` one more in front of each row, the token at its first position.
        token_sources: [R'] int64, for every token that the verification decides its place in the result's tokens
            [J·(n+1)]; token_places: [R'] int64, its place in `token_ids`.
        last_row: [B] int64, the place of the token after each row's last committed one.
        decided_place: [B] int64, each row's place among the J decided ones; J where it is none of them.
    """

    token_ids: A = array(np.int64, "tokens")
    token_sources: A = array(np.int64, "tokens")
    token_places: A = array(np.int64, "tokens")
    last_row: A = array(np.int64, "rows")
    decided_place: A = array(np.int64, "rows")


@dataclass(frozen=True, kw_only=True)
class AheadInputs(AheadArrays[ndarray]):
    """The same on the host.

    Attributes:
        batches: its attention on the head's pages in each pass: rows and tokens of the verification; pass m, of module
            m, begins m positions further back.
        carried: None with a single pass.
    """

    batches: tuple[HostBatch, ...]
    carried: CarriedRows[ndarray] | None


def ahead_inputs(target: TargetArrays, passes: PrefillPasses, num_carried: int = 0) -> AheadInputs:
    """The draft prefill after `target`.

    Args:
        num_carried: rows whose vectors M > 1 modules carry, at least B.

    A prompt row that reads 2 of its 4 tokens 7, 8, 9, 5 and a row that verifies 1 draft:

    >>> from specdec.rounds.verification import RoundTables
    >>> one, table = np.array([0, 1]), np.array([[3], [4]], np.int32)
    >>> target = TargetArrays(np.array([0, 6]), np.array([2, 1]), np.array([0, 1]), 1, np.array([[7, 8], [1, 0]]),
    ...                       np.array([1]), one, one, np.array([9, 0]), one, RoundTables(table, table, 16))
    >>> ahead = ahead_inputs(target, PrefillPasses(1))
    >>> ahead.token_ids.tolist(), ahead.token_sources.tolist(), ahead.last_row.tolist(), ahead.decided_place.tolist()
    ([8, 9, 0, 0], [0, 1], [1, 2], [1, 0])

    With the token at each row's first position in front:

    >>> ahead = ahead_inputs(target, PrefillPasses(1, bonus=1))
    >>> ahead.token_ids.tolist(), ahead.token_places.tolist(), ahead.last_row.tolist()
    ([7, 8, 9, 1, 0, 0], [4, 5], [2, 4])
    """
    assert target.pages.head is not None
    starts = target.query_start_loc
    num_new = target.num_new
    bonus = passes.bonus
    rows = np.arange(len(num_new))
    following = np.zeros_like(target.tokens)
    following[:, :-1] = target.tokens[:, 1:]
    following[rows, num_new - 1] = target.following
    owner = np.repeat(rows, target.lens)
    token_ids = np.zeros(len(owner), np.int64)
    committed = np.arange(len(owner)) - starts[owner] < num_new[owner]
    token_ids[committed] = following[np.arange(following.shape[1]) < num_new[:, None]]
    if bonus:
        token_ids = np.insert(token_ids, starts[:-1], target.tokens[:, 0])
        starts = starts + np.arange(len(starts))
    last_row, counts = starts[:-1] + num_new - 1 + bonus, target.num_drafts + 1
    decided_place = np.full(len(rows), len(target.decided))
    decided_place[target.decided] = np.arange(len(target.decided))
    place = starts, target.start, target.pages.head, target.pages.page_size
    batches = [rows_batch(*place)]
    carried = None
    if passes.count > 1:
        from drafters.loops.prefill import rows_before, shifted_batch

        batches += [shifted_batch(m, *place, target.begins) for m in range(1, passes.count)]
        carried = CarriedRows(target.request_rows, rows_before(starts, num_carried))
    return AheadInputs(
        batches=tuple(batches),
        token_ids=token_ids,
        token_sources=owners_of(counts) * (target.max_drafts + 1) + offsets_within(counts),
        token_places=np.repeat(last_row[target.decided], counts) + offsets_within(counts),
        last_row=last_row,
        decided_place=decided_place,
        carried=carried,
    )
