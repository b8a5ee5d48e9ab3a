"""Medians, ratios and bounds of bench_cpu, from seconds that are known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.cpu_results import (
    ALL,
    BATCH,
    K0,
    LLAMA,
    LOOKUP,
    PROMPT_LOOKUP,
    TRANSFORMERS,
    Record,
    bounds,
    main,
    results,
    table,
)

SECONDS = {TRANSFORMERS: 4.0, PROMPT_LOOKUP: 3.0, K0: 2.0, LOOKUP: 1.0}


def records(turns: int = 3) -> list[Record]:
    found = []
    for turn in range(turns):
        slower = (1 + turn) ** 2  # of one turn, for all arms: ratios in a turn do not see it
        for category in ("qa", "rag", "quoting"):
            for arm, wall in SECONDS.items():
                answer = [7, 8, 9] if arm != LOOKUP else [7, 8, 0]
                spent = wall * slower, wall * slower / 2
                found.append(Record(turn, category, (f"{category} 0",), arm, *spent, 2, [answer]))
        for arm, wall in ((K0, 1.0), (LLAMA, 4.0)):
            found.append(Record(turn, BATCH, ("qa 0", "rag 0"), arm, wall, wall, None, [[7, 8, 9], [7, 1, 1]]))
    return found


def test_seconds_are_medians_and_ratios_are_of_one_turn() -> None:
    found = {(line["category"], line["arm"]): line for line in results(records())}
    lookup = found[ALL, LOOKUP]
    assert (lookup["wall_s"], lookup["cpu_s"], lookup["turns"], lookup["tokens_per_round"]) == (8.0, 4.0, 3, 1.5)
    assert (lookup["tokens_per_s"], lookup["tokens_per_cpu_s"]) == (0.75, 1.5)
    assert (lookup["to_transformers"], lookup["to_K0"], lookup["to_llama"]) == ([0.25, 0.25], [0.5, 0.5], None)
    assert (lookup["answers"], lookup["equal"], lookup["part_after"]) == (2, 0, 2)
    assert found["qa", K0]["equal"] == 1 and found["qa", K0]["repeated"]
    batch = found[BATCH, K0]
    assert (batch["equal"], batch["answers"], batch["part_after"], batch["to_llama"]) == (1, 2, 2, [0.25, 0.25])


def test_an_answer_that_changes_from_turn_to_turn_is_seen() -> None:
    changed = Record(3, "qa", ("qa 0",), K0, 1.0, 1.0, 2, [[7, 8, 1]])
    found = {(line["category"], line["arm"]): line["repeated"] for line in results([*records(), changed])}
    assert not found["qa", K0] and not found[ALL, K0] and found["rag", K0]


def test_bounds_are_met_by_wall_and_cpu_seconds() -> None:
    found = {(line["category"], line["arm"], line["over"]): line for line in bounds(records())}
    assert found[ALL, K0, TRANSFORMERS]["measured"] == [0.5, 0.5] and found[ALL, K0, TRANSFORMERS]["met"]
    assert {key[0] for key in found if key[1:] == (LOOKUP, K0)} == {ALL, "qa", "rag", "quoting"}
    assert found[BATCH, K0, LLAMA]["met"] and len(found) == 9
    missed = bounds([replace(record, cpu_s=9.0) if record.arm == K0 else record for record in records()])
    assert not next(line for line in missed if (line["arm"], line["over"]) == (K0, TRANSFORMERS))["met"]


def test_the_table_has_a_row_for_each_arm() -> None:
    lines = table({"results": results(records()), "dtype": "float32"}).splitlines()
    assert lines[0] == "| float32 | tokens a forward | all | qa | rag | quoting | batch |"
    assert f"| {LOOKUP} | 1.50 | 0.8 | 0.8 | 0.8 | 0.8 |  |" in lines
    assert f"| {LLAMA} |  |  |  |  |  | 1.5 |" in lines


def test_missed_bounds_are_printed(tmp_path: Path) -> None:
    slow = [replace(record, wall_s=9.0) if record.arm == LOOKUP else record for record in records(1)]
    found = {"threads": 2, "rows": 2, "dtype": "float32", "results": results(slow), "bounds": bounds(slow)}
    (tmp_path / "a.jsonl").write_text(json.dumps(found))
    text = CliRunner().invoke(main, [str(tmp_path / "a.jsonl")]).stdout
    assert "2 threads, batches of 2" in text and text.count("missed") == 7
    assert f"missed: qa, {LOOKUP} over {K0}: [4.5, 0.5], at most 1.02" in text


def test_turns_without_a_base_have_no_ratio() -> None:
    alone = [record for record in records() if record.arm == LOOKUP]
    with pytest.raises(KeyError):
        results(alone)  # nothing to compare answers with
    assert bounds(alone) == []
