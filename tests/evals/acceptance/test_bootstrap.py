"""Intervals by resampling: as wide, on both sides, as the normal approximation says where that is right."""

from __future__ import annotations

import numpy as np
import pytest

from evals.acceptance.metrics import Metric
from evals.acceptance.summary import LEVEL, Resampling

MEAN = Metric("mean", "mean", "of a column", ("total",), ("questions",))
QUESTIONS, DRAWS = 200, 8_000


def columns(values: np.ndarray) -> dict[str, np.ndarray]:
    return {"total": values, "questions": np.ones(len(values))}


def z_scores(low: float, estimate: float, high: float, error: float) -> list[float]:
    """How many standard errors the ends of an interval lie from its estimate."""
    return [(low - estimate) / error, (high - estimate) / error]


def test_both_ends_of_an_interval_leave_out_as_much() -> None:
    """95 % lie within 1.96 standard errors; a quantile of 5 % in place of 2.5 % would stand at -1.64."""
    assert LEVEL == 0.95
    values = np.random.default_rng(0).normal(5.0, 2.0, QUESTIONS)
    found = Resampling(QUESTIONS, seed=1, draws=DRAWS).value(MEAN, columns(values))
    assert found.estimate == pytest.approx(values.mean())
    error = values.std() / QUESTIONS**0.5
    assert z_scores(found.low, found.estimate, found.high, error) == pytest.approx([-1.96, 1.96], abs=0.1)


def test_a_difference_is_taken_question_by_question() -> None:
    """Two configurations that differ by a tenth of what questions differ by: paired, that alone is the error."""
    rng = np.random.default_rng(2)
    left = rng.normal(5.0, 2.0, QUESTIONS)
    right = left + rng.normal(0.5, 0.2, QUESTIONS)
    found = Resampling(QUESTIONS, seed=1, draws=DRAWS).difference(MEAN, columns(left), columns(right))
    assert found.estimate == pytest.approx((right - left).mean())
    error = (right - left).std() / QUESTIONS**0.5
    assert z_scores(found.low, found.estimate, found.high, error) == pytest.approx([-1.96, 1.96], abs=0.1)


def test_intervals_end_where_values_end() -> None:
    accepted, drafted = np.array([3.0, 3.0, 3.0, 1.0]), np.full(4, 3.0)
    rate = Metric("rate", "", "", ("accepted",), ("drafted",), share=True)
    tau = Metric("tau", "", "", ("emitted",), ("rounds",), round_length=True)
    found = Resampling(4, seed=0, k=3).value(rate, {"accepted": accepted, "drafted": drafted})
    assert found.low > 0 and found.high == 1.0
    of_rounds = Resampling(4, seed=0, k=3).value(tau, {"emitted": accepted + 1, "rounds": np.ones(4)})
    assert of_rounds.low > 1 and of_rounds.high == 4.0
