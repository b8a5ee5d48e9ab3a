"""Logprobs: the extra of requests that ask for log-probabilities of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from attention.batch.host import BatchExtra
from attention.checking import require
from specdec.logits.extra import filters_of
from specdec.logits.processing import on_device
from specdec.requests.logprobs import COLUMNS
from specdec.requests.sampling import SamplingArrays, SamplingParams, SamplingTensors, target_probs
from specdec.rounds.extras import Decision, RoundExtra
from specdec.rounds.rows import ExtraColumns, RowTable, Schedule


@dataclass(frozen=True)
class AskingRows:
    """The decided rows of a round whose requests ask for log-probabilities, on the host.

    Attributes:
        params: [m] of these requests. places: [m] int64 where they are among the J decided rows.
    """

    params: tuple[SamplingParams, ...]
    places: np.ndarray
    what: ClassVar[str] = "log-probabilities"

    def validate(self, query_lens: np.ndarray) -> None:
        """See `BatchExtra.validate`."""
        require(len(self.params) == len(self.places) <= len(query_lens), "log-probabilities of other rows")


@dataclass(frozen=True)
class Logprobs(RoundExtra):
    """The extra. Rounds without such requests run no other operators; those with them one more launch a round, after
    the decision, however the round itself runs."""

    def columns(self, max_rows: int) -> AskingColumns:
        """See `RoundExtra.columns`."""
        return AskingColumns(max_rows)

    def notes(self, own: BatchExtra, decision: Decision) -> torch.Tensor:
        """See `RoundExtra.notes`: columns as `specdec.requests.logprobs.of_notes` reads them.

        Takes [m·(n+1), V] float32 a few times over.
        """
        assert isinstance(own, AskingRows)
        device, (rows, width) = decision.logits.device, decision.index.shape
        places = on_device(own.places, device)
        at, tokens = decision.index[places].reshape(-1), decision.tokens[places].reshape(-1, 1)
        found = _log_probabilities(own.params, decision, at, width)
        most = min(found.shape[1], max(params.logprobs or 0 for params in own.params))
        value = found.gather(1, tokens)
        rank = (found > value).sum(1, keepdim=True)
        top = found.topk(most, dim=1)
        told = torch.cat([value, rank.float(), top.indices.float(), top.values], 1)
        notes = torch.zeros(rows, width, COLUMNS + 2 * most, device=device)
        return notes.index_copy_(0, places, told.view(len(places), width, -1))


def _log_probabilities(
    params: Sequence[SamplingParams], decision: Decision, at: torch.Tensor, width: int
) -> torch.Tensor:
    """[m·width, V] float32, of each request as it asks; at: its rows of logits."""
    processed = [row for row, own in enumerate(params) if own.logprobs_mode == "processed"]
    found = decision.logits[at].float().log_softmax(1)
    if processed:
        rows = np.concatenate([np.arange(row * width, (row + 1) * width) for row in processed])
        own = [params[row] for row in processed for _ in range(width)]
        places = on_device(rows, at.device)
        found[places] = _of_distribution(decision.adjusted[at[places]].float(), own)
    return found


def _of_distribution(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Log-probabilities of what a request samples from; of a greedy one, which has no temperature, of its logits."""
    values = SamplingArrays.of(params)
    names = ("temperature", "top_k", "top_p", "min_p")
    tensors = SamplingTensors(values.filters, *(on_device(getattr(values, name), logits.device) for name in names))
    greedy = tensors.temperature == 0
    return torch.where(greedy[:, None], logits.log_softmax(1), target_probs(logits, tensors).log())


class AskingColumns(ExtraColumns):
    """The requests of rows that ask for log-probabilities."""

    def __init__(self, max_rows: int) -> None:
        self._params: list[SamplingParams | None] = [None] * max_rows
        self.idle = True

    def open(self, table: RowTable, row: int, params: SamplingParams) -> None:
        """See `ExtraColumns.open`."""
        asks = params.logprobs is not None
        if asks and filters_of(params) is not None:  # they have been applied
            params = replace(params, top_k=0, top_p=1.0, min_p=0.0)
        self._params[row] = params if asks else None
        self.idle = self.idle and not asks

    def close(self, row: int) -> None:
        """See `ExtraColumns.close`."""
        self._params[row] = None

    def scheduled(self, table: RowTable, schedule: Schedule) -> AskingRows | None:
        """See `ExtraColumns.scheduled`."""
        decided = table.computed[schedule.rows] + schedule.num_new == table.length[schedule.rows]
        return self._asking(schedule.rows[decided])

    def after(
        self,
        table: RowTable,
        last: BatchExtra | None,
        schedule: Schedule,
        start: np.ndarray,
        num_accepted: np.ndarray,
        tokens: np.ndarray | None,
    ) -> AskingRows | None:
        """See `ExtraColumns.after`."""
        return None if last is None else self._asking(schedule.rows)

    def _asking(self, rows: np.ndarray) -> AskingRows | None:
        asking = [(j, own) for j, row in enumerate(rows) if (own := self._params[row]) is not None]
        if not asking:
            return None
        return AskingRows(tuple(own for _, own in asking), np.array([j for j, _ in asking], np.int64))
