"""ChangedLogits: the extra of requests whose options change their logits before a token is decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from attention.batch.host import BatchExtra, offsets_within
from attention.checking import require
from specdec.logits.prefixes import TokenPrefixes
from specdec.logits.processing import Filters, LogitsRows, Subject, on_device, process
from specdec.options.logits_options import SAMPLED_ONLY, WITHOUT_EFFECT
from specdec.requests.sampling import SamplingParams
from specdec.requests.user_code import RequestProcessors
from specdec.rounds.extras import DecidedRows, EarlyDrafts, RoundExtra, drafted_prefixes
from specdec.rounds.rows import ExtraColumns, RowTable, Schedule


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
    lens: np.ndarray
    committed: np.ndarray
    places: np.ndarray
    counts: np.ndarray
    what: ClassVar[str] = "options of requests"

    def validate(self, query_lens: np.ndarray) -> None:
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
        return any(s.processors is not None or s.prefix_function is not None for s in own.subjects)

    def rewrite(
        self, logits: torch.Tensor, round_: DecidedRows, own: BatchExtra, drafts: EarlyDrafts | None
    ) -> torch.Tensor:
        """See `RoundExtra.rewrite`. One copy of all logits in float32, in which rows with options are changed."""
        assert isinstance(own, ChangedRows)
        rows, vocab = logits.shape
        wide = torch.empty(rows, (vocab // _ALIGNED + 1) * _ALIGNED, device=logits.device)
        scores = wide[:, : vocab + 1]
        scores[:, :-1] = logits
        scores[:, -1] = 0
        owner = np.repeat(np.arange(len(own.subjects)), own.counts)
        places = np.stack([own.places[owner], offsets_within(own.counts)])
        place, offset = on_device(places, logits.device)
        at = round_.logit_index[place, offset]
        changed = rows_of(own, round_, at)
        if len(owner) == rows:  # rows of logits are in the order of the batch
            process(scores, changed)
        else:
            part = scores[at]
            process(part, changed)
            scores[at] = part
        return scores[:, :-1]


_ALIGNED = 8
"""Floats: rows of scores begin at multiples, one column at least beyond the vocabulary."""


def rows_of(own: ChangedRows, round_: DecidedRows, at: torch.Tensor) -> LogitsRows:
    """The rows of logits [N] at these places, with the tokens before each."""
    owner, device = np.repeat(np.arange(len(own.subjects)), own.counts), at.device
    before = drafted_prefixes(round_)
    prompts = np.array([subject.prompt_len for subject in own.subjects], np.int64)
    prefixes = TokenPrefixes.of(
        on_device(own.committed.astype(np.int64), device),
        on_device(own.lens, device),
        on_device(prompts, device),
        on_device(owner, device),
        before.token_ids[at],
        before.there[at],
    )
    lens = own.lens[owner] + offsets_within(own.counts)
    return LogitsRows(tuple(own.subjects[j] for j in owner), lens, prefixes)


class OptionColumns(ExtraColumns):
    """The options of each row's request."""

    def __init__(self, max_rows: int) -> None:
        self._subjects: list[Subject | None] = [None] * max_rows
        self.idle = True

    def open(self, table: RowTable, row: int, params: SamplingParams) -> None:
        """See `ExtraColumns.open`."""
        self._subjects[row] = subject = subject_of(params, table, row)
        if subject is not None:
            self.idle = False
            if subject.filters is not None:
                table.leave_unfiltered(row)

    def close(self, row: int) -> None:
        """See `ExtraColumns.close`."""
        self._subjects[row] = None

    def scheduled(self, table: RowTable, schedule: Schedule) -> ChangedRows | None:
        """See `ExtraColumns.scheduled`."""
        decided = table.computed[schedule.rows] + schedule.num_new == table.length[schedule.rows]
        return self._changed(table, schedule, np.flatnonzero(decided), table.length[schedule.rows])

    def after(
        self,
        table: RowTable,
        last: BatchExtra | None,
        schedule: Schedule,
        start: np.ndarray,
        num_accepted: np.ndarray,
        tokens: np.ndarray | None,
    ) -> ChangedRows | None:
        """See `ExtraColumns.after`."""
        if last is None:
            return None
        found = self._changed(table, schedule, np.arange(len(start)), start + schedule.num_new)
        if found is None or tokens is None or found.committed.shape[1] == 1:
            return found
        every = [row for row in range(len(start)) if self._subjects[schedule.rows[row]] is not None]
        for j, row in enumerate(every):  # the table has no accepted drafts yet
            begin, count = start[row] - num_accepted[row], num_accepted[row]
            found.committed[j, begin : begin + count] = tokens[row, :count]
        return found

    def _changed(
        self, table: RowTable, schedule: Schedule, decided: np.ndarray, length: np.ndarray
    ) -> ChangedRows | None:
        """decided: [J] places of the decided rows, the first of the batch; length: [B] committed tokens."""
        places = [row for row in decided if self._subjects[schedule.rows[row]] is not None]
        if not places:
            return None
        subjects = tuple(s for row in places if (s := self._subjects[schedule.rows[row]]) is not None)
        counts, lens, own = schedule.num_drafts[decided] + 1, length[places], np.searchsorted(decided, places)
        width = int(lens.max()) if any(subject.reads_prefix for subject in subjects) else 1
        committed = table.tokens[schedule.rows[places], :width]
        return ChangedRows(subjects, lens, committed, own, counts[own])


def filters_of(params: SamplingParams) -> Filters | None:
    """All filters of a sampled request that sets one of `SAMPLED_ONLY`: they are applied here, in their order.

    None where the round applies them, and of a greedy request.
    """
    settings = params.settings
    later = {name: settings.get(name) for name in SAMPLED_ONLY}
    if params.greedy or all(given is None for given in later.values()):
        return None
    return Filters(params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p, **later)


def subject_of(params: SamplingParams, table: RowTable, row: int) -> Subject | None:
    """What a row's options see of its request; None where it has none."""
    settings, filters = params.settings, filters_of(params)
    for name in (*SAMPLED_ONLY, *WITHOUT_EFFECT):
        settings.pop(name, None)
    processors, function = params.logits_processor, params.prefix_allowed_tokens_fn
    if filters is None and not settings and processors is None and function is None:
        return None
    ends = (*(int(i) for i in table.eos[row] if i >= 0), *params.stop_token_ids)
    assert processors is None or isinstance(processors, RequestProcessors), "not copied for its request"
    assert function is None or isinstance(function, RequestProcessors), "not copied for its request"
    prompt, limit = int(table.prompt[row]), int(table.limit[row])
    watch = processors or function or params.watch
    return Subject(settings, prompt, limit, ends, filters, processors, function, watch, params.temperature)
