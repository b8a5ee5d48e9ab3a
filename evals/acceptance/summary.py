"""Summaries of answers as JSON values: each configuration, whole and by group, with bootstrap intervals.

Below FEW questions percentiles of resamples are too narrow: there the interval is Student's t with the standard error
of the resamples (of speeds and speed-ups: of their logarithms). Times that were measured in several runs vary from run
to run as well as from question to question: both variances are added, and the degrees of freedom follow from both.
Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapters 12 (t intervals) and 13 (percentiles);
Satterthwaite (1946), An approximate distribution of estimates of variance components.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass

import numpy as np

from evals.acceptance.metrics import METRICS, Columns, Metric, columns, histogram, position_metrics, question_sums
from evals.errors import require
from evals.runs.answers import Answer, Json
from evals.runs.conversations import Configuration

LEVEL = 0.95
DRAWS = 2000
FEW = 20
"""Questions below which intervals are Student's t."""
INTERVAL_DEFINITION = (
    f"{LEVEL:.0%} interval: percentiles over {DRAWS} bootstrap resamples of whole questions, shared by all arms; below "
    f"{FEW} questions Student's t with the standard error of the resamples, cut at what is possible. Of times "
    "that were measured in several runs: Student's t with the scatter of questions and of runs; of one "
    "run it has that of questions alone, and another run on the same machine can lie outside."
)


@dataclass(frozen=True)
class Value:
    """An estimate and its interval; NaN where it is not defined (no such rounds, fewer than two questions)."""

    estimate: float
    low: float = math.nan
    high: float = math.nan


class Resampling:
    """Fixed resamples: how often each question is drawn. k: drafts a round, which limits values."""

    def __init__(self, questions: int, seed: int, draws: int = DRAWS, k: float = np.inf) -> None:
        self._k = k
        rng = np.random.default_rng(seed)
        self.questions = questions
        drawn = rng.multinomial(questions, np.full(questions, 1 / questions), size=draws)
        self._weights = np.vstack([np.ones(questions), drawn])  # [1 + draws, questions], first the questions themselves

    def value(self, metric: Metric, *runs: Columns) -> Value:
        """One metric of columns [questions]. Of times the interval includes the scatter of several runs."""
        several = len(runs) > 1
        if metric.timing and (several or self.questions < FEW):
            drawn = self._drawn(metric, {name: np.mean([run[name] for run in runs], axis=0) for name in metric.names})
            error, freedom = self._error(_logs(drawn))
            variance = error**2
            if several:
                of_run = _logs(np.array([self._drawn(metric, run)[0] for run in runs]))
                between = float(of_run.var(ddof=1)) / len(runs)
                variance += between
                if variance:
                    freedom = variance**2 / (error**4 / freedom + between**2 / (len(runs) - 1))
            if not np.isfinite(variance) or (several and not variance):
                return Value(float(drawn[0]))
            return Value(*np.exp(astuple(_student(math.log(drawn[0]), math.sqrt(variance), freedom))).tolist())
        found = self._interval(self._drawn(metric, runs[0]))
        return Value(found.estimate, *np.clip((found.low, found.high), *metric.limits(self._k)).tolist())

    def difference(self, metric: Metric, left: Columns, right: Columns) -> Value:
        """metric(right) - metric(left), paired: both are taken from the same resamples."""
        return self._interval(self._drawn(metric, right) - self._drawn(metric, left))

    def _drawn(self, metric: Metric, columns: Columns) -> np.ndarray:
        """[1 + draws] the metric of all questions, then of each resample."""
        return metric.of({name: self._weights @ columns[name] for name in metric.names})

    def _interval(self, drawn: np.ndarray) -> Value:
        estimate = float(drawn[0])
        if self.questions < FEW:
            return _student(estimate, *self._error(drawn))
        draws = drawn[1:][np.isfinite(drawn[1:])]
        if not draws.size:
            return Value(estimate)
        return Value(estimate, *np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist())

    def _error(self, drawn: np.ndarray) -> tuple[float, float]:
        """The standard error of resampled questions, and its degrees of freedom; NaN of fewer than two questions."""
        draws = drawn[1:][np.isfinite(drawn[1:])]
        if self.questions < 2 or not draws.size:
            return math.nan, math.nan
        # Resamples scatter like n questions around their own mean: less than the truth by (n - 1) / n.
        return float(draws.std() * np.sqrt(self.questions / (self.questions - 1))), float(self.questions - 1)


def _logs(draws: np.ndarray) -> np.ndarray:
    return np.log(np.where(draws > 0, draws, np.nan))


def _student(estimate: float, error: float, freedom: float) -> Value:
    require("scipy", "eval")
    from scipy.stats import t

    half = float(t.ppf((1 + LEVEL) / 2, freedom)) * error
    return Value(estimate, estimate - half, estimate + half)


ByArm = dict[str, list[Answer]]
"""The answers of each configuration, by its name."""


