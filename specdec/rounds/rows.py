"""RowTable: the state of all running requests as numpy columns, so that a round is prepared without a Python loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
from numpy import ndarray

from attention.batch.host import BatchExtra
from specdec.requests.sampling import SamplingArrays, SamplingParams
from specdec.values import IdSequence

Reads = Sequence[tuple[int, int]]
"""Rows and how many tokens of their prompts are read in a round."""


class ExtraColumns:
    """An extra's columns of a row table; see `specdec.rounds.extras.RoundExtra`.

    They follow from the table's columns and a request's parameters, because rows are rebuilt from the requests after an
    interrupt, and a preempted request opens its row again. This class has no columns.

    Attributes:
        idle: no row has used the extra yet; then it is not called for arrays.
    """

    idle = False

    def open(self, table: RowTable, row: int, params: SamplingParams) -> None:
        """A request with these parameters has got a row; the table's columns are set."""

    def close(self, row: int) -> None:
        """A request has left its row."""

    def scheduled(self, table: RowTable, schedule: Schedule) -> BatchExtra | None:
        """Arrays for the verification of a schedule; None if its rows need none."""

    def after(
        self,
        table: RowTable,
        last: BatchExtra | None,
        schedule: Schedule,
        start: ndarray,
        num_accepted: ndarray,
        tokens: ndarray | None,
    ) -> BatchExtra | None:
        """Arrays for a verification that is launched before the last one is committed; both are of the same rows, with
        one bonus token each.

        Args:
            last: the result of `scheduled` or `after` for the last verification. schedule: the new one's; start: [B]
                its first positions.
            num_accepted: [B] drafts that the last one accepts; tokens: [B, n+1] these, then its next bonus tokens. None
                where it is not read: then it has no drafts, and only the device has the new tokens. Its own bonus
                tokens are committed: the table has every token before `start` but the accepted drafts.
        """

    def commit(self, table: RowTable, rows: ndarray, committed: BatchExtra | None, notes: Sequence[ndarray]) -> None:
        """Called after the commit of a verification of these rows [B] with these arrays; the table is advanced.

        notes: what was read with it, see `specdec.rounds.extras.RoundExtra.notes`.
        """

    def chunk(self, table: RowTable, row: int, count: int, others: Reads) -> int:
        """How many of the next `count` tokens that it prefills a row may read in the next round, from 0 on.

        others: (row, tokens) that are read in that round already; the first of a round may read one at least.
        """
        return count

    def check_leaving(self, table: RowTable, row: int) -> None:
        """In check mode, before a request leaves its row for another engine.

        Raises:
            InvariantError: the row's columns do not cover all tokens that were read.
        """


@runtime_checkable
class NeedsLogits(Protocol):
    """Arrays of an extra for which a verification computes more logits than it decides by.

    more_logits: [N] int64 token rows of the batch whose logits are not computed otherwise. They come after all others.
    """

    @property
    def more_logits(self) -> ndarray: ...


