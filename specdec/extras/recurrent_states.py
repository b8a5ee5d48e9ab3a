"""RecurrentStates: the extra of recurrent layers: tokens folded into each row's states, and updates by a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from attention.batch.host import BatchExtra
from attention.batch.metadata import MakeSection
from attention.checking import CHECKS, require
from attention.recurrence.index import FoldRule, StateIndex, folded_after, replay_of, slots_of_rows
from attention.recurrence.runner import StateSection
from specdec.requests.sampling import SamplingParams
from specdec.rounds.extras import RoundExtra
from specdec.rounds.rows import ExtraColumns, RowTable, Schedule
from specdec.values import Json


@dataclass(frozen=True)
class RecurrentStates(RoundExtra):
    """A target's recurrent layers. rule: when their states are stored."""

    rule: FoldRule

    def facts(self) -> Json:
        return {"fold_rule": vars(self.rule)}

    def columns(self, max_rows: int) -> FoldedTokens:
        return FoldedTokens(self.rule, max_rows)

    def section(self, fixed: bool) -> MakeSection:
        return partial(StateSection, most_replayed=self.rule.most_replayed)


class FoldedTokens(ExtraColumns):
    """How many tokens of each row are in its recurrent states, see `attention.recurrence.index`. folded: [R] int64."""

    def __init__(self, rule: FoldRule, max_rows: int) -> None:
        self._rule = rule
        self.folded = np.zeros(max_rows, np.int64)

    def open(self, table: RowTable, row: int, params: SamplingParams) -> None:
        self.folded[row] = table.computed[row]

    def scheduled(self, table: RowTable, schedule: Schedule) -> StateIndex:
        rows = schedule.rows
        start = table.computed[schedule.rows]
        replay = replay_of(start, self.folded[rows])
        num_new = self._rule.num_new(replay, schedule.num_new, start >= table.prefill[rows])
        return self._checked(schedule, StateIndex.of(slots_of_rows(rows), start, replay, num_new))

    def after(
        self,
        table: RowTable,
        last: BatchExtra | None,
        schedule: Schedule,
        start: np.ndarray,
        num_accepted: np.ndarray,
        tokens: np.ndarray | None,
    ) -> StateIndex:
        assert isinstance(last, StateIndex)
        replay = replay_of(start, folded_after(last.start, last.num_new, last.start - last.replay))
        num_new = self._rule.num_new(replay, schedule.num_new, np.ones(len(start), np.bool_))
        return self._checked(schedule, StateIndex.of(last.slots, start, replay, num_new))

    def _checked(self, schedule: Schedule, index: StateIndex) -> StateIndex:
        if CHECKS.on:
            index.validate(schedule.num_new + schedule.num_drafts, self._rule)
        return index

    def commit(
        self, table: RowTable, rows: np.ndarray, committed: BatchExtra | None, notes: Sequence[np.ndarray]
    ) -> None:
        assert isinstance(committed, StateIndex)
        self.folded[rows] = folded_after(committed.start, committed.num_new, self.folded[rows])

    def check_leaving(self, table: RowTable, row: int) -> None:
        folded = int(self.folded[row])
        computed = int(table.computed[row])
        require(folded == computed, f"a row leaves with {folded} of its {computed} tokens in its states")
