"""The table of a start: every step of both starts, those that only one of them had included."""

from __future__ import annotations

from benchmarks.bench_start import table

WHOLE = dict.fromkeys(("imports_s", "from_pretrained_s", "first_greedy_s", "first_sampled_s"), 1.0)


def test_every_step_of_either_start_has_a_row() -> None:
    cold = {"steps": {"compiling": 40.0, "waiting for fa3": 7.25}, "start_s": 61.0, **WHOLE}
    warm = {"steps": {"compiling": 12.5}, "start_s": 15.0, **WHOLE}
    rows = {
        line.rsplit(maxsplit=2)[0].strip(): line.split()[-2:]
        for line in table({"cold": cold, "warm": warm}).splitlines()
    }
    assert rows["seconds"] == ["cold", "warm"] and rows["compiling"] == ["40.00", "12.50"]
    assert rows["waiting for fa3"] == ["7.25", "0.00"] and rows["start"] == ["61.00", "15.00"]
