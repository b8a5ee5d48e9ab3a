"""Launcher: launches a round (schedule, pages, transfer, draft loop, verification), also ahead of a commit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from numpy import ndarray
from torch import Tensor

from drafters.loops.base import Draft
from specdec.acceptance.judge import Drafted, rows_of
from specdec.acceptance.packed import Outcome
from specdec.config import EngineConfig
from specdec.engine.commit import Committed, ending_tokens
from specdec.engine.scheduler import Scheduler
from specdec.engine.stats import Counters
from specdec.execution.base import ChainedVerification, DraftedVerification, Executor, Round, Verification
from specdec.rounds.drafting import draft_input, drafts_after
from specdec.rounds.randomness import SamplingRound, sampling_round
from specdec.rounds.rows import RowTable, Schedule
from specdec.rounds.verification import RoundTables, TargetArrays, WindowedTable, target_after, target_arrays
from specdec.wrapped.group import ALONE, Group

T = TypeVar("T")


@dataclass(frozen=True)
class LaunchedRound:
    """A round whose arrays are sent and whose draft loop is launched.

    Attributes:
        schedule: its rows. target: the host arrays of its verification. device: the same, sent.
        draft: the drafts that it verifies, on the device; None when no row has any.
    """

    schedule: Schedule
    target: TargetArrays
    device: Round
    draft: Drafted


@dataclass(frozen=True)
class VerifyingRound(LaunchedRound):
    """A round whose verification is launched as well."""

    verification: Verification


class Launcher:
    """Launches rounds of an executor over one row table.

    A round that is launched before the one in flight is read or committed has pages reserved for any outcome, and the
    rows of that one in their order, so `RowTable.previous` stays as it is.

    Attributes:
        executor: how rounds run on the device. group: the processes that launch the same rounds.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        table: RowTable,
        config: EngineConfig,
        counters: Counters,
        queue_verification: bool,
        group: Group = ALONE,
    ) -> None:
        """queue_verification: launch a round's verification with the round, without waiting for `verify`."""
        self.group = group
        self.executor = executor
        self._scheduler = scheduler
        self._table = table
        self._page_size = config.page_size
        self._extras = config.extras
        self._behind = 0 if scheduler.head_pages is None else config.tokens_behind
        self._counters = counters
        self._queue_verification = queue_verification
        self._reserved: RoundTables | None = None

    def launch(
        self, last: VerifyingRound | None = None, committed: Committed | None = None, draft: Drafted = None
    ) -> LaunchedRound | None:
        """Launch the next round; None when there is no work.

        Args:
            last, committed: the round before, as it was launched and committed. None: there is none, so no draft loop.
            draft: drafts of the next round, in the row order of `last`, if their steps are launched already; if None,
                the draft loop over the aux hidden states of `last` is launched here.
        """
        schedule = self._scheduler.schedule()
        if schedule is None:
            return None
        tables = self.tables(schedule, self._behind)
        loop = None
        if committed is not None and draft is None and tables.head is not None:
            loop = draft_input(committed.verified, schedule, self._table, tables.head, self._page_size)
        in_order = self._drafts_are_placed(schedule) if last is None else draft is not None
        target = target_arrays(schedule, self._table, tables, in_order_of_last=in_order)
        device = self.send(target, schedule.rows, partial(self.executor.send, loop))
        self._table.mark_batch(schedule.rows)  # only now: the arrays are made from places in the last batch
        if loop is not None and last is not None:
            draft = self.executor.draft(device, last.verification.aux_hidden_states)
            if draft is not None and draft.kept is not None:
                schedule, target, device, draft = self._cut(schedule, target, device, draft, draft.kept)
        if self._scheduler.guests is not None:
            draft = self._scheduler.guests.join(device, draft)
        return self.launched(schedule, target, device, draft)

    def may_be_joined(self, launched: LaunchedRound | None) -> bool:
        """Whether requests that came during its draft loop may be in its verification: where it has one, on a CPU.

        No round is sent twice whose drafts are in another order than its rows.
        """
        if launched is None or launched.draft is None or self._queue_verification or self.group.size > 1:
            return False
        return launched.target.sources is None and self._scheduler.guests is None

    def joined(self, launched: LaunchedRound) -> LaunchedRound:
        """The round with requests that have come since it was launched, sent again; itself where none can join."""
        if not self.may_be_joined(launched):
            return launched
        schedule = self._scheduler.joined(launched.schedule)
        if len(schedule.rows) == len(launched.schedule.rows):
            return launched
        return LaunchedRound(schedule, *self._sent_again(schedule), launched.draft)

    def _sent_again(self, schedule: Schedule) -> tuple[TargetArrays, Round]:
        """A round whose draft loop has run, with other rows or fewer drafts."""
        target = target_arrays(schedule, self._table, self.tables(schedule, self._behind))
        device = self.send(target, schedule.rows, partial(self.executor.send, None))
        self._table.mark_batch(schedule.rows)
        return target, device

    def _cut(
        self, schedule: Schedule, target: TargetArrays, device: Round, draft: Draft, kept: Tensor
    ) -> tuple[Schedule, TargetArrays, Round, Drafted]:
        """The round with the `kept` [R] leading drafts of the rows that the draft loop drafted for.

        It is sent again if these are fewer: the target reads fewer tokens. Rows that keep none go behind rows
        with drafts.
        """
        self._counters.early_reads += 1
        counts = schedule.num_drafts.copy()
        counts[: len(kept)] = np.minimum(counts[: len(kept)], kept.cpu().numpy())
        if np.array_equal(counts, schedule.num_drafts):
            return schedule, target, device, draft
        order = np.argsort(counts == 0, kind="stable")
        schedule = Schedule(schedule.rows[order], schedule.num_new[order], counts[order], schedule.num_arrived)
        target, device = self._sent_again(schedule)
        rows = order[: schedule.num_drafting - schedule.num_arrived]
        return schedule, target, device, rows_of(draft, rows, target.max_drafts) if len(rows) else None

    def is_first_tokens_alone(self, current: VerifyingRound) -> bool:
        """Whether a round, just read, only decided the first tokens of its rows, and no other request needs the device.

        Then the next launch can wait: it takes the host a tenth of the time that a short prompt on cached pages takes
        in all, and the device has the draft prefill of this round to run meanwhile.
        """
        schedule = current.schedule
        guests = self._scheduler.guests
        if schedule.num_drafting or self._scheduler.waiting or (guests is not None and guests.leaving):
            return False
        return len(current.target.decided) == len(schedule.rows)

    def after_first_tokens(
        self, current: VerifyingRound, committed: Committed, outcome: Outcome
    ) -> LaunchedRound | None:
        """Launch the draft steps and the round after one for which `is_first_tokens_alone` holds."""
        assert isinstance(current.verification, DraftedVerification)
        return self.launch(current, committed, current.verification.launch_steps(outcome.num_accepted))

    def drafts_of(
        self, last: VerifyingRound, committed: Committed, draft: Drafted, schedule: Schedule
    ) -> tuple[Draft, ndarray]:
        """Drafts of some rows after `last`, which no round of this engine verifies.

        Args:
            draft: see `after`. Where None, a draft loop is launched for these rows alone.
            schedule: the rows, each with its bonus token and a draft or more; the head's pages are reserved.

        Returns:
            Drafts on the device, and [R] each row's place among them.
        """
        places = self._table.previous[schedule.rows]
        if draft is None:
            tables = self.tables(schedule, self._behind)
            assert tables.head is not None
            own = (self._table, tables.head, self._page_size, False)
            loop = draft_input(committed.verified, schedule, *own)
            target = target_arrays(schedule, self._table, tables)
            device = self.send(target, schedule.rows, partial(self.executor.send, loop))
            draft = self.executor.draft(device, last.verification.aux_hidden_states)
            places = np.arange(len(places))
            assert draft is not None
        return draft, places

    def _drafts_are_placed(self, schedule: Schedule) -> bool:
        """Whether rows of a first round have drafts, at the places in `RowTable.previous`."""
        if not schedule.num_arrived:
            return False
        last = schedule.rows[: schedule.num_drafting][-schedule.num_arrived :]
        return bool((self._table.previous[last] >= 0).all())

    def launched(
        self,
        schedule: Schedule,
        target: TargetArrays,
        device: Round,
        draft: Drafted,
        verification: Verification | None = None,
    ) -> LaunchedRound:
        """Count a round that is sent. On a GPU, queue its verification, if it is not launched with it, after the draft
        loop; on a CPU that would only delay the host."""
        if verification is None and self._queue_verification:
            verification = self.executor.verify(device, draft)
        counters = self._counters
        transfers = self.executor.transfers
        counters.rounds += 1
        if any(target.extras):
            # Not strict: a round in which no extra has arrays may have () in their place.
            pairs = zip(self._extras, target.extras, strict=False)
            counters.early_reads += any(own is not None and extra.reads(own) for extra, own in pairs)
        counters.host_to_device += transfers - counters.transfers
        counters.transfers = transfers
        if verification is None:
            return LaunchedRound(schedule, target, device, draft)
        return VerifyingRound(schedule, target, device, draft, verification)

    def tables(self, schedule: Schedule, more_tokens: int) -> RoundTables:
        """All block tables, as wide as the longest row with `more_tokens` needs (a power of two of pages)."""
        longest = int((self._table.length[schedule.rows] + schedule.num_drafts).max()) + more_tokens
        pages = self._scheduler.target_pages
        head = self._scheduler.head_pages
        width = pages.width_for(longest)
        windowed = tuple(WindowedTable(g.reach, g.table, schedule.rows) for g in self._scheduler.windowed_pages)
        own = None if head is None else head.table[:, :width]
        return RoundTables(pages.table[:, :width], own, self._page_size, windowed)

    def send(self, target: TargetArrays, rows: ndarray, to: Callable[[TargetArrays, SamplingRound | None], T]) -> T:
        """Send a round of these RowTable rows [B] in one copy. to: the executor's way; gets how tokens are drawn."""
        if self.group.size > 1:
            self.group.before_launch(target)
        return to(target, sampling_round(target, rows, self._table) if self._table.any_sampled(rows) else None)

    def before_read(self, current: VerifyingRound) -> LaunchedRound | None:
        """Reserve pages for the round after a drafted or chained verification; after a chained one, launch that round.

        If a row awaits drafts from the host, or the host must know its tokens, the read comes first. A row that
        the read ends is computed once more in vain; its pages are reused only after that round.
        """
        verification = current.verification
        rows = current.schedule.rows
        if isinstance(verification, ChainedVerification) and self._table.must_be_read(rows):
            return None
        self._reserved = None
        if self._scheduler.reserve_next(current.schedule):
            self._reserved = self.tables(current.schedule, 1 + 2 * self._behind).rows(rows)
        if self._reserved is None or not isinstance(verification, ChainedVerification):
            return None
        none = np.zeros(len(rows), np.int64)
        target = target_after(current.target, self._table, self._reserved, none, none)
        device, following = self.send(target, rows, verification.launch_next)
        return self.launched(current.schedule, target, device, None, following)

    def before_commit(self, current: VerifyingRound, outcome: Outcome, draft: Drafted) -> LaunchedRound | None:
        """Launch the round that verifies `draft`, if all rows go on: none meets an eos id, each has a draft, and none
        awaits drafts of the host."""
        if draft is None or self._reserved is None or self._table.awaits(current.schedule.rows):
            return None
        rows = current.schedule.rows
        accepted = outcome.num_accepted
        drafts = drafts_after(current.target, accepted)
        if not drafts.all() or ending_tokens(outcome.tokens, accepted + 1, self._table.eos[rows]).any():
            return None
        target = target_after(current.target, self._table, self._reserved, drafts, accepted, outcome.tokens)
        device = self.send(target, rows, partial(self.executor.send, None))
        return self.launched(Schedule(rows, current.schedule.num_new, drafts), target, device, draft)