def by_arm(answers: Answers, arms: Sequence[Configuration]) -> ByArm:
    """The answers of each configuration in their order, to the questions that failed in no configuration."""
    failed = {answer.question_id for answer in answers if answer.error is not None}
    kept = [answer for answer in answers if answer.question_id not in failed]
    return {arm.name: [answer for answer in kept if answer.arm == arm.name] for arm in arms}


Answers = Sequence[Answer]
Repeats = Sequence[tuple[Answers, Answers | None]]
"""The answers of further runs, and the target alone's in the same run."""


def summarize(arm: Configuration, answers: Answers, baseline: Answers | None, seed: int, repeats: Repeats = ()) -> Json:
    """Everything about one configuration; wall-time figures lie under "timing".

    baseline: the target-alone answers to the same questions, or None when there is no such configuration.
    repeats: of the same questions in further runs, whose times count too.
    """
    k = arm.k
    sums = columns(answers, k, baseline)
    runs = [sums, *(columns(own, k, alone) for own, alone in repeats)]
    resampling = Resampling(len(answers), seed, k=k)
    return {
        "name": arm.name,
        "k": k,
        "model": arm.model,
        **_metrics(runs, resampling, baseline is not None),
        **_positions(sums, resampling, k),
        "histogram": histogram(answers, k),
        "identical_to_target_alone": _identical(answers, baseline),
        "by_task": _groups(runs, [a.task for a in answers], seed, baseline is not None, k),
        "by_category": _groups(runs, [a.category for a in answers], seed, baseline is not None, k),
    }


def differences(left: Answers, right: Answers, arms: tuple[Configuration, Configuration], seed: int) -> Json:
    """Paired differences (right less left) of the metrics that need no baseline, and the ratio of total speeds."""
    sums = columns(left, arms[0].k), columns(right, arms[1].k)
    resampling = Resampling(len(left), seed)
    found = _by_section(lambda metric: resampling.difference(metric, *sums), False)
    joined = {**sums[1], **{f"base_{name}": column for name, column in sums[0].items()}}
    found["timing"]["speed_ratio"] = _value(resampling.value(METRICS["speedup"], joined))
    return found


def question_rows(answers: Mapping[str, Answers], arms: Sequence[Configuration]) -> list[Json]:
    """One row a question with its own figures under each configuration."""
    rows = []
    for group in zip(*(answers[arm.name] for arm in arms), strict=True):
        own = {arm.name: _question(answer, arm) for arm, answer in zip(arms, group, strict=True)}
        first = group[0]
        rows.append({"id": first.question_id, "category": first.category, "task": first.task, "arms": own})
    return rows


def _question(answer: Answer, arm: Configuration) -> Json:
    sums = question_sums(answer, arm.k)
    return {
        "tau": _finite(float(METRICS["tau"].of(sums))),
        "rounds": sums["rounds"],
        "drafted": sums["drafted"],
        "accepted": sums["accepted"],
        "new_tokens": [len(turn.token_ids) for turn in answer.turns],
        "finish_reasons": [turn.finish_reason for turn in answer.turns],
        "timing": {"wall_s": sums["wall_s"], "tokens_per_s": _finite(float(METRICS["tokens_per_s"].of(sums)))},
    }


def _positions(sums: Columns, resampling: Resampling, k: int) -> Json:
    """Acceptance at each of k draft positions."""
    kinds = position_metrics(k).items()
    return {kind: [_value(resampling.value(metric, sums)) for metric in metrics] for kind, metrics in kinds}


def _groups(runs: Sequence[Columns], labels: Sequence[str], seed: int, has_baseline: bool, k: int) -> Json:
    """Metrics of each group of questions; {} when all questions are of one group."""
    names = list(dict.fromkeys(labels))
    if len(names) < 2:
        return {}
    groups = {}
    for name in names:
        inside = np.array([label == name for label in labels])
        parts = [{key: column[inside] for key, column in sums.items()} for sums in runs]
        own = Resampling(int(inside.sum()), seed, k=k)
        groups[name] = {**_metrics(parts, own, has_baseline), **_positions(parts[0], own, k)}
    return groups


def _metrics(runs: Sequence[Columns], resampling: Resampling, has_baseline: bool) -> Json:
    found = _by_section(lambda metric: resampling.value(metric, *runs), has_baseline)
    return {"questions": resampling.questions, **found}


def _by_section(value: Callable[[Metric], Value], has_baseline: bool) -> Json:
    """The values of all metrics that can be had, those of times apart."""
    found: Json = {"metrics": {}, "timing": {}}
    for key, metric in METRICS.items():
        if has_baseline or not metric.baseline:
            found["timing" if metric.timing else "metrics"][key] = _value(value(metric))
    return found


def _identical(answers: Answers, baseline: Answers | None) -> Json | None:
    if baseline is None:
        return None
    same = sum(a.token_ids == b.token_ids for a, b in zip(answers, baseline, strict=True))
    return {"questions": len(answers), "identical": same}


def _value(value: Value) -> Json:
    return {name: _finite(number) for name, number in asdict(value).items()}


def _finite(number: float) -> float | None:
    """The number, or None where JSON has none (NaN, infinity)."""
    return number if math.isfinite(number) else None
