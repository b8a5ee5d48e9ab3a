"""Known truth: hand-worked rounds, and planted acceptance rates that must lie inside the intervals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evals.acceptance.metrics import METRICS, Metric, columns, histogram, position_metrics
from evals.acceptance.summary import Resampling
from evals.runs.answers import Answer, Turn
from evals.runs.conversations import Configuration, Work, run_chunk
from specdec.requests.stats import RoundRecord


def answer(*turns: list[tuple[int, int, int]], wall: float = 2.0, text_tokens: int = 6) -> Answer:
    made = tuple(
        Turn(
            "text",
            tuple(range(1 + sum(e for _, _, e in rounds))),
            "eos",
            3,
            text_tokens,
            tuple(RoundRecord(*r) for r in rounds),
            wall_s=wall,
            prefill_s=0.5,
            decode_s=1.5,
        )
        for rounds in turns
    )
    return Answer("q", "arm", "all", "all", made)


def total(metric: Metric, sums: dict[str, np.ndarray]) -> float:
    return float(metric.of({name: sums[name].sum() for name in {*metric.over, *metric.under}}))


def value(key: str, sums: dict[str, np.ndarray]) -> float:
    return total(METRICS[key], sums)


def test_hand_worked_example() -> None:
    # K=3. Turn 1: 1 of 3 accepted; then 3 of 3, of which the stop leaves 2. Turn 2: no room for drafts in one round.
    sums = columns([answer([(3, 1, 2), (3, 3, 2)], [(2, 2, 3), (0, 0, 1)])], k=3, baseline=[answer([(0, 0, 1)] * 7)])
    assert value("tau", sums) == (2 + 2 + 3 + 1) / 4
    # The turns are two requests: 4 tokens in 2 rounds, and 4 in 2.
    assert value("tau_requests", sums) == value("tau_tokens", sums) == 2.0
    assert value("tau_eagle", sums) == value("tau_spec_bench", sums) == (2 + 4 + 3 + 1) / 4
    assert value("tau_eagle_idxs", sums) == 10 / (4 - 2)
    assert value("tau_vllm", sums) == 1 + 6 / 3
    assert value("tau_sglang", sums) == (8 + 2) / 4
    assert value("acceptance_rate", sums) == 5 / 7
    assert value("acceptance_rate_vllm", sums) == 6 / 8
    assert value("acceptance_rate_sglang", sums) == 6 / (4 * 3)
    assert value("speedup", sums) == (10 / 4.0) / (8 / 2.0)
    assert value("speedup_spec_bench", sums) == pytest.approx((10 / 4.0) / ((6 - 1) / 2.0))
    assert value("drafts_per_s", sums) == 8 / 4.0
    conditional, unconditional, vllm = position_metrics(3).values()
    assert [total(metric, sums) for metric in unconditional] == [1.0, 2 / 3, 0.0]
    assert [total(metric, sums) for metric in vllm] == [3 / 3, 2 / 3, 1 / 3]
    assert [total(metric, sums) for metric in conditional[:2]] == [1.0, 2 / 3] and np.isnan(total(conditional[2], sums))
    assert histogram([answer([(3, 1, 2), (3, 3, 2)])], 3) == [0, 1, 1, 0]


def test_three_means_of_one_run_that_differ() -> None:
    """A short request with few accepted drafts, and a long one with many; a turn that ended with its prompt pass."""
    short, long = [(3, 0, 1)] * 2, [(3, 3, 4)] * 6
    for conversations in ([answer(short, []), answer(long)], [answer(short, [], long)]):
        sums = columns(conversations, k=3)
        assert value("tau", sums) == value("tau_vllm", sums) == value("tau_spec_bench", sums) == (2 + 24) / (2 + 6)
        assert value("tau_requests", sums) == (1.0 + 4.0) / 2
        assert value("tau_tokens", sums) == (2 * 1.0 + 24 * 4.0) / (2 + 24)


def positions(rounds: list[tuple[int, int, int]], k: int) -> list[list[float]]:
    """Per kind, the acceptance at each position."""
    sums = columns([answer(rounds)], k)
    return [[total(metric, sums) for metric in kind] for kind in position_metrics(k).values()]


def test_a_round_cut_by_a_limit_counts_against_every_position_for_vllm() -> None:
    """vllm/v1/spec_decode/metrics.py: accepted at each position / num_drafts, a round with any drafts being one."""
    _, unconditional, vllm = positions([(3, 3, 4), (3, 1, 2), (1, 1, 2), (0, 0, 1)], 3)
    assert unconditional == [3 / 3, 1 / 2, 1 / 2]
    assert vllm == [3 / 3, 1 / 3, 1 / 3]


def test_a_round_cut_by_a_stop_counts_what_was_accepted_after_it_for_vllm_and_sglang() -> None:
    """vLLM observes a round before it looks for the stop; SGLang counts a list that this cut leaves whole."""
    rounds = [(3, 0, 1), (3, 3, 1)]  # the stop is the first of three accepted drafts
    _, unconditional, vllm = positions(rounds, 3)
    assert (unconditional[0], vllm) == (1 / 2, [1 / 2, 1 / 2, 1 / 2])
    assert unconditional[1] == 0.0  # the drafts after the stop count neither as offered nor as accepted
    sums = columns([answer(rounds)], 3)
    assert value("acceptance_rate", sums) == 1 / 4
    assert value("acceptance_rate_vllm", sums) == value("acceptance_rate_sglang", sums) == 3 / 6
    assert value("tau_vllm", sums) == 1 + 3 / 2 and value("tau", sums) == 2 / 2


def test_the_mean_of_vllms_positions_is_its_mean_acceptance_length() -> None:
    rounds = [(3, 3, 2), (3, 1, 2), (2, 2, 3), (1, 0, 1), (0, 0, 1)]
    sums = columns([answer(rounds)], 3)
    assert 1 + sum(positions(rounds, 3)[2]) == pytest.approx(value("tau_vllm", sums))


def test_without_speculation_tau_is_one() -> None:
    sums = columns([answer([(0, 0, 1)] * 5)], k=0)
    assert value("tau", sums) == 1.0
    assert np.isnan(value("acceptance_rate", sums))


@pytest.mark.slow
def test_planted_rates_are_inside_the_intervals(plant: SimpleNamespace) -> None:
    rates = (0.8, 0.6, 0.5)
    answers = planted(plant, plant.Model(rates=rates, length=200), 300)
    sums = columns(answers, 3)
    resampling = Resampling(len(answers), seed=1)
    conditional, unconditional, _ = position_metrics(3).values()
    for metric, truth in zip(conditional, rates, strict=True):
        found = resampling.value(metric, sums)
        assert found.low < truth < found.high and found.high - found.low < 0.03
    for metric, truth in zip(unconditional, np.cumprod(rates), strict=True):
        found = resampling.value(metric, sums)
        assert found.low < truth < found.high


@pytest.mark.slow
def test_a_wrong_denominator_would_be_seen(plant: SimpleNamespace) -> None:
    sums = columns(planted(plant, plant.Model(rates=(0.8, 0.6), length=200), 300), 2)
    wrong = {**sums, "reached_2": sums["offered_2"]}
    found = Resampling(300, seed=1).value(position_metrics(2)["conditional"][1], wrong)
    assert not found.low < 0.6 < found.high


def test_planted_tokens_after_the_stop_do_not_count(plant: SimpleNamespace) -> None:
    plain = columns(planted(plant, plant.Model(rates=(1.0,), length=11), 20), 4)
    over = columns(planted(plant, plant.Model(rates=(1.0,), length=12, overshoot=True), 20), 4)
    assert value("tau", plain) == 5.0  # ten tokens after the first, in two rounds
    assert value("tau", over) == pytest.approx(11 / 3)  # the third round keeps one of its five
    assert value("tau_eagle", over) == 5.0


@pytest.mark.slow
def test_per_request_k_has_right_denominators(plant: SimpleNamespace) -> None:
    model = plant.Model(rates=(0.9, 0.7, 0.5), length=300)
    mixed = planted(plant, model, 100, k=1) + planted(plant, model, 100, k=3)
    sums = columns(mixed, 3)
    found = Resampling(200, seed=0).value(position_metrics(3)["unconditional"][2], sums)
    assert found.low < 0.9 * 0.7 * 0.5 < found.high
    assert sums["offered_2"][:100].sum() == 0 < sums["offered_1"][:100].sum()


def planted(plant: SimpleNamespace, model: Any, count: int, k: int = 0) -> list[Answer]:
    k = k or (4 if model.rates == (1.0,) else len(model.rates))
    chunk = plant.questions(count).questions
    return run_chunk({"main": model}, Work(0, chunk, (Configuration("k", k),), plant.asking(max_new_tokens=10_000)))


def test_interval_of_a_difference_is_paired() -> None:
    rng = np.random.default_rng(0)
    emitted = rng.integers(50, 500, 100).astype(float)
    left = {"emitted": emitted, "rounds": emitted / 2}
    right = {"emitted": emitted, "rounds": emitted / 2.5}
    found = Resampling(100, seed=0).difference(METRICS["tau"], left, right)
    assert found.estimate == pytest.approx(0.5) and found.high - found.low < 1e-9


@pytest.mark.slow
def test_interval_covers_as_often_as_it_says() -> None:
    rng, inside = np.random.default_rng(5), 0
    for _ in range(200):
        sums = {"accepted": rng.binomial(20, 0.7, 60).astype(float), "drafted": np.full(60, 20.0)}
        found = Resampling(60, seed=1, draws=400).value(METRICS["acceptance_rate"], sums)
        inside += found.low <= 0.7 <= found.high
    assert 180 <= inside <= 199


def test_one_question_has_no_interval() -> None:
    found = Resampling(1, seed=0).value(METRICS["tau"], {"emitted": np.array([3.0]), "rounds": np.array([2.0])})
    assert found.estimate == 1.5 and np.isnan(found.low)


def test_every_metric_has_a_definition_and_known_columns() -> None:
    sums = columns([answer([(1, 1, 2)])], 1, [answer([(0, 0, 1)])])
    for metric in METRICS.values():
        assert metric.definition.endswith(".") and {*metric.over, *metric.under} <= set(sums)


def covered(rng: np.random.Generator, questions: int) -> bool:
    """Whether the interval of a rate of 0.7 has it: questions differ, as real ones do."""
    rates = np.clip(rng.normal(0.7, 0.15, questions), 0, 1)
    sums = {"accepted": rng.binomial(200, rates).astype(float), "drafted": np.full(questions, 200.0)}
    found = Resampling(questions, seed=int(rng.integers(1 << 30)), draws=200).value(METRICS["acceptance_rate"], sums)
    return bool(found.low <= 0.7 <= found.high)


@pytest.mark.slow
@pytest.mark.parametrize("questions", [5, pytest.param(12, marks=pytest.mark.long)])
def test_few_questions_are_covered_as_often_as_is_said(questions: int) -> None:
    """Percentiles of so few cover less than they say."""
    pytest.importorskip("scipy")
    rng = np.random.default_rng(3)
    assert 0.92 < np.mean([covered(rng, questions) for _ in range(400)]) < 0.98


def timed(rng: np.random.Generator, runs: int, questions: int) -> list[dict[str, np.ndarray]]:
    """Runs of a speed-up of 2, each 10 % faster or slower as a whole, and its questions 2 %."""
    made = []
    for _ in range(runs):
        wall = 1.0 * rng.normal(1.0, 0.1) * rng.normal(1.0, 0.02, questions)
        made.append({
            "new_tokens": np.full(questions, 100.0), "wall_s": wall,
            "base_wall_s": np.full(questions, 2.0), "base_new_tokens": np.full(questions, 100.0),
        })  # fmt: skip
    return made


@pytest.mark.slow
def test_the_interval_of_a_speedup_has_the_scatter_of_runs() -> None:
    """Of one run the interval has the questions' scatter alone: it misses another run's number most of the time."""
    pytest.importorskip("scipy")
    rng, metric = np.random.default_rng(1), METRICS["speedup"]
    inside = {"one run": 0, "five": 0}
    for _ in range(100):
        runs, resampling = timed(rng, 5, 25), Resampling(25, seed=0, draws=200)
        one, five = resampling.value(metric, runs[0]), resampling.value(metric, *runs)
        inside["one run"] += one.low <= 2.0 <= one.high
        inside["five"] += five.low <= 2.0 <= five.high
    assert inside["one run"] < 30 and inside["five"] >= 89
