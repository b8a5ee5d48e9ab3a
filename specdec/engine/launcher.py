"""Launcher, Lookahead: launch a round (schedule, pages, transfer, draft loop, verification), also ahead of a commit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drafters.loops.base import Draft, DraftInput
from specdec.acceptance.packed import Outcome
from specdec.config import EngineConfig
from specdec.engine.commit import Committed, ending_tokens
from specdec.engine.scheduler import Scheduler
from specdec.engine.stats import Counters
from specdec.execution.base import ChainedVerification, DraftedVerification, Executor, Verification
from specdec.execution.round import Round
from specdec.rounds.drafting import draft_input, drafts_after
from specdec.rounds.randomness import sampling_round
from specdec.rounds.rows import RowTable, Schedule
from specdec.rounds.verification import RoundTables, TargetArrays, WindowedTable, target_after, target_arrays
from specdec.wrapped.group import ALONE, Group


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
    draft: Draft | None


@dataclass(frozen=True)
class VerifyingRound(LaunchedRound):
    """A round whose verification is launched as well."""

    verification: Verification


class Launcher:
    """Launches rounds of an executor over one row table.

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
        self._num_drafts = 0 if scheduler.head_pages is None else config.num_speculative_tokens
        self._counters = counters
        self._queue_verification = queue_verification

    def first(self) -> LaunchedRound | None:
        """A round after none: without a draft loop, which needs the verification before. None when there is no work."""
        scheduled = self._schedule()
        if scheduled is None:
            return None
        schedule, tables = scheduled
        target = target_arrays(schedule, self._table, tables, self._drafts_are_placed(schedule))
        device = self._send(schedule, target)
        return self.launched(schedule, target, device, self._scheduler.guests.join(device, None))

    def draft_steps(self, current: VerifyingRound, outcome: Outcome) -> Draft | None:
        """Launch the draft steps after a draft prefill, for all rows. None when no draft prefill was launched."""
        if not isinstance(current.verification, DraftedVerification):
            return None
        return current.verification.launch_steps(outcome.num_accepted)

    def after(self, last: VerifyingRound, committed: Committed, draft: Draft | None) -> LaunchedRound | None:
        """Launch the round after a commit.

        draft: its drafts, in the row order of `last`, if their steps are launched already; if None, the draft loop over
        the aux hidden states of `last` is launched here.
        """
        scheduled = self._schedule()
        if scheduled is None:
            return None
        schedule, tables = scheduled
        if draft is not None:
            target = target_arrays(schedule, self._table, tables, in_order_of_last=True)
            device = self._send(schedule, target)
            return self.launched(schedule, target, device, self._scheduler.guests.join(device, draft))
        loop = None
        if tables.head is not None:
            loop = draft_input(committed.verified, schedule, self._table, tables.head, self._page_size)
        target = target_arrays(schedule, self._table, tables)
        device = self._send(schedule, target, loop)
        draft = None if loop is None else self.executor.draft(device, last.verification.aux_hidden_states)
        return self.launched(schedule, target, device, self._scheduler.guests.join(device, draft))

    def is_first_tokens_alone(self, current: VerifyingRound) -> bool:
        """Whether a round, just read, only decided the first tokens of its rows, and no other request needs the device.

        Then the next launch can wait: it takes the host a tenth of the time that a short prompt on cached pages takes
        in all, and the device has the draft prefill to run meanwhile.
        """
        schedule, drafted = current.schedule, isinstance(current.verification, DraftedVerification)
        if not drafted or schedule.num_drafting or self._scheduler.waiting or self._scheduler.guests.leaving:
            return False
        return len(current.target.decided) == len(schedule.rows)

    def after_first_tokens(
        self, current: VerifyingRound, committed: Committed, outcome: Outcome
    ) -> LaunchedRound | None:
        """Launch the draft steps and the round after one for which `is_first_tokens_alone` holds."""
        return self.after(current, committed, self.draft_steps(current, outcome))

    def drafts_of(
        self, last: VerifyingRound, committed: Committed, draft: Draft | None, schedule: Schedule
    ) -> tuple[Draft, np.ndarray]:
        """Drafts of some rows after `last`, which no round of this engine verifies.

        Args:
            draft: see `after`. Where None, a draft loop is launched for these rows alone.
            schedule: the rows, each with its bonus token and a draft or more; the head's pages are reserved.

        Returns:
            Drafts on the device, and [R] each row's place among them.
        """
        places = self._table.previous[schedule.rows]
        if draft is None:
            tables = self.tables(schedule, self._num_drafts)
            assert tables.head is not None
            own = (self._table, tables.head, self._page_size, False)
            loop = draft_input(committed.verified, schedule, *own)
            device = self.send(loop, target_arrays(schedule, self._table, tables), schedule.rows)
            draft, places = self.executor.draft(device, last.verification.aux_hidden_states), np.arange(len(places))
            assert draft is not None
        return draft, places

    def _drafts_are_placed(self, schedule: Schedule) -> bool:
        """Whether rows of a first round have drafts, at the places in `RowTable.previous`."""
        if not schedule.num_arrived:
            return False
        last = schedule.rows[: schedule.num_drafting][-schedule.num_arrived :]
        return bool((self._table.previous[last] >= 0).all())

    def verify(self, round_: LaunchedRound) -> VerifyingRound:
        """Launch a round's verification if it is not launched yet."""
        if isinstance(round_, VerifyingRound):
            return round_
        verification = self.executor.verify(round_.device, round_.draft)
        return VerifyingRound(round_.schedule, round_.target, round_.device, round_.draft, verification)

    def launched(self, schedule: Schedule, target: TargetArrays, device: Round, draft: Draft | None) -> LaunchedRound:
        """Wrap a sent round. On a GPU, queue its verification after the draft loop; on a CPU that would only delay the
        host."""
        if not self._queue_verification:
            self.count()
            return LaunchedRound(schedule, target, device, draft)
        verification = self.executor.verify(device, draft)
        self.count()
        return VerifyingRound(schedule, target, device, draft, verification)

    def count(self) -> None:
        """Count a launched round."""
        self._counters.add_round(self.executor.transfers)

    def tables(self, schedule: Schedule, more_tokens: int) -> RoundTables:
        """All block tables, as wide as the longest row with `more_tokens` needs (a power of two of pages)."""
        longest = int((self._table.length[schedule.rows] + schedule.num_drafts).max()) + more_tokens
        pages, head = self._scheduler.target_pages, self._scheduler.head_pages
        width = pages.width_for(longest)
        windowed = tuple(WindowedTable(g.window, g.table, schedule.rows) for g in self._scheduler.windowed_pages)
        own = None if head is None else head.table[:, :width]
        return RoundTables(pages.table[:, :width], own, self._page_size, windowed)

    def _schedule(self) -> tuple[Schedule, RoundTables] | None:
        """The next schedule, with pages reserved for its tokens and drafts; None when there is no work."""
        before = self._scheduler.num_preemptions
        schedule = self._scheduler.schedule()
        preempted = self._scheduler.num_preemptions - before
        if preempted:
            self._counters.add_preemptions(preempted)
        return None if schedule is None else (schedule, self.tables(schedule, self._num_drafts))

    def _send(self, schedule: Schedule, target: TargetArrays, loop: DraftInput | None = None) -> Round:
        """Send a round, then note its rows' places; its arrays are made from their places in the last batch."""
        device = self.send(loop, target, schedule.rows)
        self._table.mark_batch(schedule.rows)
        return device

    def send(self, loop: DraftInput | None, target: TargetArrays, rows: np.ndarray) -> Round:
        """Send a round of these RowTable rows [B] in one copy."""
        if self.group.size > 1:
            self.group.before_launch(target)
        return self.executor.send(loop, target, sampling_round(target, rows, self._table))


