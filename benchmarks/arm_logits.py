"""The logits that an engine's own rounds decided by, at every position of every answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from specdec import SpeculativeModel
from specdec.acceptance.packed import Outcome, PackedVerdict
from specdec.execution.eager import EagerExecutor
from specdec.execution.graphs import GraphExecutor

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

    def judging(self: Any, logits: torch.Tensor, round_: Any, draft: Any) -> PackedVerdict:
        judged["logits"] = logits[round_.logit_index]  # [J, n+1, V]
        return judge(self, logits, round_, draft)

    def reading(packed: np.ndarray, num_drafts: np.ndarray) -> Outcome:
        outcome = read(packed, num_drafts)
        inflight = engine._inflight
        executor, round_ = model.executor, inflight.device
        logits = executor.logits_of(round_) if isinstance(executor, GraphExecutor) else None
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
