"""The host benchmark runs on the code as it is, and ends in one JSON line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.bench_host import main, measure_queue, queue_engine


@pytest.mark.long
def test_it_ends_in_one_json_line_with_versions(tmp_path: Path) -> None:
    out = tmp_path / "host.json"
    options = ["--rounds", "1", "--queue", "2", "--queue", "5", "--out", str(out)]
    done = CliRunner().invoke(main, options, catch_exceptions=False)
    document = json.loads(done.output.splitlines()[-1])
    assert document == json.loads(out.read_text("utf-8")) and document["benchmark"] == "host_queue"
    assert [result["waiting"] for result in document["results"]] == [2, 5]
    assert all(0 < result["p50_us"] <= result["p99_us"] for result in document["results"])
    assert {"python", "numpy", "torch", "commit"} <= document.keys()


@pytest.mark.slow
def test_rounds_with_requests_waiting() -> None:
    """The queue keeps its length while rows end, and nothing is left."""
    engine = queue_engine()
    found = measure_queue(engine, waiting=20, rounds=3)
    assert found["ended_per_round"] > 4 and 0 < found["p50_us"] <= found["p99_us"] and not engine.has_work
