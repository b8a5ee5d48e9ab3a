"""The host benchmark runs on the code as it is, and ends in one JSON line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bench_host import measure_queue, queue_engine

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.long
def test_it_ends_in_one_json_line_with_versions(tmp_path: Path) -> None:
    out = tmp_path / "host.json"
    command = [sys.executable, "-m", "benchmarks.bench_host", "--rounds", "1", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    document = json.loads(done.stdout.splitlines()[-1])
    assert document == json.loads(out.read_text("utf-8"))
    sizes = {(result["rows"], result["num_speculative_tokens"]) for result in document["results"]}
    assert sizes == {(rows, drafts) for rows in (1, 8, 64, 256) for drafts in (3, 5)}
    ways = {(result["groups"], result["graphs"]) for result in document["results"]}
    assert ways == {(1, False), (2, False), (1, True), (2, True)} and len(document["results"]) == 4 * len(sizes)
    assert all(0 < result["p50_us"] <= result["p99_us"] for result in document["results"])
    assert {"python", "numpy", "torch", "commit"} <= document.keys()


@pytest.mark.slow
def test_rounds_with_requests_waiting() -> None:
    """The queue keeps its length while rows end, and nothing is left."""
    engine = queue_engine()
    found = measure_queue(engine, waiting=20, rounds=3)
    assert found["ended_per_round"] > 4 and 0 < found["p50_us"] <= found["p99_us"] and not engine.has_work