class RowTable:
    """One row for each running request; the row number is its block-table row.

    Columns:
        tokens [R, L] int32: committed tokens by position (prompt, then new ones; the last is the bonus token).
        length [R]: committed tokens. computed [R]: target KV length; length - computed tokens wait to be read.
        begin [R]: the first position that the row reads itself; earlier ones are from the prefix cache.
        head_computed [R]: positions of which the head has read the target's states; it may have read more.
        prefill [R]: tokens the row reads in chunks before it decodes: the whole prompt, whose last position gives the
            first token; after a preemption all but the bonus token that the row had drafts from.
        prompt [R]: tokens of the request's prompt.
        limit [R]: most committed tokens (prompt + max_new_tokens, at most max_model_len).
        longest [R]: positions that rounds of the row may reach: max_model_len, but where the row is read again beyond
            a length. variant [R]: variant of its keys and values; for both see `specdec.rounds.extras.RoundExtra`.
        drafts [R]: K of the request. bounds [3, R]: drafts, limit and longest. previous [R]: its row in the last target
            batch, -1 when it was not in it.
        given [R, n] int32, num_given [R]: drafts of the row's next round that the host knows, see `give`. awaited [R]
            bool: there may be drafts for the round after it. gives: whether `give` was ever called for any row.
        reads_first [R] bool: see `read_first`; any_reads_first: whether it was ever set for any row.
        key [R] uint64: randomness. eos [R, E] int64: ids that end it, then -1. temperature, top_k, top_p, min_p [R].
        extras: the columns of the engine's extras.
    """

    def __init__(self, max_rows: int, max_model_len: int, extras: Iterable[ExtraColumns] = ()) -> None:
        self.max_model_len = max_model_len
        self.extras = tuple(extras)
        counts = partial(np.zeros, max_rows, np.int64)
        self.tokens = np.zeros((max_rows, max_model_len + 1), np.int32)
        self.length = counts()
        self.computed = counts()
        self.begin = counts()
        self.head_computed = counts()
        self.prefill = counts()
        self.prompt = counts()
        self.variant = counts()
        self.bounds = np.zeros((3, max_rows), np.int64)
        self.drafts, self.limit, self.longest = self.bounds
        self.longest[:] = max_model_len
        self.previous = np.full(max_rows, -1, np.int64)
        self.given = np.zeros((max_rows, 0), np.int32)
        self.num_given = counts()
        self.awaited = np.zeros(max_rows, np.bool_)
        self.gives = False
        self.reads_first = np.zeros(max_rows, np.bool_)
        self.any_reads_first = False
        self.key = np.zeros(max_rows, np.uint64)
        self.eos = np.full((max_rows, 1), -1, np.int64)
        self._sampling = SamplingArrays.of([SamplingParams()] * max_rows)
        self._free = list(range(max_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows that are not in use."""
        return len(self._free)

    def open(
        self,
        tokens: ndarray,
        limit: int,
        drafts: int,
        key: int,
        params: SamplingParams,
        eos_ids: IdSequence = (),
        prefill: int | None = None,
        begin: int = 0,
        longest: int | None = None,
        variant: int = 0,
        prompt: int | None = None,
    ) -> int:
        """Take a row for a request that enters (or comes back) with these committed tokens; return it.

        When a parameter does not fit its column numpy's error is raised and the row stays free.

        prefill: how many of the tokens it reads before it decodes; default all of them. begin: how many of these have
            keys and values already. longest, variant: see the columns; default max_model_len. prompt: default all.
        """
        # Popped only at the end: an error of a parameter leaves the row free.
        row = self._free[-1]
        self.tokens[row, : len(tokens)] = tokens
        self.length[row] = len(tokens)
        self.limit[row] = limit
        self.prompt[row] = len(tokens) if prompt is None else prompt
        self.longest[row], self.variant[row] = self.max_model_len if longest is None else longest, variant
        self.computed[row] = self.begin[row] = self.head_computed[row] = begin
        self.prefill[row] = len(tokens) if prefill is None else prefill
        self.drafts[row], self.previous[row], self.key[row] = drafts, -1, key
        self.num_given[row] = 0
        self.awaited[row] = False
        self.reads_first[row] = False
        missing = len(eos_ids) - self.eos.shape[1]
        if missing > 0:
            self.eos = np.pad(self.eos, ((0, 0), (0, missing)), constant_values=-1)
        self.eos[row] = -1
        self.eos[row, : len(eos_ids)] = eos_ids
        for name, column in vars(self._sampling).items():
            column[row] = getattr(params, name)
        for columns in self.extras:
            columns.open(self, row, params)
        return self._free.pop()

    def give(self, row: int, token_ids: IdSequence, awaited: bool) -> None:
        """Drafts of the row's next round, after its last committed token; an extra gives them anew after each commit.

        Without a head they are the row's drafts, with one they replace as many of the head's.

        awaited: whether there may be some after that round, too. A round without drafts is launched before the last one
            is read where no row awaits any: so a row that did not await drafts must not be given them, in any engine.
        """
        self.awaited[row] = awaited
        self.gives = True
        count = len(token_ids)
        if count > self.given.shape[1]:
            self.given = np.pad(self.given, ((0, 0), (0, count - self.given.shape[1])))
        self.given[row, :count] = token_ids
        self.num_given[row] = count

    def await_drafts(self, row: int) -> None:
        """There may be drafts after the row's next round, whether it has any itself: see `give`."""
        self.awaited[row] = self.gives = True

    def awaits(self, rows: ndarray) -> bool:
        """Whether any of these rows awaits drafts. Called every round: engines without such drafts look at no row."""
        return self.gives and bool(self.awaited[rows].any())

    def read_first(self, row: int) -> None:
        """No round of this row is launched before the last one is read: the host must know its tokens to decide it."""
        self.reads_first[row] = self.any_reads_first = True

    def must_be_read(self, rows: ndarray) -> bool:
        """Whether a round of these rows must be read before the next is launched: one awaits drafts, or reads first."""
        return self.awaits(rows) or (self.any_reads_first and bool(self.reads_first[rows].any()))

    def leave_unfiltered(self, row: int) -> None:
        """Rounds apply no filter to this row's distribution, only its temperature: an extra filters its logits."""
        self._sampling.top_k[row] = 0
        self._sampling.top_p[row] = 1.0
        self._sampling.min_p[row] = 0.0

    def close(self, row: int) -> None:
        """Give a row back."""
        self.num_given[row] = 0
        self.awaited[row] = False
        self.previous[row] = -1
        for columns in self.extras:
            columns.close(row)
        self._free.append(row)

    def mark_batch(self, rows: ndarray) -> None:
        """Note each row's place in the target batch just launched."""
        self.previous[:] = -1
        self.previous[rows] = np.arange(len(rows))

    def prefilling(self, rows: ndarray) -> ndarray:
        """[R] bool, rows that still prefill: they read chunks and do not draft."""
        return self.computed[rows] < self.prefill[rows]

    def pending(self, rows: ndarray) -> ndarray:
        """[R] int64, committed tokens that each row reads next: the rest of its prefill, else its bonus token."""
        return np.where(self.prefilling(rows), self.prefill[rows], self.length[rows]) - self.computed[rows]

    def chunk(self, row: int, count: int, others: Reads) -> int:
        """How many of `count` tokens a row reads of what it prefills, see `ExtraColumns.chunk`."""
        for columns in self.extras:
            count = count if columns.idle else min(count, columns.chunk(self, row, count, others))
        return count

    def committed(self, row: int) -> ndarray:
        """A copy of the row's committed tokens."""
        return self.tokens[row, : self.length[row]].copy()

    def any_sampled(self, rows: ndarray) -> bool:
        """Whether any of these rows is not greedy. Called every round, so only temperatures are read."""
        return bool(np.count_nonzero(self._sampling.temperature[rows]))

    def sampling(self, rows: ndarray) -> SamplingArrays:
        """Sampling parameters of selected rows."""
        return self._sampling.rows(rows)


@dataclass(frozen=True)
class Schedule:
    """The rows of the next target forward: those with drafts, then others whose token it decides, then unread prompts.

    Attributes:
        rows: [B] int64 RowTable rows.
        num_new: [B] committed tokens each row reads (1 for a verification, the chunk length for a prompt).
        num_drafts: [B] n_i; rows 0 … num_drafting-1 have n_i >= 1.
        num_arrived: how many of those, the last ones, have brought their drafts along: no draft loop made them here.
    """

    rows: ndarray
    num_new: ndarray
    num_drafts: ndarray
    num_arrived: int = 0

    @property
    def num_drafting(self) -> int:
        """R."""
        return int(np.count_nonzero(self.num_drafts))

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.num_new.sum() + self.num_drafts.sum())


def draft_room(max_model_len: int | ndarray, bonus_positions: ndarray, tokens_left: ndarray) -> ndarray:
    """Drafts that the limits allow, without K: min(max_model_len - 1 - bonus, tokens_left - 1); may be negative.

    Every further committed token takes one from it, so after a verification it follows without the limits.

    Args:
        max_model_len: for all rows, or [B] for each. bonus_positions: [B] positions of the next bonus token (seq').
        tokens_left: [B] tokens the row may still emit.

    >>> draft_room(64, np.array([62, 63, 20]), np.array([9, 9, 2])).tolist()
    [1, 0, 1]
    >>> draft_room(64, np.array([57]), np.array([12])).tolist(), draft_room(64, np.array([60]), np.array([9])).tolist()
    ([6], [3])
    """
    return np.minimum(max_model_len - 1 - bonus_positions, tokens_left - 1)


def drafts_within(num_speculative_tokens: ndarray, room: ndarray) -> ndarray:
    """Drafts of each row: its own K, at most the room, at least 0.

    Args:
        num_speculative_tokens: [B] K_i; room: [B], see `draft_room`.

    >>> drafts_within(np.array([3, 3, 1]), np.array([2, -1, 9])).tolist()
    [2, 0, 1]
    """
    return np.maximum(0, np.minimum(num_speculative_tokens, room))
