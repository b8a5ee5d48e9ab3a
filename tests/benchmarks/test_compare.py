"""The comparison of two result files: slower, noisy and missing cases all fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.compare import Comparison, Sample, main


def write(path: Path, runs: dict[int, list[float]]) -> str:
    lines = [
        json.dumps(
            {"benchmark": "round", "shape": "x", "drafts": 5, "rows": rows, "step_ms_runs": values, "commit": "c"}
        )
        for rows, values in runs.items()
    ]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("new", "code", "says"),
    [
        ({1: [5.00, 5.01, 5.02]}, 0, "ok"),
        ({1: [5.20, 5.21, 5.22]}, 1, "slower"),
        ({1: [4.5, 5.0, 5.5]}, 1, "not measured well enough"),
        ({1: [5.0]}, 1, "not measured well enough"),
        ({2: [5.00, 5.01, 5.02]}, 1, "in one file only"),
    ],
)
def test_verdicts(new: dict[int, list[float]], code: int, says: str, tmp_path: Path) -> None:
    old = write(tmp_path / "old.jsonl", {1: [5.00, 5.01, 5.02]})
    done = CliRunner().invoke(main, [old, write(tmp_path / "new.jsonl", new)])
    assert done.exit_code == code
    assert says in done.output


def test_files_without_the_metric_are_no_success(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"benchmark": "round"}\n', "utf-8")
    done = CliRunner().invoke(main, [str(file), str(file)])
    assert done.exit_code == 1 and "no line has step_ms_runs" in done.output


def test_lines_of_one_case_are_its_samples(tmp_path: Path) -> None:
    line = json.dumps({"benchmark": "round", "rows": 1, "step_ms_median": 5.0})
    file = tmp_path / "a.jsonl"
    file.write_text(f"{line}\n{line}\n", "utf-8")
    done = CliRunner().invoke(main, [str(file), str(file)])
    assert done.exit_code == 0 and "(2)" in done.output


def test_the_error_of_a_ratio() -> None:
    row = Comparison("", Sample((1.0, 3.0)), Sample((4.0, 4.0)))
    assert row.ratio == 2.0
    assert row.ratio_error == pytest.approx(2.0 * (1.0 / 2.0))
