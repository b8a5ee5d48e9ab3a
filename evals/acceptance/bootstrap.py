"""Intervals by resampling questions, the same draws for all configurations: differences between them are paired.

Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13 (percentile intervals).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from evals.acceptance.metrics import Metric

LEVEL = 0.95
DRAWS = 2000
DEFINITION = f"{LEVEL:.0%} percentile interval over {DRAWS} bootstrap resamples of whole questions, shared by all arms."


@dataclass(frozen=True)
class Value:
    """An estimate and its interval; NaN where it is not defined (no such rounds, fewer than two questions)."""

    estimate: float
    low: float
    high: float


class Resampling:
    """Fixed resamples of `questions` questions: how often each question is drawn, [draws, questions]."""

    def __init__(self, questions: int, seed: int, draws: int = DRAWS) -> None:
        rng = np.random.default_rng(seed)
        self.questions = questions
        self._weights = rng.multinomial(questions, np.full(questions, 1 / questions), size=draws).astype(np.float64)

    def value(self, metric: Metric, columns: Mapping[str, np.ndarray]) -> Value:
        """One metric of columns [questions]."""
        return self._interval(metric.of(_total(columns, metric)), metric.of(self._resampled(columns, metric)))

    def difference(self, metric: Metric, left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> Value:
        """metric(right) - metric(left), paired: both are taken from the same resamples."""
        estimate = metric.of(_total(right, metric)) - metric.of(_total(left, metric))
        draws = metric.of(self._resampled(right, metric)) - metric.of(self._resampled(left, metric))
        return self._interval(estimate, draws)

    def _resampled(self, columns: Mapping[str, np.ndarray], metric: Metric) -> dict[str, np.ndarray]:
        return {name: self._weights @ columns[name] for name in {*metric.over, *metric.under}}

    def _interval(self, estimate: np.ndarray, draws: np.ndarray) -> Value:
        draws = draws[np.isfinite(draws)]
        if self.questions < 2 or not draws.size:
            return Value(float(estimate), float("nan"), float("nan"))
        low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return Value(float(estimate), float(low), float(high))


def _total(columns: Mapping[str, np.ndarray], metric: Metric) -> dict[str, np.ndarray]:
    return {name: columns[name].sum() for name in {*metric.over, *metric.under}}
