"""ChangedLogits: the extra of requests whose options change their logits before a token is decided."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from attention.batch.host import BatchExtra, offsets_within, owners_of
from attention.cached import cached_property
from attention.checking import require
from attention.staging import on_device
from specdec.logits.forms import TokenPrefixes
from specdec.logits.processing import LogitsRows, Subject, filters_of, process
from specdec.requests.sampling import SamplingParams
from specdec.rounds.extras import EarlyDrafts, RoundExtra, drafted_prefixes
from specdec.rounds.rows import ExtraColumns, RowTable, Schedule
from specdec.rounds.transfer import DeviceRound

T = TypeVar("T")


@dataclass(frozen=True)
class ChangedRows:
    """The decided rows of a round whose requests have options, on the host.

    Attributes:
        subjects: [m] their requests. places: [m] int64 where they are among the J decided rows.
        lens: [m] int64 committed tokens, bonus token included. committed: [m, L] int32 these, the bonus token not
            always; L is 1 where no option reads them.
        counts: [m] int64 rows of logits of each: its number of drafts plus one.
    """

    subjects: tuple[Subject, ...]
    lens: ndarray
    committed: ndarray
    places: ndarray
    counts: ndarray
    what: ClassVar[str] = "options of requests"

    @cached_property
    def owner(self) -> ndarray:
        """[N] int64, which of the m rows each row of logits is of."""
        return owners_of(self.counts)

    @property
    def offsets(self) -> ndarray:
        """[N] int64, how many drafts each row of logits follows."""
        return offsets_within(self.counts)

    def validate(self, query_lens: ndarray) -> None:
        """See `BatchExtra.validate`."""
        require(len(self.subjects) == len(self.lens) == len(self.committed), "options of other rows")
        require(bool((self.counts >= 1).all() and (self.lens >= 1).all()), "options of rows that are not decided")


@dataclass(frozen=True)
class ChangedLogits(RoundExtra):
    """The extra. Rounds without such requests send nothing more and run no other operators."""

    rewrites: ClassVar[bool] = True

    def columns(self, max_rows: int) -> OptionColumns:
        """See `RoundExtra.columns`."""
        return OptionColumns(max_rows)

    def reads(self, own: BatchExtra) -> bool:
        """See `RoundExtra.reads`: True if the user's code reads prefixes."""
        assert isinstance(own, ChangedRows)
        return any(subject.has_code for subject in own.subjects)

    def rewrite(self, logits: Tensor, round_: DeviceRound, own: BatchExtra, drafts: EarlyDrafts | None) -> Tensor:
        """See `RoundExtra.rewrite`. One copy of all logits in float32, in which rows with options are changed."""
        assert isinstance(own, ChangedRows)
        rows, vocab = logits.shape
        wide = torch.empty(rows, (vocab // _ALIGNED + 1) * _ALIGNED, device=logits.device)
        scores = wide[:, : vocab + 1]
        scores[:, :-1] = logits
        scores[:, -1] = 0
        place, offset = on_device(np.stack([own.places[own.owner], own.offsets]), logits.device)
        at = round_.logit_index[place, offset]
        changed = rows_of(own, round_, at)
        if len(at) == rows:  # rows of logits are in the order of the batch
            process(scores, changed)
        else:
            part = scores[at]
            process(part, changed)
            scores[at] = part
        return scores[:, :-1]


_ALIGNED = 8
"""Floats: rows of scores begin at multiples, one column at least beyond the vocabulary."""


def rows_of(own: ChangedRows, round_: DeviceRound, at: Tensor) -> LogitsRows:
    """The rows of logits [N] at these places, with the tokens before each."""
    before = drafted_prefixes(round_)
    prompts = np.array([subject.prompt_len for subject in own.subjects], np.int64)
    host = (own.committed.astype(np.int64), own.lens, prompts, own.owner)
    committed, lens, prompt_lens, owner = (on_device(each, at.device) for each in host)
    prefixes = TokenPrefixes.of(committed, lens, prompt_lens, owner, before.token_ids[at], before.there[at])
    return LogitsRows(tuple(own.subjects[j] for j in own.owner), own.lens[own.owner] + own.offsets, prefixes)


class DecidedColumns(ExtraColumns, Generic[T]):
    """Columns of an extra with arrays for rows whose token a round decides, which are the first of its batch.

    own: [R] what the extra has to know of each row's request; None where it does nothing for it.
    """

    def __init__(self, max_rows: int) -> None:
        self.own: list[T | None] = [None] * max_rows
        self.idle = True

    def close(self, row: int) -> None:
        """See `ExtraColumns.close`."""
        self.own[row] = None

    def scheduled(self, table: RowTable, schedule: Schedule) -> BatchExtra | None:
        """See `ExtraColumns.scheduled`."""
        length = table.computed[schedule.rows] + schedule.num_new
        return self.arrays(table, schedule, int(np.count_nonzero(length == table.length[schedule.rows])), length)

    def after(
        self,
        table: RowTable,
        last: BatchExtra | None,
        schedule: Schedule,
        start: ndarray,
        num_accepted: ndarray,
        tokens: ndarray | None,
    ) -> BatchExtra | None:
        """See `ExtraColumns.after`."""
        return None if last is None else self.arrays(table, schedule, len(start), start + schedule.num_new)

    @abstractmethod
    def arrays(self, table: RowTable, schedule: Schedule, count: int, length: ndarray) -> BatchExtra | None:
        """Of a batch whose first `count` rows are decided. length: [B] tokens of each up to what it reads in the
        round."""


class OptionColumns(DecidedColumns[Subject]):
    """The options of each row's request."""

    def open(self, table: RowTable, row: int, params: SamplingParams) -> None:
        """See `ExtraColumns.open`."""
        self.own[row] = subject = subject_of(params, table, row)
        if subject is not None:
            self.idle = False
            if filters_of(params) is not None:
                table.leave_unfiltered(row)

    def after(
        self,
        table: RowTable,
        last: BatchExtra | None,
        schedule: Schedule,
        start: ndarray,
        num_accepted: ndarray,
        tokens: ndarray | None,
    ) -> BatchExtra | None:
        """See `ExtraColumns.after`."""
        found = super().after(table, last, schedule, start, num_accepted, tokens)
        if not isinstance(found, ChangedRows) or tokens is None or found.committed.shape[1] == 1:
            return found
        for committed, row in zip(found.committed, found.places, strict=True):  # the table has no accepted drafts yet
            begin = start[row] - num_accepted[row]
            count = num_accepted[row]
            committed[begin : begin + count] = tokens[row, :count]
        return found

    def arrays(self, table: RowTable, schedule: Schedule, count: int, length: ndarray) -> ChangedRows | None:
        """See `DecidedColumns.arrays`."""
        rows = schedule.rows[:count]
        each = [(place, own) for place, row in enumerate(rows) if (own := self.own[row]) is not None]
        if not each:
            return None
        places = np.array([place for place, _ in each])
        subjects = tuple(subject for _, subject in each)
        width = int(length[places].max()) if any(subject.reads_prefix for subject in subjects) else 1
        committed = table.tokens[rows[places], :width]
        return ChangedRows(subjects, length[places], committed, places, schedule.num_drafts[places] + 1)


def subject_of(params: SamplingParams, table: RowTable, row: int) -> Subject | None:
    """What a row's options see of its request; None where it has none."""
    if not params.settings and params.logits_processor is params.prefix_allowed_tokens_fn is None:
        return None  # most requests: the rules are not asked one by one
    ends = (*(int(i) for i in table.eos[row] if i >= 0), *params.stop_token_ids)
    subject = Subject(params, int(table.prompt[row]), int(table.limit[row]), ends)
    return subject if subject.rules else None
