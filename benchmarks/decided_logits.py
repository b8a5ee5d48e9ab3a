"""The logits that an engine's own rounds decided by, at every position of every answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from specdec import SpeculativeModel
from specdec.acceptance.judge import judge, judge_from_loop
from specdec.acceptance.packed import Outcome, PackedResult
from specdec.engine.launcher import LaunchedRound, Lookahead, VerifyingRound
from specdec.execution.base import ChainedVerification
from specdec.execution.graphs import GraphExecutor
from specdec.execution.ragged import RaggedTarget

_before_read = Lookahead.before_read

Logits = dict[tuple[int, int], torch.Tensor]
"""(request id, position of the token that is decided) -> [V] on the CPU, in the model's dtype."""


@contextmanager
def recorded_logits(model: SpeculativeModel) -> Iterator[Logits]:
    """Collect the logits of every token that is generated inside. Rounds are not launched before the read meanwhile:
    the logits of a round must still be there when its result is read."""
    engine, executor, reads = model.engine, model.executor, model.executor.reads
    found: Logits = {}
    recorded: dict[str, torch.Tensor] = {}
    ragged, plain = RaggedTarget.logits, judge_from_loop

    def judging(logits: torch.Tensor, round_: Any, draft: Any, vocab: Any) -> PackedResult:
        recorded["logits"] = logits[round_.logit_index]  # [J, n+1, V]
        return judge(logits, round_, draft, vocab)

    def of_any_shape(self: Any, *args: Any) -> torch.Tensor:
        recorded["rows"] = ragged(self, *args)  # [R', V]
        return recorded["rows"]

    def judging_greedy(greedy: torch.Tensor, round_: Any, draft: Any) -> PackedResult:
        recorded["logits"] = recorded["rows"][round_.logit_index]
        return plain(greedy, round_, draft)

    def record(outcome: Outcome, num_drafts: np.ndarray) -> Outcome:
        current = engine.inflight
        assert isinstance(current, VerifyingRound)
        logits = executor.logits_of(current.device) if isinstance(executor, GraphExecutor) else None
        logits = recorded["logits"] if logits is None else logits
        target = current.target
        first = (target.start + target.num_new)[target.decided]
        by_row = {request.row: request for request in engine.scheduler.running}
        for j, row in enumerate(current.schedule.rows[target.decided].tolist()):
            request = by_row.get(row)
            if request is None:
                continue
            count = int(outcome.num_accepted[j]) + 1
            for i, decided in enumerate(logits[j, :count].cpu()):
                found[request.id, int(first[j]) + i] = decided
        return outcome

    with (
        patch("specdec.execution.eager.judge", judging),
        patch.object(RaggedTarget, "logits", of_any_shape),
        patch("specdec.execution.graphs.judge_from_loop", judging_greedy),
        patch.object(Lookahead, "before_read", _not_chained),
        patch.object(reads, "after_read", record),
    ):
        yield found


def _not_chained(lookahead: Lookahead, current: VerifyingRound) -> LaunchedRound | None:
    """`Lookahead.before_read` without the next verification, which would write over the logits of the one in flight."""
    return None if isinstance(current.verification, ChainedVerification) else _before_read(lookahead, current)
