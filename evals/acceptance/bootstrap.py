"""Intervals by resampling questions, the same draws for all configurations: differences between them are paired.

Below FEW questions percentiles of resamples are too narrow: there the interval is Student's t with the standard error
of the resamples (of speeds and speed-ups: of their logarithms). Times that were measured in several runs vary from run
to run as well as from question to question: both variances are added, and the degrees of freedom follow from both.
Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapters 12 (t intervals) and 13 (percentiles);
Satterthwaite (1946), An approximate distribution of estimates of variance components.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evals.acceptance.metrics import Metric
from evals.errors import require

LEVEL = 0.95
DRAWS = 2000
FEW = 20
"""Questions below which intervals are Student's t."""
DEFINITION = (
    f"{LEVEL:.0%} interval: percentiles over {DRAWS} bootstrap resamples of whole questions, shared by all arms; below "
    f"{FEW} questions Student's t with the standard error of the resamples, cut at what is possible. Of times "
    "that were measured in several runs: Student's t with the scatter of questions and of runs; of one "
    "run it has that of questions alone, and another run on the same machine can lie outside."
)


@dataclass(frozen=True)
class Value:
    """An estimate and its interval; NaN where it is not defined (no such rounds, fewer than two questions)."""

    estimate: float
    low: float
    high: float

    def within(self, least: float, most: float) -> Value:
        """The interval cut at what is possible."""
        return Value(self.estimate, *(float(np.clip(end, least, most)) for end in (self.low, self.high)))


class Resampling:
    """Fixed resamples of `questions` questions: how often each question is drawn, [draws, questions].

    k: drafts a round, which limits what can be.
    """

    def __init__(self, questions: int, seed: int, draws: int = DRAWS, k: float = np.inf) -> None:
        self._k = k
        rng = np.random.default_rng(seed)
        self.questions = questions
        self._weights = rng.multinomial(questions, np.full(questions, 1 / questions), size=draws).astype(np.float64)

    def value(self, metric: Metric, columns: Mapping[str, np.ndarray]) -> Value:
        """One metric of columns [questions]."""
        estimate, draws = metric.of(_total(columns, metric)), metric.of(self._resampled(columns, metric))
        if metric.timing and self.questions < FEW and estimate > 0:
            return _exp(self._interval(np.log(estimate), _logs(draws)))
        return self._interval(estimate, draws).within(*metric.limits(self._k))

    def repeated(self, metric: Metric, runs: Sequence[Mapping[str, np.ndarray]]) -> Value:
        """One metric of times, from the columns [questions] of several runs: the interval has their scatter as well."""
        mean = {name: np.mean([run[name] for run in runs], axis=0) for name in {*metric.over, *metric.under}}
        estimate = float(metric.of(_total(mean, metric)))
        of_run = np.array([float(metric.of(_total(run, metric))) for run in runs])
        if not estimate > 0 or not (of_run > 0).all():
            return Value(estimate, float("nan"), float("nan"))
        error, freedom = self._error(_logs(metric.of(self._resampled(mean, metric))))
        between = float(np.log(of_run).var(ddof=1)) / len(runs)
        variance = error**2 + between
        if not np.isfinite(variance) or not variance:
            return Value(estimate, float("nan"), float("nan"))
        freedom = variance**2 / (error**4 / freedom + between**2 / (len(runs) - 1))
        return _exp(_student(float(np.log(estimate)), float(np.sqrt(variance)), freedom))

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
        if self.questions < FEW:
            return _student(float(estimate), *self._error(draws))
        low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return Value(float(estimate), float(low), float(high))

    def _error(self, draws: np.ndarray) -> tuple[float, float]:
        """The standard error of resampled questions, and its degrees of freedom; NaN of fewer than two questions."""
        draws = draws[np.isfinite(draws)]
        if self.questions < 2 or not draws.size:
            return float("nan"), float("nan")
        # Resamples scatter like n questions around their own mean: less than the truth by (n - 1) / n.
        return float(draws.std() * np.sqrt(self.questions / (self.questions - 1))), float(self.questions - 1)


def _logs(draws: np.ndarray) -> np.ndarray:
    return np.log(np.where(draws > 0, draws, np.nan))


def _exp(value: Value) -> Value:
    return Value(*(float(np.exp(part)) for part in (value.estimate, value.low, value.high)))


def _student(estimate: float, error: float, freedom: float) -> Value:
    require("scipy", "eval")
    from scipy.stats import t

    half = float(t.ppf((1 + LEVEL) / 2, freedom)) * error
    return Value(estimate, estimate - half, estimate + half)


def _total(columns: Mapping[str, np.ndarray], metric: Metric) -> dict[str, np.ndarray]:
    return {name: columns[name].sum() for name in {*metric.over, *metric.under}}
