"""Launching a round: its schedule and pages, its arrays on the device, its draft loop, its verification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from drafters.loops.chain.run import Draft
from specdec.config import EngineConfig
from specdec.engine.commit import Committed
from specdec.engine.scheduler import Scheduler
from specdec.engine.stats import Counters
from specdec.execution.eager import Executor
from specdec.execution.verification import Verification
from specdec.rounds.fields import power_of_two
from specdec.rounds.rows import RowTable
from specdec.rounds.schedule import Schedule
from specdec.rounds.verification import DraftArrays, TargetArrays, draft_arrays, sampling_round, target_arrays


@dataclass(frozen=True)
class LaunchedRound:
    """A round that was sent, and its draft loop launched.

    Attributes:
        schedule: its rows. target: the host arrays of its verification.
        device: the executor's own, what `Executor.send` returned.
        draft: the drafts that it verifies, on the device; None where no row has any.
    """

    schedule: Schedule
    target: TargetArrays
    device: Any
    draft: Draft | None


@dataclass(frozen=True)
class VerifyingRound(LaunchedRound):
    """A round whose verification is launched, too."""

    verification: Verification


@dataclass(frozen=True)
class Tables:
    """Block tables of the target's pages, and of the head's (None without a head), cut to the width of a round."""

    target: np.ndarray
    head: np.ndarray | None


class Launcher:
    """Launches rounds of an executor over one row table.

    Attributes:
        executor: how rounds run on the device.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        table: RowTable,
        config: EngineConfig,
        counters: Counters,
        queue_verification: bool,
    ) -> None:
        """queue_verification: launch a round's verification with the round, without waiting for `verify`."""
        self.executor = executor
        self._scheduler = scheduler
        self._table = table
        self._page_size = config.page_size
        self._num_drafts = 0 if scheduler.head_pages is None else config.num_speculative_tokens
        self._counters = counters
        self._queue_verification = queue_verification

    def first(self) -> LaunchedRound | None:
        """A round when none is in flight: no verification before it has states for a draft loop. None: no work."""
        return self._send(None, None)

    def after(self, last: VerifyingRound, committed: Committed, draft: Draft | None) -> LaunchedRound | None:
        """The round after a commit.

        draft: the drafts of that round where they are being made already, in the rows' order of `last`; where None,
        the draft loop over the aux hidden states of `last` is launched here.
        """
        return self._send(last, committed) if draft is None else self._send_drafted(draft)

    def verify(self, round_: LaunchedRound) -> VerifyingRound:
        """Launch a round's verification, unless it is."""
        if isinstance(round_, VerifyingRound):
            return round_
        verification = self.executor.verify(round_.device, round_.draft)
        return VerifyingRound(round_.schedule, round_.target, round_.device, round_.draft, verification)

    def launched(self, schedule: Schedule, target: TargetArrays, device: Any, draft: Draft | None) -> LaunchedRound:
        """A round that was sent. On a GPU its verification is queued after the draft loop; on a CPU it would only
        delay what the host does next."""
        round_ = LaunchedRound(schedule, target, device, draft)
        if self._queue_verification:
            round_ = self.verify(round_)
        self.count(target)
        return round_

    def count(self, target: TargetArrays) -> None:
        """Count a launched round."""
        self._counters.add_round(target.num_tokens, self.executor.transfers)

    def tables(self, schedule: Schedule, more_tokens: int) -> Tables:
        """Both block tables, as wide as the longest row with `more_tokens` needs (a power of two of pages)."""
        longest = int((self._table.length[schedule.rows] + schedule.num_drafts).max()) + more_tokens
        pages, head = self._scheduler.target_pages, self._scheduler.head_pages
        width = min(power_of_two(pages.pages_for(longest)), pages.table.shape[1])
        return Tables(pages.table[:, :width], None if head is None else head.table[:, :width])

    def _send(self, last: VerifyingRound | None, committed: Committed | None) -> LaunchedRound | None:
        """Schedule, send one transfer, and launch the draft loop over the aux hidden states of `last`."""
        schedule = self._schedule()
        if schedule is None:
            return None
        tables = self.tables(schedule, self._num_drafts)
        loop = None if last is None or committed is None else self._draft_loop(last, committed, schedule, tables)
        target = target_arrays(schedule, self._table, tables.target, self._page_size, tables.head)
        device = self._sent(schedule, target, loop)
        draft = None
        if last is not None and loop is not None:
            draft = self.executor.draft(device, last.verification.tapped)
        return self.launched(schedule, target, device, draft)

    def _send_drafted(self, draft: Draft) -> LaunchedRound | None:
        """Schedule and send a round whose draft loop runs already."""
        schedule = self._schedule()
        if schedule is None:
            return None
        tables = self.tables(schedule, self._num_drafts)
        target = target_arrays(schedule, self._table, tables.target, self._page_size, tables.head, ahead=True)
        return self.launched(schedule, target, self._sent(schedule, target, None), draft)

    def _schedule(self) -> Schedule | None:
        before = self._scheduler.num_preemptions
        schedule = self._scheduler.schedule()
        self._counters.add(preemptions=self._scheduler.num_preemptions - before)
        return schedule

    def _draft_loop(
        self, last: VerifyingRound, committed: Committed, schedule: Schedule, tables: Tables
    ) -> DraftArrays | None:
        if tables.head is None:
            return None
        verified = self.executor.verified(committed.verified, last.device)
        return draft_arrays(verified, schedule, self._table, tables.head, self._page_size)

    def _sent(self, schedule: Schedule, target: TargetArrays, loop: DraftArrays | None) -> Any:
        device = self.executor.send(loop, target, sampling_round(target, schedule, self._table))
        self._table.mark_batch(schedule.rows)
        return device
