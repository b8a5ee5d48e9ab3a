"""docs/models.md is made from the sweep's results, names every type, and counts what it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import models_page
from benchmarks.sweep_configs import all_cases

BAD = ("WRONG", "UNNAMED EXCEPTION", "CRASHED", "TIMED OUT")


def test_the_committed_page_is_what_the_sweep_found() -> None:
    assert CliRunner().invoke(models_page.main, ["--check"]).exit_code == 0


def test_an_edited_page_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edited = tmp_path / "models.md"
    edited.write_text(models_page.page(models_page.newest()).replace("| `llama` | exact |", "| `llama` | refused |"))
    monkeypatch.setattr(models_page, "PAGE", edited)
    done = CliRunner().invoke(models_page.main, ["--check"])
    assert done.exit_code == 1 and "python -m benchmarks.models_page" in done.output


@pytest.mark.slow
def test_the_results_name_every_case_and_none_is_wrong() -> None:
    """Every type of the installed transformers, where it is the one that was swept."""
    import transformers

    document = json.loads(models_page.newest().read_text("utf-8"))
    rows = [row for row in document["models"] if row["dtype"] == "float32"]
    assert not [row["name"] for row in rows if models_page.class_of(row) in BAD]
    assert all(row.get("reason") for row in rows if row["outcome"] in ("refused", "not built", "exact, limited"))
    if document["provenance"]["transformers"] == transformers.__version__:
        assert {row["name"] for row in rows} == {case.name for case in all_cases()}
    plain = models_page.sections(rows)["Causal language models"]
    exact = [row for row in plain if models_page.class_of(row).startswith("exact") and not row.get("recurrent")]
    assert len(exact) >= 106


def test_a_row_says_its_class_its_limit_and_its_reason(tmp_path: Path) -> None:
    rows = [
        {"name": "a", "dtype": "float32", "outcome": "exact", "recurrent": True},
        {
            "name": "b: odd",
            "dtype": "float32",
            "outcome": "exact, limited",
            "limit": 32,
            "reason": "InvalidInputError: x",
        },
        {
            "name": "c (wrapper)",
            "dtype": "float32",
            "outcome": "refused",
            "reason": "UnsupportedModelError: CModel is | odd",
        },
        {"name": "D", "dtype": "float32", "outcome": "WRONG", "reason": "1 answer"},
        {"name": "a", "dtype": "bfloat16", "outcome": "near ties"},
    ]
    path = tmp_path / "sweep-transformers-5.9.json"
    path.write_text(json.dumps({"transformers": "5.9", "commit": "c", "models": rows}))
    (tmp_path / "sweep-transformers-5.10.json").write_text(path.read_text())
    assert models_page.newest(tmp_path).name == "sweep-transformers-5.10.json"
    page = models_page.page(path)
    assert "| `a` | exact | recurrent |" in page
    assert "| `b: odd` | exact with limits | up to 32 tokens in miniature; x |" in page
    assert "| `c` | refused | is / odd |" in page
    assert "| `D` | WRONG | 1 answer |" in page
    assert "| Causal language models | 1 | 0 | 0 | 0 | 0 | 1 |" in page
    assert "| … without recurrent ones | 0 | 0 | 0 | 0 | 0 | 0 |" in page
