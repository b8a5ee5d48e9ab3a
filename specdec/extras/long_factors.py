"""The extra of longrope models whose requests are read with the long factors, see `specdec.wrapped.long_rope`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from attention.batch.host import BatchExtra, offsets_within
from attention.batch.metadata import ExtraSection, MakeSection
from specdec.rounds.extras import RoundExtra
from specdec.rounds.rows import ExtraColumns, RowTable, Schedule
from specdec.values import Json
from specdec.wrapped.long_rope import LongRopeRule, RotaryPositions

LONG_FACTORS = 1
"""Bit of `RoundExtra.variant`: first tokens have the long factors of a rotary embedding."""


@dataclass(frozen=True)
class LongFactors(RoundExtra):
    """A longrope target that serves requests beyond its short factors. rule: which requests use long factors when."""

    rule: LongRopeRule

    def facts(self) -> Json:
        return {"long_rope": self.rule}

    @property
    def rereads(self) -> bool:
        return self.rule.rereads

    def columns(self, max_rows: int) -> FirstTokensLong:
        return FirstTokensLong(self.rule)

    def section(self, fixed: bool) -> MakeSection | None:
        """See `RoundExtra.section`. None for fixed shapes: for rows that verify, positions determine the factors."""
        return None if fixed else partial(ExtraSection, RotaryPositions, "rotary")

    def variant(self, prompt_len: int, num_committed: int) -> int:
        return LONG_FACTORS if self.rule.is_long(prompt_len, num_committed) else 0

    def reach(self, variant: int) -> int | None:
        return None if variant & LONG_FACTORS or not self.rule.rereads else self.rule.original


class FirstTokensLong(ExtraColumns):
    """Which rows read their first tokens with the long factors, from the table's variants."""

    def __init__(self, rule: LongRopeRule) -> None:
        self._rule = rule

    def scheduled(self, table: RowTable, schedule: Schedule) -> BatchExtra | None:
        """See `ExtraColumns.scheduled`: none where no row reads such tokens, as in rounds that only decode."""
        start = table.computed[schedule.rows]
        told = (table.variant[schedule.rows] & LONG_FACTORS > 0) & (start < self._rule.original)
        if not told.any():
            return None
        lens = schedule.num_new + schedule.num_drafts
        positions = np.repeat(start, lens) + offsets_within(lens)
        return RotaryPositions(self._rule.encoded(positions, np.repeat(told, lens)))
