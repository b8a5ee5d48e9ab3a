"""The acceptance evaluation: every question under every K and under the target alone, with a predicted speed-up.

A round of B rows with K drafts emits E(K) tokens a row on average and takes T(B, K) seconds; the target alone emits
one a row in T(B, 0). So speed-up(B, K) = E(K) · T(B, 0) / T(B, K): `specdec.requests.stats.speedup`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np

from evals.acceptance.metrics import DEFINITIONS
from evals.acceptance.summary import (
    DRAWS,
    INTERVAL_DEFINITION,
    LEVEL,
    ByArm,
    Json,
    Repeats,
    by_arm,
    differences,
    question_rows,
    summarize,
)
from evals.data.datasets import digest
from evals.errors import DataError
from evals.runs.answers import Answer, failures, seconds_a_round
from evals.runs.conversations import Configuration, Work
from evals.runs.executor import Executor, Plan, Report, collect
from evals.runs.store import RunStore, data_facts, model_facts, versions
from specdec.interrupts import interrupts_as_they_are
from specdec.requests.stats import speedup

PREDICTION_DEFINITION = (
    "Predicted speed-up = E(K) x T(B, 0) / T(B, K), decode only. E(K) = 1 + sum over j <= K of the product of the "
    "conditional acceptances 1..j (beyond the measured positions the last one is repeated, marked *); T(B, K) is the "
    "measured time of a round of B rows, on a straight line in K between and beyond the measured K (marked *; level "
    "where the measured times fall with K)."
)


def expected_tokens(conditional: Sequence[float], k: int) -> float:
    """E(K): tokens a round emits on average.

    >>> expected_tokens([0.5, 0.5], 2), expected_tokens([0.5], 2)
    (1.75, 1.75)
    """
    known = [rate for rate in conditional if not math.isnan(rate)]
    if not known:
        return 1.0
    rates = (known + [known[-1]] * k)[:k]
    return float(1.0 + np.cumprod(rates).sum())


def round_seconds(measured: Mapping[int, float], k: int) -> float:
    """T(B, K) from the measured {K: seconds} of one batch size: exact where measured, else a straight line.

    The line is fitted to the K > 0; with one of them it runs through K = 0 as well. A line that falls says only that
    the times scatter: then it is level at their mean.
    """
    if k in measured:
        return measured[k]
    points = {q: s for q, s in measured.items() if q > 0}
    if len(points) < 2:
        points = dict(measured)
    if len(points) < 2:
        return float("nan")
    slope, start = np.polyfit(list(points), list(points.values()), 1)
    return float(start + slope * k) if slope >= 0 else float(np.mean(list(points.values())))


def predict(
    conditional: Sequence[float], step_times: Mapping[int, Mapping[int, float]], ks: Sequence[int]
) -> list[Json]:
    """The table, a cell for each batch size and K; `extrapolated` where K lies beyond what was measured.

    step_times: {batch size: {K: seconds a round}}, with K = 0 in every row.
    """
    table = []
    for batch_size, measured in sorted(step_times.items()):
        for k in ks:
            tokens = expected_tokens(conditional, k)
            seconds = round_seconds(measured, k)
            cell = {
                "batch_size": batch_size,
                "k": k,
                "tokens_per_round": tokens,
                "round_s": seconds,
                "speedup": speedup(tokens, measured[0], seconds),
                "extrapolated": k > len(conditional) or k > max(measured),
            }
            table.append(cell)
    return table


def best(table: Sequence[Json]) -> Json:
    """The fastest cell of each batch size within what was measured; none when no K there is faster than K = 0."""
    fastest: Json = {}
    for cell in table:
        rival = fastest.get(str(cell["batch_size"]))
        if not cell["extrapolated"] and cell["speedup"] > (rival["speedup"] if rival else 1.0):
            fastest[str(cell["batch_size"])] = cell
    return fastest


BASELINE = "target alone"
SCHEMA_VERSION = 1
SPEED_RATIO = "Ratio of totals: (new tokens / wall seconds) of the second configuration / the same of the first."


def sweep(ks: Sequence[int]) -> tuple[Configuration, ...]:
    """The target alone, and one configuration a K."""
    return (Configuration(BASELINE, 0), *(Configuration(f"K={k}", k) for k in ks))


def settings(plan: Plan, facts: Json) -> Json:
    """All that the answers depend on; a run folder belongs to exactly one such value."""
    found = {
        "data": data_facts(plan.data),
        "question_ids": digest([question.id for question in plan.data.questions]),
        "arms": [asdict(arm) for arm in plan.arms],
        "asking": asdict(plan.asking),
        "batch_size": plan.batch_size,
        "models": {key: model_facts(one) for key, one in facts.items()},
        "versions": versions(),
    }
    return json.loads(json.dumps(found))


@interrupts_as_they_are()
def run(executor: Executor, plan: Plan, store: RunStore, report: Report) -> Json:
    """Run the plan, continuing what the store holds, and return the JSON document.

    Raises:
        DataError: every question failed.
    """
    arms = plan.arms
    if plan.warmup and len(store.answers) < len(plan.data.questions) * len(arms):
        for _ in executor.run(plan.works[:1] * plan.warmup):  # whose answers are dropped
            pass
    answers = collect(executor, plan, store, report)
    kept = by_arm(answers, arms)
    if not kept[arms[0].name]:
        raise DataError(f"every question failed; the first error: {next(a.error for a in answers if a.error)}")
    repeated = [_repeat(executor, plan, store, report, number) for number in range(2, plan.repeats + 1)]
    baseline = kept.get(BASELINE)
    seed = plan.asking.seed
    repeats = {arm.name: _paired(arm.name, kept[arm.name], repeated) for arm in arms}
    summaries = [summarize(arm, kept[arm.name], baseline, seed, repeats[arm.name]) for arm in arms]
    rows = question_rows(kept, arms)
    document: Json = {
        "schema": "specdec.acceptance",
        "schema_version": SCHEMA_VERSION,
        "provenance": {
            "settings": settings(plan, executor.facts()),
            "settings_sha256": store.key,
            "seed": seed,
            "bootstrap": {"draws": DRAWS, "level": LEVEL, "seed": seed},
        },
        "definitions": definitions(),
        "arms": summaries,
        "questions": rows,
        "failures": failures(answers),
        "not_measured": [
            arm.name for arm in arms if arm.k and not any(r.drafted for a in kept[arm.name] for r in a.rounds)
        ],
        "worst": _worst(executor, plan, rows),
    }
    if baseline is None:
        left, right = arms
        document["differences"] = differences(kept[left.name], kept[right.name], (left, right), seed)
        document["definitions"]["speed_ratio"] = SPEED_RATIO
    else:
        document["definitions"]["prediction"] = PREDICTION_DEFINITION
        runs = 1 + min(map(len, repeats.values()))
        document["timing"] = {"prediction": _prediction(executor, plan, kept, summaries), "runs": runs}
    return document


def _repeat(executor: Executor, plan: Plan, store: RunStore, report: Report, number: int) -> ByArm:
    """The answers of a further run by configuration, to the questions that failed in none of them."""
    arms = tuple(replace(arm, name=f"{arm.name}, run {number}") for arm in plan.arms)
    found = by_arm(collect(executor, replace(plan, arms=arms), store, report), arms)
    return {arm.name: found[repeat.name] for arm, repeat in zip(plan.arms, arms, strict=True)}


def _paired(arm: str, kept: list[Answer], repeated: Sequence[ByArm]) -> Repeats:
    """The further runs of one configuration with the target alone's, where all questions have answers."""
    pairs = [(run[arm], run.get(BASELINE)) for run in repeated]
    return [pair for pair in pairs if [a.question_id for a in pair[0]] == [a.question_id for a in kept]]


