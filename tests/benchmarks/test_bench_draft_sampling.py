"""Tau of the draft-sampling benchmark: pooled like everywhere else, and an interval where requests have no rounds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import bench_draft_sampling as bench
from specdec.requests.stats import RequestStats, RoundRecord, pool_requests

ROOT = Path(__file__).resolve().parent.parent.parent


def completions(*rounds: list[int]) -> list[Any]:
    """Requests by the tokens that each of their rounds emitted, of K=3."""
    return [SimpleNamespace(stats=RequestStats(tuple(RoundRecord(3, n - 1, n) for n in own))) for own in rounds]


def test_tau_is_that_of_the_pooled_requests_within_its_interval() -> None:
    done = completions([4, 4, 3], [1, 2], [2, 3, 4, 1], [4])
    found = bench.tau(done, 3)
    assert found["tau"] == pool_requests([each.stats for each in done]).tau
    assert 1 <= found["low"] < found["tau"] < found["high"] <= 4


def test_requests_without_rounds_leave_the_interval_finite() -> None:
    """Of three questions two ended with the token of the prompt pass: nearly a third of the resamples has no rounds."""
    found = bench.tau(completions([3, 4], [], []), 3)
    assert all(map(math.isfinite, found.values()))
    assert found == {"tau": 3.5, "low": 3.5, "high": 3.5}


def test_the_committed_result_has_the_fields_that_it_writes() -> None:
    document = json.loads((ROOT / "benchmarks" / "results" / "draft_sampling.json").read_text("utf-8"))
    own = {"draft_sampling", "temperature", "top_p", *bench.tau(completions([2], [3]), 3)}
    assert document["lines"] and all(set(line) == own for line in document["lines"])
