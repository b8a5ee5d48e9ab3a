"""Tables of evaluations; the committed ones are tested by test_tables.py."""

from __future__ import annotations

import doctest

import benchmarks.evaluation_tables
from benchmarks.evaluation_tables import accuracy_grid


def test_the_examples_in_the_docstrings() -> None:
    outcome = doctest.testmod(benchmarks.evaluation_tables)
    assert outcome.failed == 0 and outcome.attempted == 1


def test_a_grid_shows_what_is_refused_and_what_differs() -> None:
    row = {"model": "m", "backend": "b", "arm": "K=5", "task": "t", "filter": "f", "total": 9, "right_b": 4}
    row |= {"reference": False, "only_a": 1, "only_b": 2, "p_value": 0.25}
    _, first, other = accuracy_grid({"rows": [row, {"model": "m", "backend": "c", "refused": "why"}]})
    assert first == ["m", "b", "K=5", "t, f", "4 of 9", "2, 1", "0.250"]
    assert other[2] == "refused: why"
