"""docs/benchmarks.md is made from the results when the site is built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import tables
from benchmarks.bench_first_token import compared


def test_the_page_has_every_committed_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PAGE", tmp_path / "benchmarks.md")
    assert CliRunner().invoke(tables.main, []).exit_code == 0
    text = tables.PAGE.read_text("utf-8")
    names = [path.name for path in tables.RESULTS.glob("*.json*")]
    assert len(names) > 50 and [name for name in names if f"## {name}\n" not in text] == []


def test_an_unknown_kind_of_line_is_shown_and_not_dropped(tmp_path: Path) -> None:
    line = '{"benchmark": "new", "speed": 3.5, "torch": "2", "transformers": "5", "commit": "c"}\n'
    (tmp_path / "new.jsonl").write_text(line, "utf-8")
    assert "| speed | 3.5 |" in tables.page(tmp_path)


def test_a_sweep_names_the_models_that_are_not_as_they_should(tmp_path: Path) -> None:
    good = {"name": "llama", "dtype": "float32", "outcome": "exact", "reason": ""}
    bad = {"name": "odd", "dtype": "float32", "outcome": "WRONG", "reason": "a | b"}
    document = {
        "benchmark": "sweep",
        "device": "cpu",
        "counts": {"float32": {"exact": 1, "WRONG": 1}},
        "models": [good, bad],
        "torch": "2",
        "transformers": "5",
        "commit": "c",
    }
    (tmp_path / "sweep.json").write_text(json.dumps(document, indent=1), "utf-8")
    page = tables.page(tmp_path)
    assert "| float32 | exact | 1 |  |" in page
    assert "| float32 | WRONG | 1 | odd: a / b |" in page


_LOAD = {"shape": "s", "drafts": 3, "prompt": [64, 1024], "sampled_share": 0.5, "rate": 0.0, "entropy": 1.0}
_WHERE = {"torch": "2", "transformers": "5", "commit": "c"}


def test_workloads_and_interference_are_tables(tmp_path: Path) -> None:
    times = {f"{name}_ms_{q}": 7.0 for name in ("first_token", "update", "token") for q in ("median", "p99")}
    served = {"benchmark": "serving", "output": [32, 384], "requests": 128, "at_once": 32} | _LOAD | _WHERE | times
    served |= {"output_tokens_per_s": 4733.2, "total_tokens_per_s": 9000.0}
    beside = {"benchmark": "interference", "rows": 16, "arriving": [1024, 32], "arrived_per_s": 9.0} | _LOAD | _WHERE
    beside |= {"alone": times, "beside": times, "update_p99_over_alone": 2.5, "token_p99_over_alone": 2.25}
    shared = served | {"shared_prefix": 2048, "prefix_caching": True}
    lines = (served, shared, shared | {"prefix_caching": False}, beside)
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)), "utf-8")
    page = tables.page(tmp_path)
    assert "| 64–1024 behind 2048 cached | 50%, 1 nat |" in page and "| 64–1024 behind 2048 not cached | 50%" in page
    assert "| 64–1024 | 50%, 1 nat |  | 32–384 | 128, 32 | 4,733 | 9,000 | 7.00, 7.00 |" in page
    assert "| update | 7.00 | 7.00 | 7.00 | 2.50 |" in page and "| token | 7.00 | 7.00 | 7.00 | 2.25 |" in page


def test_matmuls_in_fp8_before_and_after_splits(tmp_path: Path) -> None:
    """Lines without a sweep, and of a commit whose tilings had no splits."""
    old = {"tokens": 16, "rows": 64, "weight_first": True, "warps": 4, "stages": 8}
    new = old | {"rows": 128, "weight_first": False, "at_once": 2, "splits": 5}
    line = {"benchmark": "fp8", "rows": 4096, "width": 14336, "tokens": 8, "chosen": old, "us": 37.25} | _WHERE
    line |= {"floor_us": 13.75, "quantise_us": 1.0, "bf16_us": 33.25}
    swept = line | {"chosen": new, "best": [[17.0, new], [18.0, old]]}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps(swept)}\n", "utf-8")
    page, first = tables.page(tmp_path), "16 x 64, weight first, 4 warps, 8 stages"
    last = "16 x 128, weight last, 4 warps, 8 stages of 2 blocks, 5 splits"
    assert f"| 4096 x 14336 | 8 | 37.2 | {first} |  |  | 13.8 | 33.2 | 1.0 |" in page
    assert f"| 37.2 | {last} | 17.0 | {last} | 13.8 |" in page


def test_sampled_rounds_say_so(tmp_path: Path) -> None:
    line = {"benchmark": "round", "shape": "s", "drafts": 3, "rows": 8, "step_ms_median": 2.0, "floor_ms": 1.0} | _WHERE
    line |= {"tokens_per_s": 5.0, "sampled": True, "greedy_share": 0.5, "entropy": 1.0}
    (tmp_path / "a.jsonl").write_text(json.dumps(line), "utf-8")
    assert "| 8 sampled, 50.0% greedy, 1 nat |" in tables.page(tmp_path)


def test_a_start_is_shown_step_by_step(tmp_path: Path) -> None:
    cold = {"steps": {"compiling": 20.0}, "first_greedy_s": 0.5, "first_sampled_s": 0.25, "start_s": 21.0}
    cold |= {"workload_first": {"longest_ms": [90.0, 50.0]}}
    warm = cold | {"steps": {"reading": 4.0}, "start_s": 5.0}
    line = {"benchmark": "start", "shape": "tiny", "drafts": 3, "rows": 2, "cold": cold, "warm": warm}
    (tmp_path / "start.jsonl").write_text(
        json.dumps(line | {"torch": "2", "transformers": "5", "machine": "x", "commit": "c"})
    )
    text = tables.page(tmp_path)
    for row in ("compiling | 20.00 |  |", "reading |  | 4.00 |", "there | 21.00 | 5.00 |", "workload | 0.09 | 0.09 |"):
        assert row in text


def test_first_tokens_are_a_table(tmp_path: Path) -> None:
    one = {"wall_s": 2.0, "cpu_s": 1.5, "peak_mib": 1024.0, "import_cpu_s": 1.0}
    results = compared({"transformers": [one] * 3, "second": [one | {"wall_s": wall} for wall in (9.0, 3.0, 1.0)]})
    line = {
        "benchmark": "first_token",
        "model": "tiny",
        "dtype": "float32",
        "results": results,
        "machine": "x",
    } | _WHERE
    (tmp_path / "a.jsonl").write_text(json.dumps(line), "utf-8")
    assert "| tiny, float32 | second | 3.00 | 1.50 | 1.00 | 1,024 | 1.50, 1.00, 1.00 |" in tables.page(tmp_path)


def test_rounds_with_requests_waiting_are_a_table(tmp_path: Path) -> None:
    result = {"waiting": 1000, "rows": 32, "ended_per_round": 7.9, "p50_us": 4000.5, "p99_us": 6000.0}
    line = {"benchmark": "host_queue", "results": [result | {"abort_us_per_request": 2.5}], "machine": "x"} | _WHERE
    (tmp_path / "a.json").write_text(json.dumps(line), "utf-8")
    assert "| 1,000 | 32 | 7.9 | 4,000.5 | 6,000.0 | 2.5 |" in tables.page(tmp_path)
