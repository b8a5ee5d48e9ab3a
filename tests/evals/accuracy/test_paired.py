"""The interval of a paired difference of proportions, and McNemar's test, against numbers worked by hand."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("lm_eval")

from evals.accuracy.accuracy import paired_accuracy


def test_a_worked_interval() -> None:
    """100 questions, 12 right in a alone and 5 in b alone: Agresti and Min add half a question to each cell."""
    a = [True] * 12 + [False] * 5 + [True] * 60 + [False] * 23
    b = [False] * 12 + [True] * 5 + [True] * 60 + [False] * 23
    found = paired_accuracy(a, b)
    assert (found["total"], found["right_a"], found["right_b"], found["only_a"], found["only_b"]) == (
        100,
        72,
        65,
        12,
        5,
    )
    assert found["difference"] == pytest.approx(-0.07)
    cells = (12 + 0.5, 5 + 0.5)
    shift, n = (cells[1] - cells[0]) / 102, 102
    error = math.sqrt((sum(cells) / n - shift**2) / n)
    assert found["low"] == pytest.approx(shift - 1.95996 * error, abs=1e-5)
    assert found["high"] == pytest.approx(shift + 1.95996 * error, abs=1e-5)
    tail = sum(math.comb(17, k) for k in range(6)) / 2**17
    assert found["p_value"] == pytest.approx(2 * tail)


def test_without_a_difference_there_is_nothing_to_test() -> None:
    found = paired_accuracy([True, False], [True, False])
    assert found["p_value"] is None and found["difference"] == 0 and found["low"] < 0 < found["high"]
