"""Logprobs: the extra of requests for log-probabilities (of new or prompt tokens), logits or scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from attention.batch.host import BatchExtra, starts_of
from attention.cached import cached_property
from attention.checking import require
from attention.staging import on_device
from specdec.logits.extra import DecidedColumns
from specdec.logits.processing import filters_of
from specdec.requests.logprobs import PromptLogprobs, TokenRows, of_notes
from specdec.requests.sampling import SamplingArrays, SamplingParams, SamplingTensors
from specdec.requests.target_probs import target_probs, warped
from specdec.rounds.extras import Decision, RoundExtra
from specdec.rounds.rows import Reads, RowTable, Schedule

MOST_PROMPT_ROWS = 512
"""Rows of logits of prompts in one round, of a small vocabulary."""
PROMPT_ROW_BYTES = 2**27
"""The same rows in float32: 256 of a vocabulary of 128,000. What is made of them takes three times as much at most."""


def prompt_rows(vocab_size: int) -> int:
    """How many prompt tokens may get log-probabilities in one round.

    >>> prompt_rows(128_256), prompt_rows(1000), prompt_rows(10**9)
    (261, 512, 1)
    """
    return max(1, min(MOST_PROMPT_ROWS, PROMPT_ROW_BYTES // (4 * vocab_size)))


class PromptPart(NamedTuple):
    """Prompt tokens of one request that get log-probabilities in one round.

    params: the request's. places: [n] their positions. tokens: [n] int64 their ids. rows: [n] token rows of the batch
    whose logits predict them.
    """

    asked: PromptLogprobs
    params: SamplingParams
    places: ndarray
    tokens: ndarray
    rows: ndarray


class WholeRows(NamedTuple):
    """A decided row whose request returns full rows [V], of the model's logits (`own`) or of the scores.

    place: index among the J decided rows. position: position of its first new token.
    """

    told: TokenRows
    params: SamplingParams
    place: int
    position: int
    own: bool


@dataclass(frozen=True)
class AskingRows:
    """Host-side rows whose requests have log-probabilities or logits.

    Attributes:
        params: [m] of rows with log-probabilities of new tokens. places: [m] int64 their index among the J decided
            rows.
        whole: rows with logits or scores.
        prompts: prompt tokens with log-probabilities, N in all.
    """

    params: tuple[SamplingParams, ...]
    places: ndarray
    whole: tuple[WholeRows, ...]
    prompts: tuple[PromptPart, ...]
    what: ClassVar[str] = "log-probabilities"

    @cached_property
    def more_logits(self) -> ndarray:
        """[N] int64, see `NeedsLogits`."""
        return np.concatenate([np.zeros(0, np.int64), *(part.rows for part in self.prompts)])

    def validate(self, query_lens: ndarray) -> None:
        """See `BatchExtra.validate`."""
        require(len(self.params) == len(self.places) <= len(query_lens), "log-probabilities of other rows")
        require(bool((self.more_logits < query_lens.sum()).all()), "log-probabilities of tokens of no row")


@dataclass(frozen=True)
class Logprobs(RoundExtra):
    """The extra. Rounds without such requests run no other operators; those with them a few more after the decision,
    however the round itself runs.

    most_prompt_rows: see `prompt_rows`.
    """

    most_prompt_rows: int

    def columns(self, max_rows: int) -> AskingColumns:
        """See `RoundExtra.columns`."""
        return AskingColumns(max_rows, self.most_prompt_rows)

    def notes(self, own: BatchExtra, decision: Decision) -> tuple[Tensor, ...]:
        """See `RoundExtra.notes`: of new tokens [J, n+1, W] and of prompt tokens [N, W'], columns as `of_notes` reads
        them, and whole rows [m, n+1, V].

        Takes [m·(n+1), V] and [N, V] float32 a few times over.
        """
        assert isinstance(own, AskingRows)
        rows, width = decision.index.shape
        tokens = decision.logits.new_zeros(rows, width, 0, dtype=torch.float32)
        prompts = []
        if own.params:
            tokens = _of_tokens(own, decision)
        if own.prompts:
            targets = on_device(np.concatenate([part.tokens for part in own.prompts]), decision.logits.device)[:, None]
            params = [part.params for part in own.prompts for _ in part.tokens]
            logits = decision.logits[-len(targets) :]
            found = _in_modes(params, logits, logits)
            prompts = [_described(found, targets, max(part.asked.count for part in own.prompts))]
        whole = [_whole_row(each, decision) for each in own.whole]
        return (tokens, *prompts, *([torch.stack(whole)] if whole else []))


def _of_tokens(own: AskingRows, decision: Decision) -> Tensor:
    """[J, n+1, W], 0 in rows without log-probabilities."""
    (rows, width) = decision.index.shape
    device = decision.logits.device
    places = on_device(own.places, device)
    at = decision.index[places].reshape(-1)
    tokens = decision.tokens[places].reshape(-1, 1)
    most = max(params.logprobs or 0 for params in own.params)
    every = [params for params in own.params for _ in range(width)]
    told = _described(_in_modes(every, decision.logits[at], decision.adjusted[at]), tokens, most)
    notes = torch.zeros(rows, width, told.shape[1], device=device)
    return notes.index_copy_(0, places, told.view(len(places), width, -1))


def _described(found: Tensor, tokens: Tensor, most: int) -> Tensor:
    """[r, W] as `of_notes` reads them. found: [r, V] log-probabilities; tokens: [r, 1]; most: alternatives.

    Of equal ones the smaller id comes first: `topk` chooses by how many are asked for, which other rows decide.
    """
    value = found.gather(1, tokens)
    rank = (found > value).sum(1, keepdim=True)
    size = found.shape[1]
    top = tokens[:, :0]
    if most:
        # The bits of numbers of one sign are in their order.
        order = found.abs().view(torch.int32).long() << 32 | torch.arange(size, device=found.device)
        top = order.topk(min(most, size), dim=1, largest=False).values & 2**32 - 1
    return torch.cat([value, rank.float(), top.float(), found.gather(1, top)], 1)


def _whole_row(own: WholeRows, decision: Decision) -> Tensor:
    """[n+1, V] float32."""
    at = decision.index[own.place]
    if own.own:
        return decision.logits[at].float()
    scores = decision.adjusted[at].float()
    return scores if own.params.greedy else warped(scores, _tensors([own.params] * len(at), at.device))


def _in_modes(params: Sequence[SamplingParams], logits: Tensor, adjusted: Tensor) -> Tensor:
    """[r, V] float32 by logits [r, V] and those that a request's own rules changed, in each row's `logprobs_mode`."""
    found = logits.float().log_softmax(1)
    processed = [row for row, own in enumerate(params) if own.logprobs_mode == "processed"]
    if processed:
        places = on_device(np.array(processed), logits.device)
        # Log-probabilities of the distribution that a request samples from; for greedy requests, of the plain logits.
        changed = adjusted[places].float()
        tensors = _tensors([params[row] for row in processed], logits.device)
        greedy = tensors.temperature == 0
        found[places] = torch.where(greedy[:, None], changed.log_softmax(1), target_probs(changed, tensors).log())
    return found


def _tensors(params: Sequence[SamplingParams], device: torch.device) -> SamplingTensors:
    """One row of parameters each."""
    values = SamplingArrays.of(params)
    return SamplingTensors(*(on_device(column, device) for column in values.columns), filters=values.filters)


class AskingColumns(DecidedColumns[SamplingParams]):
    """Parameters of rows whose requests have log-probabilities, logits or scores."""

    def __init__(self, max_rows: int, most_prompt_rows: int) -> None:
        super().__init__(max_rows)
        self._most = most_prompt_rows

    def open(self, table: RowTable, row: int, params: SamplingParams) -> None:
        """See `ExtraColumns.open`."""
        asks = bool(params.told)
        if asks and filters_of(params) is not None:  # `ChangedLogits` has applied all filters to the scores already
            params = replace(params, top_k=0, top_p=1.0, min_p=0.0)
        self.own[row] = params if asks else None
        self.idle = self.idle and not asks

    def chunk(self, table: RowTable, row: int, count: int, others: Reads) -> int:
        """See `ExtraColumns.chunk`: limits the prompt tokens with log-probabilities in one round."""
        _, asked = self._prompt_part(table, row, count)
        free = self._most - sum(len(self._prompt_part(table, *other)[1]) for other in others)
        return count if len(asked) <= free else asked[0] - int(table.computed[row]) + free

    def commit(self, table: RowTable, rows: ndarray, committed: BatchExtra | None, notes: Sequence[ndarray]) -> None:
        """See `ExtraColumns.commit`."""
        if not isinstance(committed, AskingRows) or not notes:
            return
        _, *others = notes
        if committed.prompts:
            found = iter(others.pop(0))
            for part in committed.prompts:
                for position, token in zip(part.places.tolist(), part.tokens.tolist(), strict=True):
                    part.asked.tell(position, of_notes(token, next(found), part.asked.count))
        for whole, rows_of_it in zip(committed.whole, others[0] if others else (), strict=True):
            whole.told.tell(whole.position, rows_of_it)

    def _prompt_part(self, table: RowTable, row: int, count: int) -> tuple[PromptLogprobs | None, range]:
        """Positions, among the next `count` tokens of a row, whose logits its request needs."""
        params = self.own[row]
        if params is None or not isinstance(params.prompt_logprobs, PromptLogprobs):
            return None, range(0)
        asked = params.prompt_logprobs
        first = int(table.computed[row])
        return asked, range(max(first, asked.next_row), min(first + count, int(table.prompt[row]) - 1))

    def arrays(self, table: RowTable, schedule: Schedule, count: int, length: ndarray) -> AskingRows | None:
        """See `DecidedColumns.arrays`."""
        asking = [(i, own) for i, row in enumerate(schedule.rows) if (own := self.own[row]) is not None]
        logprobs = [(own, i) for i, own in asking if i < count and own.logprobs is not None]
        whole = tuple(
            WholeRows(told, own, i, int(length[i]), name == "return_logits")
            for i, own in asking
            for name in ("return_logits", "return_scores")
            if i < count and isinstance(told := getattr(own, name), TokenRows)
        )
        starts = starts_of(schedule.num_new + schedule.num_drafts)
        prompts = []
        for i, own in asking:
            row = int(schedule.rows[i])
            asked, needed = self._prompt_part(table, row, int(schedule.num_new[i]))
            if asked is not None and needed:
                before = np.arange(needed.start, needed.stop)
                tokens = table.tokens[row, before + 1].astype(np.int64)
                prompts.append(PromptPart(asked, own, before + 1, tokens, starts[i] + before - table.computed[row]))
        if not (logprobs or whole or prompts):
            return None
        places = np.array([place for _, place in logprobs], np.int64)
        return AskingRows(tuple(own for own, _ in logprobs), places, whole, tuple(prompts))
