"""docs/benchmarks.md is made from the results, and a page that differs is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import tables


def test_the_committed_page_is_what_the_results_say() -> None:
    assert CliRunner().invoke(tables.main, ["--check"]).exit_code == 0


def test_an_edited_page_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edited = tmp_path / "benchmarks.md"
    edited.write_text(tables.page().replace("5.54", "4.54"), "utf-8")
    monkeypatch.setattr(tables, "PAGE", edited)
    done = CliRunner().invoke(tables.main, ["--check"])
    assert done.exit_code == 1
    assert "python -m benchmarks.tables" in done.output


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
