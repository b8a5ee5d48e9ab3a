"""From answers to numbers: the summary of one configuration, whole and by group, as JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from evals.acceptance.bootstrap import Resampling, Value
from evals.acceptance.metrics import METRICS, Columns, Metric, columns, histogram, position_metrics
from evals.runs.answers import Answer
from evals.runs.runner import Configuration

Json = dict[str, Any]


def by_arm(answers: Sequence[Answer], arms: Sequence[Configuration]) -> dict[str, list[Answer]]:
    """The answers of each configuration, to those questions that no configuration failed on, in their order."""
    failed = {answer.question_id for answer in answers if answer.error is not None}
    kept = [answer for answer in answers if answer.question_id not in failed]
    return {arm.name: [answer for answer in kept if answer.arm == arm.name] for arm in arms}


Repeats = Sequence[tuple[Sequence[Answer], Sequence[Answer] | None]]
"""The answers of further runs, and the target alone's in the same run."""


def summarize(
    arm: Configuration,
    answers: Sequence[Answer],
    baseline: Sequence[Answer] | None,
    seed: int,
    repeats: Repeats = (),
) -> Json:
    """Everything about one configuration; wall-time figures lie under "timing".

    baseline: the target-alone answers to the same questions, or None when there is no such configuration.
    repeats: of the same questions in further runs, whose times count too.
    """
    sums = columns(answers, arm.k, baseline)
    runs = [sums, *(columns(own, arm.k, alone) for own, alone in repeats)]
    resampling = Resampling(len(answers), seed, k=arm.k)
    return {
        "name": arm.name,
        "k": arm.k,
        "model": arm.model,
        **_metrics(runs, resampling, baseline is not None),
        **_positions(sums, resampling, arm.k),
        "histogram": histogram(answers, arm.k),
        "identical_to_target_alone": _identical(answers, baseline),
        "by_task": _groups(runs, [a.task for a in answers], seed, baseline is not None, arm.k),
        "by_category": _groups(runs, [a.category for a in answers], seed, baseline is not None, arm.k),
    }


def differences(
    left: Sequence[Answer], right: Sequence[Answer], arms: tuple[Configuration, Configuration], seed: int
) -> Json:
    """Paired differences (right less left) of the metrics that need no baseline, and the ratio of total speeds."""
    sums = columns(left, arms[0].k), columns(right, arms[1].k)
    resampling = Resampling(len(left), seed)
    found: Json = {"metrics": {}, "timing": {}}
    for metric in METRICS:
        if not metric.baseline:
            place = found["timing" if metric.timing else "metrics"]
            place[metric.key] = _value(resampling.difference(metric, *sums))
    ratio = next(metric for metric in METRICS if metric.key == "speedup")
    joined = {**sums[1], **{f"base_{name}": column for name, column in sums[0].items()}}
    found["timing"]["speed_ratio"] = _value(resampling.value(ratio, joined))
    return found


def question_rows(answers: Mapping[str, Sequence[Answer]], arms: Sequence[Configuration]) -> list[Json]:
    """One row a question with its own figures under each configuration."""
    rows = []
    for group in zip(*(answers[arm.name] for arm in arms), strict=True):
        own = {arm.name: _question(answer, arm) for arm, answer in zip(arms, group, strict=True)}
        first = group[0]
        rows.append({"id": first.question_id, "category": first.category, "task": first.task, "arms": own})
    return rows


def _question(answer: Answer, arm: Configuration) -> Json:
    sums = columns([answer], arm.k)
    tau = _finite(float(_by_key("tau").of(sums)[0]))
    wall_s = float(sums["wall_s"][0])
    return {
        "tau": tau,
        "rounds": int(sums["rounds"][0]),
        "drafted": int(sums["drafted"][0]),
        "accepted": int(sums["accepted"][0]),
        "new_tokens": [len(turn.token_ids) for turn in answer.turns],
        "finish_reasons": [turn.finish_reason for turn in answer.turns],
        "timing": {"wall_s": wall_s, "tokens_per_s": _finite(float(_by_key("tokens_per_s").of(sums)[0]))},
    }


def _by_key(key: str) -> Metric:
    return next(metric for metric in METRICS if metric.key == key)


def _positions(sums: Columns, resampling: Resampling, k: int) -> Json:
    """Acceptance at each of k draft positions."""
    kinds = zip(("conditional", "unconditional", "per_position_vllm"), position_metrics(k), strict=True)
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
    found: Json = {"questions": resampling.questions, "metrics": {}, "timing": {}}
    for metric in METRICS:
        if has_baseline or not metric.baseline:
            place = found["timing" if metric.timing else "metrics"]
            is_repeated = metric.timing and len(runs) > 1
            found_value = resampling.repeated(metric, runs) if is_repeated else resampling.value(metric, runs[0])
            place[metric.key] = _value(found_value)
    return found


def _identical(answers: Sequence[Answer], baseline: Sequence[Answer] | None) -> Json | None:
    if baseline is None:
        return None
    same = sum(a.token_ids == b.token_ids for a, b in zip(answers, baseline, strict=True))
    return {"questions": len(answers), "identical": same}


def _value(value: Value) -> Json:
    return {name: _finite(number) for name, number in asdict(value).items()}


def _finite(number: float) -> float | None:
    """JSON has no NaN."""
    return number if math.isfinite(number) else None
