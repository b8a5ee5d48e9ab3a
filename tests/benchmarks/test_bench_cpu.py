"""What bench_cpu asks, in which order, and what an interrupted run keeps."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
import pytest

from benchmarks.bench_cpu import kept, measure, work_of
from benchmarks.cpu_arms import Arm, Outcome, Prompts
from benchmarks.cpu_results import BATCH, Record

PROMPTS = {"qa": [[1], [2]], "rag": [[3], [4]], "quoting": [[5], [6]]}


def arm(name: str, rows: int = 1) -> Arm:
    def run(prompts: Prompts) -> Outcome:
        return Outcome(prompts, 2.0, 1.0, len(prompts))

    return Arm(name, rows, run)


def test_batches_are_of_all_categories_but_quoting() -> None:
    work = work_of(PROMPTS, 2)
    assert work["quoting"] == [{"quoting 0": [5]}, {"quoting 1": [6]}]
    assert work[BATCH] == [{"qa 0": [1], "rag 0": [3]}, {"qa 1": [2], "rag 1": [4]}]
    assert BATCH not in work_of(PROMPTS, 1) and BATCH not in work_of(PROMPTS, 5)


def test_arms_take_turns_and_another_begins_each_turn() -> None:
    arms = [arm("a"), arm("b"), arm("c"), arm("a", rows=2)]
    found = list(measure(arms, work_of({"qa": [[1], [2]]}, 2), 2, []))
    assert [(r.turn, *r.asked, r.arm) for r in found if r.asked == ("qa 0",)] == [
        *((0, "qa 0", name) for name in "abc"),
        *((1, "qa 0", name) for name in "bca"),
    ]
    assert [(r.arm, r.answers) for r in found if r.category == BATCH] == [("a", [[1], [2]])] * 2


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    file, setting, work = tmp_path / "kept.jsonl", {"new": 8, "dtype": "float32"}, work_of(PROMPTS, 1)
    arms = [arm("a"), arm("b")]
    assert kept(None, setting) == kept(file, setting) == []
    whole = list(measure(arms, work, 2, []))
    with file.open("a") as lines:
        lines.writelines(json.dumps(asdict(record)) + "\n" for record in whole[:7])
    done = kept(file, setting)
    assert done == whole[:7] and all(type(record) is Record for record in done)
    assert list(measure(arms, work, 2, done)) == whole[7:]
    with pytest.raises(click.UsageError, match="another new"):
        kept(file, setting | {"new": 9})
