"""Drafts by lookup: what followed the longest match of a request's last tokens, in its own text. See `TokenIndex`.

A match gives drafts from its second token on: a round without drafts may be launched before the last one is read, and
then a match at the token that this one decides comes too late. So the rule holds in every engine, and a row's drafts
depend on its text alone, never on what the other rows do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attention.batch.host import BatchExtra
from drafters.loops.lookup import SharedTexts, TokenIndex
from specdec.requests.sampling import SamplingParams
from specdec.rounds.extras import RoundExtra
from specdec.rounds.rows import ExtraColumns, RowTable
from specdec.values import Json

SHARED_TOKENS = 1 << 18
"""Most tokens of ended requests that are looked into."""


@dataclass(frozen=True)
class LookupDrafts(RoundExtra):
    """An engine whose requests draft by lookup.

    Attributes:
        least, longest: tokens of a match, see `TokenIndex`.
        shared: look into the texts of requests that have ended, too, but those with `cache_prefix=False`.
        greedy: sampled requests draft by the head alone, because its graphs keep the draft distribution of every row.
    """

    least: int
    longest: int
    shared: bool = False
    greedy: bool = False
    drafts: ClassVar[str] = "lookup"

    def facts(self) -> Json:
        """See `RoundExtra.facts`."""
        return {"lookup": {"min": self.least, "max": self.longest, "shared": self.shared}}

    def columns(self, max_rows: int) -> LookupColumns:
        """See `RoundExtra.columns`."""
        return LookupColumns(self, max_rows)


class LookupColumns(ExtraColumns):
    """Gives each row, after every commit, the drafts that its index proposes (`RowTable.give`).

    indexes: index of the tokens of each row's request; None if it does not draft by lookup.
    """

    def __init__(self, lookup: LookupDrafts, max_rows: int) -> None:
        self._lookup = lookup
        self.indexes: list[TokenIndex | None] = [None] * max_rows
        self.shared_texts = SharedTexts(lookup.least, lookup.longest, SHARED_TOKENS) if lookup.shared else None
        self._private = np.zeros(max_rows, np.bool_)

    def open(self, table: RowTable, row: int, params: SamplingParams) -> None:
        """See `ExtraColumns.open`."""
        if table.drafts[row] and not (self._lookup.greedy and params.temperature):
            self.indexes[row] = index = TokenIndex(self._lookup.least, self._lookup.longest)
            self._private[row] = not params.cache_prefix
            self._propose(table, row, index)

    def close(self, row: int) -> None:
        """See `ExtraColumns.close`."""
        index = self.indexes[row]
        self.indexes[row] = None
        if index is not None and self.shared_texts is not None and not self._private[row]:
            self.shared_texts.add(index.tokens)

    def commit(
        self, table: RowTable, rows: np.ndarray, committed: BatchExtra | None, notes: Sequence[np.ndarray]
    ) -> None:
        """See `ExtraColumns.commit`."""
        for row in rows.tolist():
            if (index := self.indexes[row]) is not None:
                self._propose(table, row, index)

    def _propose(self, table: RowTable, row: int, index: TokenIndex) -> None:
        """Index the row's new tokens, and give it the drafts that follow them; of a prompt what was read so far."""
        reads = table.computed[row] < table.prefill[row]
        new = table.tokens[row, len(index.tokens) : (table.computed if reads else table.length)[row]].tolist()
        if reads:
            index.extend(new)
        elif new:
            index.extend(new[:-1])
            # Before the last token is added: a match gives drafts from its second token on, see the module's docstring.
            before = self.proposed(index, 1)
            index.extend(new[-1:])
            found = self.proposed(index, int(table.drafts[row]))
            table.give(row, found if before else (), bool(found))

    def proposed(self, index: TokenIndex, most: int) -> list[int]:
        """The tokens after the longest match of a row's last tokens: in its own text unless another's is longer."""
        if self.shared_texts is None:
            return index.propose(most)
        own = index.longest(index.tokens)
        return self.shared_texts.propose(most, index.tokens, own.length) or index.proposed(own, most)
