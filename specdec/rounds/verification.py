"""All numpy arrays of one round: the draft loop's and the next verification's.

Pure functions of the schedule, the row table and the block tables. How they get to the device: `transfer.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from attention.batch.host import HostBatch, offsets_within
from drafters.loops.chain.index import (
    DraftSteps,
    KeptRows,
    draft_steps,
    kept_rows,
    num_drafts_allowed,
    rows_batch,
    shifted_token_ids,
    step_batch,
)
from specdec.requests.sampling import SamplingArrays
from specdec.rounds.rows import RowTable
from specdec.rounds.schedule import Schedule
from specdec.rounds.uniforms import Role, uniforms


@dataclass(frozen=True)
class Verified:
    """The last target batch after its commit, as the draft loop needs it.

    Attributes:
        query_start_loc: [B+1] of that batch; rows: [B] RowTable rows.
        num_drafts, num_accepted: [B].
    """

    query_start_loc: np.ndarray
    rows: np.ndarray
    num_drafts: np.ndarray
    num_accepted: np.ndarray


@dataclass(frozen=True)
class StepArrays:
    """Host arrays of the draft steps after the first pass.

    Attributes:
        committed_lens: [R] of the drafting rows. num_drafts: [R] n_i. num_steps: steps made, at least max n_i - 1.
        block_table: [R, P] of the head's pages.
    """

    committed_lens: np.ndarray
    num_drafts: np.ndarray
    num_steps: int
    block_table: np.ndarray
    page_size: int

    @cached_property
    def steps(self) -> DraftSteps:
        """Positions, lengths and slots of every step."""
        return draft_steps(self.committed_lens, self.num_drafts, self.block_table, self.page_size, self.num_steps)

    @cached_property
    def batches(self) -> tuple[HostBatch, ...]:
        """The attention of every step."""
        return tuple(step_batch(self.steps, j, self.block_table, self.page_size) for j in range(self.num_steps))


@dataclass(frozen=True)
class DraftArrays:
    """Host arrays of one draft loop: first pass over the kept rows, then the steps of the R drafting rows.

    rows: [B'] RowTable rows of the first pass.
    """

    kept: KeptRows
    token_ids: np.ndarray
    first: HostBatch
    steps: StepArrays
    rows: np.ndarray

    @property
    def num_drafting(self) -> int:
        """R."""
        return len(self.steps.num_drafts)


@dataclass(frozen=True)
class TargetInputs:
    """What one target forward and its verdict read.

    Attributes:
        batch: its attention. token_ids: [T] int64, 0 where a draft comes.
        draft_places: [sum n] int64 rows of token_ids that take a draft.
        draft_sources: [sum n] int64 flat indices of those drafts in [R, n].
        judged_rows: [R'] int64 token rows whose logits are wanted; logit_index: [J, n+1] int64 into them.
        num_drafts: [J]. sources: [R] int64, see TargetArrays.
    """

    batch: HostBatch
    token_ids: np.ndarray
    draft_places: np.ndarray
    draft_sources: np.ndarray
    judged_rows: np.ndarray
    logit_index: np.ndarray
    num_drafts: np.ndarray
    sources: np.ndarray | None


@dataclass(frozen=True)
class TargetArrays:
    """Who is in the next verification, and what each row reads: committed tokens, then drafts.

    Attributes:
        start: [B] first position. num_new: [B] committed tokens. drafts: [B] n_i, some in the first num_drafting rows.
        tokens: [B, W] int32 the committed tokens, from column 0 on.
        judged: [J] batch rows whose token is decided (all but unfinished prompts); the R drafting rows come first.
        block_table, head_table: [B, P] the rows' pages of the target's group and of the head's (None without a head).
        wanted: [B] K of each row's request; room: [B] drafts that its limits would allow after this round if none of
            its drafts were accepted.
        sources: [R] int64 rows of `Draft.token_ids` that hold the drafting rows' drafts; None where row i is row i.
    """

    start: np.ndarray
    num_new: np.ndarray
    drafts: np.ndarray
    num_drafting: int
    tokens: np.ndarray
    judged: np.ndarray
    block_table: np.ndarray
    head_table: np.ndarray | None
    wanted: np.ndarray
    room: np.ndarray
    page_size: int
    sources: np.ndarray | None = None

    @cached_property
    def lens(self) -> np.ndarray:
        """[B] tokens of each row."""
        return self.num_new + self.drafts

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.lens.sum())

    @property
    def only_roots(self) -> bool:
        """Whether every row reads one committed token and is judged."""
        return len(self.judged) == len(self.start) and bool((self.num_new == 1).all())

    @cached_property
    def query_start_loc(self) -> np.ndarray:
        """[B+1]."""
        return np.concatenate([[0], np.cumsum(self.lens)])

    @cached_property
    def num_drafts(self) -> np.ndarray:
        """[J] drafts of the judged rows."""
        return self.drafts[self.judged]

    @cached_property
    def max_drafts(self) -> int:
        """n, the most drafts of a row."""
        return int(self.drafts.max(initial=0))

    @cached_property
    def inputs(self) -> TargetInputs:
        """The ragged layout, row after row."""
        lens, starts = self.lens, self.query_start_loc
        owner = np.repeat(np.arange(len(lens)), lens)
        drafted = np.arange(starts[-1]) - starts[owner] >= self.num_new[owner]
        token_ids = np.zeros(starts[-1], np.int64)
        token_ids[~drafted] = self.tokens[np.arange(self.tokens.shape[1]) < self.num_new[:, None]]
        judged_rows, logit_index = self._judged_rows()
        width = np.arange(1, self.max_drafts + 1)
        return TargetInputs(
            batch=rows_batch(starts, self.start, self.block_table, self.page_size),
            token_ids=token_ids,
            draft_places=np.flatnonzero(drafted),
            draft_sources=np.flatnonzero(width <= self.drafts[: self.num_drafting, None]),
            judged_rows=judged_rows,
            logit_index=logit_index,
            num_drafts=self.num_drafts,
            sources=self.sources,
        )

    def _judged_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """judged_rows and logit_index, see TargetInputs."""
        counts = self.num_drafts + 1
        ends = np.cumsum(counts)
        roots = self.query_start_loc[self.judged] + self.num_new[self.judged] - 1
        logit_index = (ends - counts)[:, None] + np.minimum(np.arange(self.max_drafts + 1), self.num_drafts[:, None])
        judged_rows = np.repeat(roots, counts) + offsets_within(counts)
        return judged_rows.astype(np.int64), logit_index.astype(np.int64)


@dataclass(frozen=True)
class SamplingRound:
    """Host arrays of a round with sampled rows: parameters [J], uniforms of drafts, acceptance and resampling."""

    arrays: SamplingArrays
    draft_uniform: np.ndarray
    accept_uniform: np.ndarray
    next_uniform: np.ndarray


def draft_arrays(
    verified: Verified, schedule: Schedule, table: RowTable, block_table: np.ndarray, page_size: int
) -> DraftArrays | None:
    """The draft loop after a verification; None when no row has anything for the head to read.

    The first pass takes the drafting rows, in the order of the schedule, then the prompts not read to their end.
    block_table: [R, P] of the head's pages, by RowTable row.
    """
    drafting = schedule.rows[: schedule.num_drafting]
    alive = (table.previous[verified.rows] >= 0) & (table.drafts[verified.rows] > 0)
    unfinished = alive & table.reading(verified.rows)
    order = np.concatenate([table.previous[drafting], np.flatnonzero(unfinished)])
    if not len(order):
        return None
    kept = kept_rows(verified.query_start_loc, verified.num_drafts, verified.num_accepted, order)
    rows = verified.rows[order]
    lens = np.diff(kept.query_start_loc)
    first = rows_batch(kept.query_start_loc, table.computed[rows] - lens, block_table[rows], page_size)
    token_ids = shifted_token_ids(table.tokens, np.repeat(rows, lens), first.positions)
    return DraftArrays(kept, token_ids, first, step_arrays(schedule, table, block_table, page_size), rows)


def step_arrays(schedule: Schedule, table: RowTable, block_table: np.ndarray, page_size: int) -> StepArrays:
    """The draft steps of the drafting rows. block_table: [R, P] of the head's pages, by RowTable row."""
    drafting = schedule.rows[: schedule.num_drafting]
    num_drafts = schedule.num_drafts[: len(drafting)]
    num_steps = int(num_drafts.max(initial=1)) - 1
    return StepArrays(
        committed_lens=table.computed[drafting],
        num_drafts=num_drafts,
        num_steps=num_steps,
        block_table=block_table[drafting],
        page_size=page_size,
    )


def drafts_after(target: TargetArrays, num_accepted: np.ndarray) -> np.ndarray:
    """[B] drafts of every row after a verification of roots that accepts num_accepted [B]."""
    return np.clip(target.room - num_accepted, 0, target.wanted)


def steps_after(target: TargetArrays, num_accepted: np.ndarray) -> StepArrays:
    """The draft steps of every row of a verification of roots, from num_accepted [B] alone: before its commit.

    A row that the commit will end drafts in vain.
    """
    num_drafts = drafts_after(target, num_accepted)
    assert target.head_table is not None
    return StepArrays(
        committed_lens=target.start + target.num_new + num_accepted,
        num_drafts=num_drafts,
        num_steps=int(num_drafts.max(initial=1)) - 1,
        block_table=target.head_table,
        page_size=target.page_size,
    )


def target_arrays(
    schedule: Schedule,
    table: RowTable,
    block_table: np.ndarray,
    page_size: int,
    head_table: np.ndarray | None = None,
    ahead: bool = False,
) -> TargetArrays:
    """The next verification.

    Args:
        block_table, head_table: [R, P] of the target's and the head's pages, by RowTable row.
        ahead: its drafts were made by `steps_after`, in the order of the last verification.
    """
    rows, start = schedule.rows, table.computed[schedule.rows]
    most, roots = table.max_model_len, start + schedule.num_new
    width = np.arange(int(schedule.num_new.max(initial=0)))
    places = np.minimum(start[:, None] + width, table.tokens.shape[1] - 1)
    return TargetArrays(
        start=start,
        num_new=schedule.num_new,
        drafts=schedule.num_drafts,
        num_drafting=schedule.num_drafting,
        tokens=table.tokens[rows[:, None], places],
        judged=np.flatnonzero(start + schedule.num_new == table.length[rows]),
        block_table=block_table[rows],
        head_table=None if head_table is None else head_table[rows],
        wanted=table.drafts[rows],
        room=num_drafts_allowed(np.array(most), most, roots, table.limit[rows] - roots - 1),
        page_size=page_size,
        sources=table.previous[rows[: schedule.num_drafting]] if ahead else None,
    )


def target_after(
    target: TargetArrays,
    num_accepted: np.ndarray,
    roots: np.ndarray,
    drafts: np.ndarray,
    block_table: np.ndarray,
    head_table: np.ndarray | None,
) -> TargetArrays:
    """The verification behind one of roots, of the same rows in their order.

    Args:
        num_accepted: [B] what that one accepts; roots: [B] its next tokens, anything where only the device has them.
        drafts: [B] of the new one; block_table, head_table: [B, P] of the target's pages and of the head's.
    """
    read = 1 + num_accepted
    return replace(
        target,
        start=target.start + read,
        drafts=drafts,
        num_drafting=int((drafts > 0).sum()),
        tokens=roots[:, None].astype(np.int32),
        block_table=block_table,
        head_table=head_table,
        room=target.room - read,
        sources=None,
    )


def sampling_round(target: TargetArrays, schedule: Schedule, table: RowTable) -> SamplingRound | None:
    """Parameters and uniforms of the judged rows; None when all of them are greedy.

    The token that draft j+1 proposes stands at position root+1+j; so does the next token when j drafts were accepted.
    """
    rows = schedule.rows[target.judged]
    arrays = table.sampling(rows)
    if not arrays.any_sampled:
        return None
    keys = table.key[rows][:, None]
    positions = table.length[rows][:, None] + np.arange(target.max_drafts + 1)
    return SamplingRound(
        arrays=arrays,
        draft_uniform=uniforms(keys[: schedule.num_drafting], positions[: schedule.num_drafting, :-1], Role.DRAFT),
        accept_uniform=uniforms(keys, positions[:, :-1], Role.ACCEPT),
        next_uniform=uniforms(keys, positions, Role.RESAMPLE),
    )
