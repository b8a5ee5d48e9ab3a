"""A toy extra, registered from outside: a bias on one token, which follows from all tokens before it, drafts included.

The favoured token is (a · sum of all tokens + b) mod V. It has each part that an extra may have: columns of a row, an
array that is sent (in any shape, and to the fixed places of captured graphs), the array of a round launched ahead of
its commit, and a change of the logits by the drafts that only the device knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic

import numpy as np
import torch
from fakes import LetterTokenizer
from transformers import LogitsProcessor

from attention.batch.host import BatchExtra
from attention.batch.metadata import ExtraSection, MakeSection
from attention.checking import require
from attention.staging import A, array
from specdec.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.execution.base import Drafter, Executor
from specdec.execution.eager import EagerExecutor
from specdec.requests.sampling import SamplingParams
from specdec.rounds.buckets import loop_limits
from specdec.rounds.extras import RoundExtra, drafted_prefixes
from specdec.rounds.rows import ExtraColumns, RowTable, Schedule
from specdec.rounds.transfer import DeviceRound

FACTOR, SHIFT = 7, 3


def favoured(total: Any, vocab_size: int) -> Any:
    """The token that has the bias after tokens of this sum."""
    return (total * FACTOR + SHIFT) % vocab_size


@dataclass(frozen=True)
class Sums(Generic[A]):
    """base: [B] int64, the sum of each row's tokens before its last committed one."""

    base: A = array(np.int64, "rows")
    what: ClassVar[str] = "toy sums"

    def validate(self, query_lens: np.ndarray) -> None:
        require(len(self.base) == len(query_lens), "a sum for each row")  # type: ignore[arg-type]


@dataclass(frozen=True)
class ToyBias(RoundExtra):
    """The extra. ignores_drafts: a planted defect."""

    strength: float
    ignores_drafts: bool = False

    def columns(self, max_rows: int) -> SumColumns:
        return SumColumns(max_rows)

    def section(self, fixed: bool) -> MakeSection:
        return partial(ExtraSection, Sums, "toy")

    def adjust(self, logits: torch.Tensor, round_: DeviceRound) -> torch.Tensor:
        sums, before = round_.metadata.extra(Sums), drafted_prefixes(round_)
        assert sums is not None
        there = before.there & (torch.arange(before.there.shape[1]) == 0) if self.ignores_drafts else before.there
        total = sums.base[before.owner] + (before.token_ids * there).sum(1)
        place = favoured(total, logits.shape[1])[:, None]
        return logits.scatter_add(1, place, torch.full_like(place, 1, dtype=logits.dtype) * self.strength)


class SumColumns(ExtraColumns):
    """Of each row the sum of its first tokens, those that were read."""

    def __init__(self, max_rows: int) -> None:
        self.count, self.total = np.zeros(max_rows, np.int64), np.zeros(max_rows, np.int64)

    def open(self, table: RowTable, row: int, params: SamplingParams) -> None:
        self.count[row] = table.computed[row]
        self.total[row] = table.tokens[row, : table.computed[row]].sum()

    def scheduled(self, table: RowTable, schedule: Schedule) -> Sums[np.ndarray]:
        base = []
        for row, new in zip(schedule.rows, schedule.num_new, strict=True):
            first = self.count[row]
            base.append(self.total[row] + table.tokens[row, first : first + new - 1].sum())
        return Sums(np.array(base, np.int64))

    def after(
        self,
        table: RowTable,
        last: BatchExtra | None,
        schedule: Schedule,
        start: np.ndarray,
        num_accepted: np.ndarray,
        tokens: np.ndarray | None,
    ) -> Sums[np.ndarray]:
        assert isinstance(last, Sums)
        bonus = table.tokens[schedule.rows, start - num_accepted - 1]
        accepted = 0 if tokens is None else (tokens * (np.arange(tokens.shape[1]) < num_accepted[:, None])).sum(1)
        return Sums(last.base + bonus + accepted)

    def commit(
        self, table: RowTable, rows: np.ndarray, committed: BatchExtra | None, notes: Sequence[np.ndarray]
    ) -> None:
        for row in rows:
            self.total[row] += table.tokens[row, self.count[row] : table.computed[row]].sum()
        self.count[rows] = table.computed[rows]


class ToyProcessor(LogitsProcessor):
    """The same in transformers' generate."""

    def __init__(self, strength: float) -> None:
        self.strength = strength

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        biased = scores.clone()
        biased[:, favoured(int(input_ids.sum()), scores.shape[1])] += self.strength
        return biased


def with_extra(wrapped: Any, extra: RoundExtra, graphs: bool = False, eos: tuple[int, ...] = ()) -> Engine:
    """An engine of a wrapped model's parts that has one more extra."""
    extras = (*wrapped.config.extras, extra)
    config: EngineConfig = EngineConfig(**vars(wrapped.config) | {"extras": extras})
    drafter = None
    if wrapped.head is not None:
        drafter = Drafter(wrapped.head, wrapped.head.draft_loop(loop_limits(config)), wrapped.runners[-1])
    executor: Executor = EagerExecutor(wrapped.target, drafter, config)
    if graphs:
        from specdec.execution.graphs import GraphExecutor

        executor = GraphExecutor(wrapped.target, drafter, config)
        executor.capture()
    return Engine(wrapped.target, drafter, LetterTokenizer(), config, eos, executor)
