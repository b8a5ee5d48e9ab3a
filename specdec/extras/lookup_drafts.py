"""Drafts by lookup: what followed the longest match of a request's last tokens, in its own text. See `TokenIndex`.

A match gives drafts from its second token on: a round without drafts may be launched before the last one is read, and
then a match at the token that this one decides comes too late. So the rule holds in every engine, and a row's drafts
depend on its text alone, never on what the other rows do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from attention.batch.host import BatchExtra
from drafters.loops.lookup import TokenIndex
from specdec.requests.sampling import SamplingParams
from specdec.rounds.extras import RoundExtra
from specdec.rounds.rows import ExtraColumns, RowTable


@dataclass(frozen=True)
class LookupDrafts(RoundExtra):
    """An engine whose requests draft by lookup. least, longest: tokens of a match, see `TokenIndex`."""

    least: int
    longest: int
    drafts: ClassVar[str] = "lookup"

    def facts(self) -> dict[str, Any]:
        """See `RoundExtra.facts`."""
        return {"lookup": {"min": self.least, "max": self.longest}}

    def columns(self, max_rows: int) -> LookupColumns:
        """See `RoundExtra.columns`."""
        return LookupColumns(self, max_rows)


class LookupColumns(ExtraColumns):
    """The index of each row's tokens; after every commit the row is given what it proposes (`RowTable.give`)."""

    def __init__(self, lookup: LookupDrafts, max_rows: int) -> None:
        self._lookup = lookup
        self._indexes: list[TokenIndex | None] = [None] * max_rows

    def open(self, table: RowTable, row: int, params: SamplingParams) -> None:
        """See `ExtraColumns.open`."""
        if table.drafts[row]:
            self._indexes[row] = TokenIndex(self._lookup.least, self._lookup.longest)
            self._propose(table, row)

    def close(self, row: int) -> None:
        """See `ExtraColumns.close`."""
        self._indexes[row] = None

    def commit(
        self, table: RowTable, rows: np.ndarray, committed: BatchExtra | None, notes: Sequence[np.ndarray]
    ) -> None:
        """See `ExtraColumns.commit`."""
        for row in rows.tolist():
            if self._indexes[row] is not None:
                self._propose(table, row)

    def _propose(self, table: RowTable, row: int) -> None:
        """Index the row's new tokens, and give it the drafts that follow them."""
        index = self._indexes[row]
        assert index is not None
        new = table.tokens[row, len(index.tokens) : table.length[row]].tolist()
        if new:
            index.extend(new[:-1])
            before = index.propose(1)
            index.extend(new[-1:])
            found = index.propose(int(table.drafts[row]))
            table.give(row, found if before else (), bool(found))