def definitions() -> dict[str, str]:
    """The sentence that defines each number of the document."""
    return {
        **DEFINITIONS,
        "interval": INTERVAL_DEFINITION,
        "identical_to_target_alone": "Questions whose token ids, over all turns, equal those of the target alone.",
    }


def _prediction(executor: Executor, plan: Plan, kept: ByArm, summaries: Sequence[Json]) -> Json:
    """The speed-up table, from the acceptance of the largest K and the round times of the run or of a calibration."""
    times = {plan.batch_size: {arm.k: seconds_a_round(kept[arm.name]) for arm in plan.arms}}
    sizes = tuple(size for size in plan.predict_batch_sizes if size != plan.batch_size)
    if sizes:
        arms = plan.arms
        question = plan.data.questions[0]
        asking = plan.asking
        times |= executor.on_one(lambda worker: worker.step_times(sizes, arms, question, asking))
    nothing: Json = {"round_seconds": {}, "table": [], "best": {}}
    if not all(math.isfinite(seconds) and seconds > 0 for row in times.values() for seconds in row.values()):
        return {**nothing, "reason": "there were no rounds to time"}
    widest = max(summaries, key=lambda summary: summary["k"])
    turns = [turn for answer in kept[widest["name"]] for turn in answer.turns]
    undrafted = sum(not record.drafted for turn in turns for record in turn.rounds[:-1])
    if undrafted:  # a head's are the last ones of answers
        reason = f"{undrafted} rounds inside answers had no drafts, and no acceptance tells how many would have"
        return {**nothing, "reason": reason}
    conditional = [float("nan") if v["estimate"] is None else v["estimate"] for v in widest["conditional"]]
    ks = range(1, max(8, widest["k"]) + 1)
    table = predict(conditional, times, ks)
    return {
        "round_seconds": {str(size): {str(k): s for k, s in row.items()} for size, row in times.items()},
        "table": table,
        "best": best(table),
    }


def _worst(executor: Executor, plan: Plan, rows: Sequence[Json]) -> list[Json]:
    """The questions of lowest τ under the largest K, generated once more with their drafts kept."""
    arm = max(plan.arms, key=lambda arm: arm.k)
    if not plan.worst or not arm.k:
        return []
    tau = {row["id"]: row["arms"][arm.name]["tau"] for row in rows if row["arms"][arm.name]["tau"] is not None}
    worst = sorted(tau, key=lambda name: tau[name])[: plan.worst]
    asked = {question.id: question for question in plan.data.questions if question.id in worst}
    asking = replace(plan.asking, return_drafts=True)
    works = [Work(i, (question,), (arm,), asking) for i, question in enumerate(asked.values())]
    found = [
        {
            "question_id": answer.question_id,
            "category": answer.category,
            "arm": answer.arm,
            "tau": tau[answer.question_id],
            "asked": list(asked[answer.question_id].turns),
            "turns": [[list(piece) for piece in turn.segments] for turn in answer.turns],
        }
        for done in executor.run(works)
        for answer in done
    ]
    return sorted(found, key=lambda entry: (entry["tau"], entry["question_id"]))