class Lookahead:
    """Launches a round before the one in flight is read or committed, with pages reserved for any outcome.

    Such a round has the rows of the one before in their order, so `RowTable.previous` stays as it is.
    """

    def __init__(self, launcher: Launcher, scheduler: Scheduler, table: RowTable, num_drafts: int) -> None:
        """num_drafts: K, 0 without a head."""
        self._launcher = launcher
        self._scheduler = scheduler
        self._table = table
        self._more_tokens = 1 + 2 * num_drafts
        self._reserved: RoundTables | None = None

    def before_read(self, current: VerifyingRound) -> LaunchedRound | None:
        """Reserve the next round while the device verifies; launch it if it is chained.

        A row that the read ends is computed once more in vain; its pages are reused only after that round.
        """
        verification = current.verification
        if not isinstance(verification, (ChainedVerification, DraftedVerification)):
            self._reserved = None
            return None
        self._reserved = self._reserve(current.schedule)
        if self._reserved is None or isinstance(verification, DraftedVerification):
            return None
        none = np.zeros(len(current.schedule.rows), np.int64)
        target = target_after(current.target, self._table, self._reserved, none, none)
        self._launcher.group.before_launch(target)
        sampling = sampling_round(target, current.schedule.rows, self._table)
        device, following = verification.launch_next(target, sampling)
        self._launcher.count()
        return VerifyingRound(current.schedule, target, device, None, following)

    def before_commit(self, current: VerifyingRound, outcome: Outcome, draft: Draft | None) -> LaunchedRound | None:
        """Launch the round that verifies `draft`, if all rows go on: none meets an eos id, each has a draft."""
        if draft is None or self._reserved is None:
            return None
        rows, accepted = current.schedule.rows, outcome.num_accepted
        drafts = drafts_after(current.target, accepted)
        if not drafts.all() or ending_tokens(outcome.tokens, accepted + 1, self._table.eos[rows]).any():
            return None
        target = target_after(current.target, self._table, self._reserved, drafts, accepted, outcome.tokens)
        device = self._launcher.send(None, target, rows)
        return self._launcher.launched(Schedule(rows, current.schedule.num_new, drafts), target, device, draft)

    def _reserve(self, schedule: Schedule) -> RoundTables | None:
        if not self._scheduler.reserve_next(schedule):
            return None
        return self._launcher.tables(schedule, self._more_tokens).rows(schedule.rows)
