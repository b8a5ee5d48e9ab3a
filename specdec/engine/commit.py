"""Commit: append accepted tokens to the rows of the row table and advance their lengths. Vectorised."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from specdec.acceptance.packed import Outcome
from specdec.requests.request import RowRound
from specdec.rounds.rows import RowTable, Schedule
from specdec.rounds.verification import TargetArrays, Verified


@dataclass(frozen=True)
class Committed:
    """The tokens committed in one round, and the rows that end with them.

    Attributes:
        verified: the whole batch, for a draft loop over its aux hidden states.
        rows: [J] RowTable rows. tokens: [J, n+1]; the first count[j] are committed.
        num_drafts, num_accepted, count: [J].
        at_eos, at_limit: [J] bool, why a row ends.
        drafts: [J, n]. notes: [J, n+1, W] reported with the tokens, see `RoundExtra.notes`; None if no row has any.
    """

    verified: Verified
    rows: ndarray
    tokens: ndarray
    num_drafts: ndarray
    num_accepted: ndarray
    count: ndarray
    at_eos: ndarray
    at_limit: ndarray
    drafts: ndarray
    notes: ndarray | None

    @property
    def rounds(self) -> list[RowRound]:
        """Results of the decided rows, one by one."""
        every = (self.tokens, self.count, self.num_accepted, self.drafts, self.num_drafts)
        each = zip(*(array.tolist() for array in every), strict=True)  # one call for all rows: numpy's own take longer
        rounds = [
            RowRound(tokens[:count], accepted, tuple(drafts[:num_drafts]))
            for tokens, count, accepted, drafts, num_drafts in each
        ]
        if self.notes is not None:
            return [round_._replace(notes=own) for round_, own in zip(rounds, self.notes, strict=True)]
        return rounds


def ending_tokens(tokens: ndarray, count: ndarray, eos_ids: ndarray) -> ndarray:
    """[J, n+1] bool: which of the first count[j] tokens [J, n+1] are among the row's own eos ids [J, E]."""
    found = (tokens[:, :, None] == eos_ids[:, None, :]).any(2)
    if not found.any():
        return found
    return found & (np.arange(tokens.shape[1]) < count[:, None])


def commit(
    schedule: Schedule, target: TargetArrays, outcome: Outcome, table: RowTable, head_has_read: bool = False
) -> Committed:
    """Append the committed tokens to the table and advance its lengths.

    A row keeps its accepted drafts and the next bonus token, up to the first eos id and to its limit.

    head_has_read: whether the draft prefill over this verification is launched; else the head has read only tokens
        committed before it, in rows with drafts.
    """
    every = schedule.rows
    rows = every[target.decided]
    width = np.arange(outcome.tokens.shape[1])
    length = table.length[rows]
    limit = table.limit[rows]
    count = np.minimum(outcome.num_accepted + 1, limit - length)
    is_eos = ending_tokens(outcome.tokens, count, table.eos[rows])
    at_eos = np.any(is_eos, axis=1)
    if at_eos.any():
        count = np.where(at_eos, is_eos.argmax(1) + 1, count)
    j, column = (width < count[:, None]).nonzero()
    table.tokens[rows[j], length[j] + column] = outcome.tokens[j, column]
    table.length[rows] = length + count
    accepted = np.zeros(len(every), np.int64)
    accepted[target.decided] = outcome.num_accepted
    if not head_has_read:
        drafted = every[schedule.num_drafts > 0]
        table.head_computed[drafted] = table.computed[drafted]
    table.computed[every] += schedule.num_new + accepted
    if head_has_read:
        table.head_computed[every] = table.computed[every]
    if table.gives:
        table.num_given[every] = 0
    for columns, extra in zip(table.extras, target.extras, strict=True):
        if not columns.idle:
            columns.commit(table, every, extra, outcome.notes)
    return Committed(
        verified=Verified(target.query_start_loc, every, schedule.num_drafts, accepted),
        rows=rows,
        tokens=outcome.tokens,
        num_drafts=target.num_drafts,
        num_accepted=outcome.num_accepted,
        count=count,
        at_eos=at_eos,
        at_limit=length + count >= limit,
        drafts=outcome.drafts,
        notes=outcome.notes[0] if outcome.notes else None,
    )
