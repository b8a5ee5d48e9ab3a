"""TargetArrays: a verification as numpy arrays: its rows, their tokens and drafts, and the token layout.

Pure functions of the schedule, the row table and the block tables. How they get to the device: `transfer.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, NamedTuple

import numpy as np
from numpy import ndarray

from attention.batch.host import BatchExtra, HostBatch, rows_batch
from attention.batch.transforms.windowed import windowed_batch
from attention.cached import cached_property
from attention.spec import Reach
from attention.staging import A, array
from specdec.config import EngineConfig
from specdec.rounds.rows import NeedsLogits, RowTable, Schedule, draft_room


@dataclass(frozen=True)
class Verified:
    """The last verification after its commit, as drafting needs it.

    Attributes:
        query_start_loc: [B+1] of that batch; rows: [B] RowTable rows.
        num_drafts, num_accepted: [B].
    """

    query_start_loc: ndarray
    rows: ndarray
    num_drafts: ndarray
    num_accepted: ndarray


@dataclass(frozen=True)
class WindowedTable:
    """The rows' pages in one of the target's windowed cache groups.

    Attributes:
        reach: which keys its layers attend to.
        block_table: [R, P] the group's own table, by logical page, freed ones null; not to be kept. The last row
            belongs to no request, and P has room for the padding tokens after the longest row.
        rows: [B] rows of the table, by row of the batch.
    """

    reach: Reach
    block_table: ndarray
    rows: ndarray


class RoundTables(NamedTuple):
    """Block tables of all rows of a row table [R, P], or of a round's rows [B, P].

    Attributes:
        target: pages of the target's first cache group. head: pages of the head; None without a head.
        page_size: tokens a page. windowed: full tables of the target's further cache groups, with a round's rows.
    """

    target: ndarray
    head: ndarray | None
    page_size: int
    windowed: tuple[WindowedTable, ...] = ()

    def rows(self, rows: ndarray) -> RoundTables:
        """The tables of these rows [B]; `windowed` already refers to them."""
        head = None if self.head is None else self.head[rows]
        return RoundTables(self.target[rows], head, self.page_size, self.windowed)


@dataclass(frozen=True)
class VerificationArrays(Generic[A]):
    """Arrays for one target forward and the acceptance of its drafts, without those of its attention.

    Attributes:
        token_ids: [T] int64, 0 where a draft comes.
        draft_places: [sum n] int64 rows of token_ids that take a draft.
        draft_sources: [sum n] int64 flat indices of those drafts in [R, n].
        logits_indices: [R'] int64 token rows whose logits are computed; rows requested by extras (`NeedsLogits`) come
            last. logit_index: [J, n+1] int64 into logits_indices.
        num_drafts: [J]. sources: [R] int64, see TargetArrays.
    """

    token_ids: A = array(np.int64, "tokens")
    draft_places: A = array(np.int64, "tokens")
    draft_sources: A = array(np.int64, "tokens")
    logits_indices: A = array(np.int64, "tokens")
    logit_index: A = array(np.int64, "rows", "drafts_plus_1")
    num_drafts: A = array(np.int64, "rows")
    sources: A | None = array(np.int64, "rows", optional=True)


@dataclass(frozen=True, kw_only=True)
class TargetInputs(VerificationArrays[ndarray]):
    """A verification on the host. batch: its attention."""

    batch: HostBatch


@dataclass(frozen=True)
class TargetArrays:
    """The rows of a verification, and the tokens that each reads: committed tokens, then drafts.

    Attributes:
        start: [B] first position. num_new: [B] committed tokens. drafts: [B] n_i, some in the first num_drafting rows.
        tokens: [B, W] int32 the committed tokens, from column 0 on.
        decided: [J] batch rows whose token is decided (all but unfinished prompts); the R drafting rows come first.
        wanted: [B] K of each row's request, 0 if the row continues reading its prompt after this round; room: [B]
            drafts that the row's limits allow after this round if none of its drafts are accepted, see
            `specdec.rounds.rows.draft_room`.
        following: [B] the committed token after those that the row reads; 0 where it is decided in this round.
        request_rows: [B] RowTable rows. pages: theirs.
        sources: [R] int64 rows of `Draft.token_ids` that hold the drafting rows' drafts; None where row i is row i.
        begins: [B] the first position that each row reads itself, see `RowTable.begin`; None where all begin at 0.
        num_arrived: see `Schedule.num_arrived`.
        extras: arrays of each of the engine's extras or None; see `ExtraColumns.scheduled`.
        given: [R, n] int32 drafts that the host knows, -1 where the row's drafts are on the device; None where all are.
    """

    start: ndarray
    num_new: ndarray
    drafts: ndarray
    num_drafting: int
    tokens: ndarray
    decided: ndarray
    wanted: ndarray
    room: ndarray
    following: ndarray
    request_rows: ndarray
    pages: RoundTables
    sources: ndarray | None = None
    begins: ndarray | None = None
    extras: tuple[BatchExtra | None, ...] = ()
    num_arrived: int = 0
    given: ndarray | None = None

    @cached_property
    def lens(self) -> ndarray:
        """[B] tokens of each row."""
        return self.num_new + self.drafts

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.lens.sum())

    @property
    def only_bonus_tokens(self) -> bool:
        """Whether every row reads one committed token and is decided."""
        return len(self.decided) == len(self.start) and bool((self.num_new == 1).all())

    @cached_property
    def query_start_loc(self) -> ndarray:
        """[B+1]."""
        return np.concatenate([[0], np.cumsum(self.lens)])

    @cached_property
    def num_drafts(self) -> ndarray:
        """[J] drafts of the decided rows."""
        return self.drafts[self.decided]

    @cached_property
    def max_drafts(self) -> int:
        """n, the most drafts of a row."""
        return int(self.drafts.max(initial=0))

    @property
    def inputs(self) -> TargetInputs:
        """The ragged layout, row after row."""
        lens, starts, counts = self.lens, self.query_start_loc, self.num_drafts + 1
        owner = np.repeat(np.arange(len(lens)), lens)
        drafted = np.arange(starts[-1]) - starts[owner] >= self.num_new[owner]
        token_ids = np.zeros(starts[-1], np.int64)
        token_ids[~drafted] = self.tokens[np.arange(self.tokens.shape[1]) < self.num_new[:, None]]
        width = np.arange(1, self.max_drafts + 1)
        first = np.cumsum(counts) - counts  # [J] first logits row of each decided row
        bonus = starts[self.decided] + self.num_new[self.decided] - 1
        logit_index = first[:, None] + np.minimum(np.arange(self.max_drafts + 1), self.num_drafts[:, None])
        batch = rows_batch(starts, self.start, self.pages.target, self.pages.page_size)
        if self.pages.windowed:
            groups = tuple(windowed_batch(batch, w.block_table, w.rows, w.reach) for w in self.pages.windowed)
            batch = replace(batch, other_groups=groups)
        extras = tuple(extra for extra in self.extras if extra is not None)
        if extras:
            batch = replace(batch, extras=extras)
        indices = np.repeat(bonus - first, counts) + np.arange(int(counts.sum()))
        more = [extra.more_logits for extra in extras if isinstance(extra, NeedsLogits)]
        places = np.flatnonzero(drafted)
        sources = np.flatnonzero(width <= self.drafts[: self.num_drafting, None])
        if self.given is not None:
            given = self.given.reshape(-1)[sources]
            token_ids[places[given >= 0]] = given[given >= 0]
            places = places[given < 0]
            sources = sources[given < 0]
        return TargetInputs(
            batch=batch,
            token_ids=token_ids,
            draft_places=places,
            draft_sources=sources,
            logits_indices=np.concatenate([indices, *more]) if more else indices,
            logit_index=logit_index,
            num_drafts=self.num_drafts,
            sources=self.sources,
        )


def target_arrays(
    schedule: Schedule, table: RowTable, tables: RoundTables, in_order_of_last: bool = False
) -> TargetArrays:
    """The next verification.

    Args:
        tables: by RowTable row.
        in_order_of_last: its drafts were made from `rows_after`, in the order of the last verification.
    """
    rows = schedule.rows
    start = table.computed[schedule.rows]
    bonus = start + schedule.num_new
    width = np.arange(int(schedule.num_new.max(initial=0)))
    places = np.minimum(start[:, None] + width, table.tokens.shape[1] - 1)
    decided = bonus == table.length[rows]
    target = TargetArrays(
        start=start,
        num_new=schedule.num_new,
        drafts=schedule.num_drafts,
        num_drafting=schedule.num_drafting,
        tokens=table.tokens[rows[:, None], places],
        decided=np.flatnonzero(decided),
        wanted=np.where(bonus < table.prefill[rows], 0, table.drafts[rows]),
        room=draft_room(table.longest[rows], bonus, table.limit[rows] - bonus - 1),
        following=np.where(decided, 0, table.tokens[rows, bonus]),
        request_rows=rows,
        pages=tables.rows(rows),
        sources=table.previous[rows[: schedule.num_drafting]] if in_order_of_last else None,
        begins=table.begin[rows],
        extras=tuple([None if columns.idle else columns.scheduled(table, schedule) for columns in table.extras]),
        num_arrived=schedule.num_arrived,
        given=_given(schedule, table),
    )
    lens = schedule.num_new + schedule.num_drafts
    vars(target).update(  # the cached properties, which the next steps read anyway
        lens=lens,
        query_start_loc=np.concatenate([[0], np.cumsum(lens)]),
        num_drafts=schedule.num_drafts[target.decided],
        max_drafts=int(schedule.num_drafts.max(initial=0)),
    )
    return target


def _given(schedule: Schedule, table: RowTable) -> ndarray | None:
    """See `TargetArrays.given`; only rows with as many given drafts as they may have are included."""
    if not table.gives:
        return None
    drafts = schedule.num_drafts[: schedule.num_drafting]
    rows = schedule.rows[: len(drafts)]
    taken = table.num_given[rows] >= drafts
    if not taken.any():
        return None
    most = int(drafts.max())
    given = np.full((len(rows), most), -1, np.int32)
    given[:, : table.given.shape[1]] = table.given[rows, :most]  # no row of the table may have had so many yet
    return np.where(taken[:, None], given, np.int32(-1))


def target_after(
    target: TargetArrays,
    table: RowTable,
    pages: RoundTables,
    drafts: ndarray,
    num_accepted: ndarray,
    tokens: ndarray | None = None,
) -> TargetArrays:
    """The verification after an uncommitted one of bonus tokens, of the same rows in the same order.

    Args:
        pages: block tables of these rows. drafts: [B] drafts of the new verification.
        num_accepted: [B] accepted drafts of the last one, 0 while it is unread; tokens: [B, n+1] these drafts, then its
            next bonus tokens; None where only the device has them.
    """
    read = target.num_new + num_accepted
    start, every = target.start + read, np.arange(len(read))
    bonus_tokens = np.zeros(len(read), np.int32) if tokens is None else tokens[every, num_accepted]
    extras: tuple[BatchExtra | None, ...] = ()
    if table.extras:
        last = zip(table.extras, target.extras, strict=True)
        schedule = Schedule(target.request_rows, target.num_new, drafts)
        extras = tuple(columns.after(table, own, schedule, start, num_accepted, tokens) for columns, own in last)
    return TargetArrays(
        start=start,
        num_new=target.num_new,
        drafts=drafts,
        num_drafting=int(np.count_nonzero(drafts)),
        tokens=bonus_tokens[:, None].astype(np.int32),
        decided=target.decided,
        wanted=target.wanted,
        room=target.room - read,
        following=target.following,
        request_rows=target.request_rows,
        pages=pages,
        begins=target.begins,
        extras=extras,
    )


def empty_target(config: EngineConfig) -> TargetArrays:
    """A verification without rows: graphs are captured on it, padded."""
    none = np.zeros(0, np.int64)
    table = np.zeros((0, 1), np.int32)
    nobody = np.zeros((1, config.num_speculative_tokens + 1), np.int32)  # as wide as K+1 tokens need at most
    windowed = tuple(WindowedTable(pool.reach, nobody, none) for pool in config.windowed)
    pages = RoundTables(table, table, config.page_size, windowed)
    return TargetArrays(none, none, none, 0, table, none, none, none, none, none, pages)
