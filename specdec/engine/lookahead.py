"""Lookahead: the next round is launched before the commit of this one, where it is certain who is in it.

Three pipelines, by the type of the verification in flight (`specdec.execution.verification`); "|" is the read:

    plain      verify                | commit, schedule, send, draft loop
    drafted    verify, draft prefill | draft steps, send and verify the next round, commit
    chained    verify, send and verify the next round | commit                               (without drafts)

A plain one is all that eager rounds have, and prompts without drafts. In a drafted one, which rounds from graphs are
with a head, whether they hold prompts or sampled rows, the next round is launched after
the read and before the commit if every row goes on; else it is scheduled after the commit, with the drafts that are
being made. In a chained one only token ids are unknown before the read, and those the device has itself.
"""

from __future__ import annotations

import numpy as np

from drafters.loops.base import Draft
from specdec.acceptance.packed import Outcome
from specdec.engine.commit import ending_tokens
from specdec.engine.launcher import LaunchedRound, Launcher, Tables, VerifyingRound
from specdec.engine.scheduler import Scheduler
from specdec.execution.verification import ChainedVerification, DraftedVerification
from specdec.rounds.drafting import drafts_after
from specdec.rounds.rows import RowTable
from specdec.rounds.schedule import Schedule
from specdec.rounds.verification import TargetArrays, target_after


class Lookahead:
    """Launches rounds ahead. Of the round after the one in flight it keeps the reserved block tables [B, P].

    A round launched ahead has the rows of the one before in their order, so `RowTable.previous` stays as it is.
    """

    def __init__(self, launcher: Launcher, scheduler: Scheduler, table: RowTable, num_drafts: int) -> None:
        """num_drafts: K, 0 without a head."""
        self._launcher = launcher
        self._scheduler = scheduler
        self._table = table
        self._more_tokens = 1 + 2 * num_drafts
        self._reserved: Tables | None = None

    def before_read(self, current: VerifyingRound) -> LaunchedRound | None:
        """Reserve the next round while the device verifies; a chained one is launched.

        A row that the read ends is in that next round in vain; its pages are handed out again only after it.
        """
        verification = current.verification
        if not isinstance(verification, (ChainedVerification, DraftedVerification)):
            self._reserved = None
            return None
        self._reserved = self._reserve(current.schedule)
        if self._reserved is None or isinstance(verification, DraftedVerification):
            return None
        nothing = np.zeros(len(current.schedule.rows), np.int64)
        target = self._after(current, nothing, nothing, nothing, self._reserved)
        if self._launcher.announce is not None:
            self._launcher.announce(target)
        device, following = verification.launch_next(target, self._launcher.sampling(target, current.schedule.rows))
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
        bonus_tokens = outcome.tokens[np.arange(len(rows)), accepted]
        target = self._after(current, accepted, bonus_tokens, drafts, self._reserved)
        device = self._launcher.send(None, target, rows)
        return self._launcher.launched(Schedule(rows, current.schedule.num_new, drafts), target, device, draft)

    def _reserve(self, schedule: Schedule) -> Tables | None:
        if not self._scheduler.reserve_next(schedule):
            return None
        return self._launcher.tables(schedule, self._more_tokens).rows(schedule.rows)

    def _after(
        self,
        current: VerifyingRound,
        num_accepted: np.ndarray,
        bonus_tokens: np.ndarray,
        drafts: np.ndarray,
        tables: Tables,
    ) -> TargetArrays:
        pages = (tables.target, tables.head, tables.windowed)
        return target_after(current.target, num_accepted, bonus_tokens, drafts, *pages)
