"""The logits that an engine's own rounds decided by, at every position of every answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from specdec import SpeculativeModel
from specdec.acceptance.packed import Outcome
from specdec.execution.eager import EagerExecutor

Logits = dict[tuple[int, int], torch.Tensor]
"""(request id, position of the token that is decided) -> [V] on the CPU, in the model's dtype."""


@contextmanager
def recorded_logits(model: SpeculativeModel) -> Iterator[Logits]:
    """Collect the logits of every token that is generated inside. Rounds are not launched ahead meanwhile: the logits
    of a round must still be there when its verdict is read."""
    engine: Any = model._engine
    found: Logits = {}
    judged: dict[str, Any] = {}
    judge, read = EagerExecutor.judge, engine._read

    def judging(self: Any, logits: torch.Tensor, round_: Any, draft: Any) -> torch.Tensor:
        judged["logits"] = logits[round_.logit_index]  # [J, n+1, V]
        return judge(self, logits, round_, draft)

    def reading(packed: np.ndarray, num_drafts: np.ndarray) -> Outcome:
        outcome = read(packed, num_drafts)
        inflight = engine._inflight
        logits = _of_graph(model.executor, inflight.device, len(num_drafts))
        logits = judged["logits"] if logits is None else logits
        target = inflight.target
        first = (target.start + target.num_new)[target.judged]
        for j, request in enumerate(engine._owners()):
            if request is None:
                continue
            count = int(outcome.num_accepted[j]) + 1
            for i, row in enumerate(logits[j, :count].cpu()):
                found[request.id, int(first[j]) + i] = row
        return outcome

    with (
        patch.object(EagerExecutor, "judge", judging),
        patch.object(engine, "_read", reading),
        patch.object(engine, "_foresees", False),
    ):
        yield found


def _of_graph(executor: Any, round_: Any, count: int) -> torch.Tensor | None:
    """[J, K+1, V] of a greedy round that ran from a graph; None of any other."""
    if getattr(round_, "rows", None) is None or round_.sampled:
        return None
    bucket = executor._buckets[round_.rows]
    return bucket.logits[bucket.logit_index[:count]]
