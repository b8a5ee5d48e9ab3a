"""Verdicts on divergences, and a distribution test that passes what is right and fails planted wrong rules."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from evals.acceptance.acceptance import sweep
from evals.lossless import greedy as lossless
from evals.lossless.distribution import (
    Fit,
    Sampled,
    Sampling,
    combined,
    detectable_distance,
    exact_joint,
    goodness_of_fit,
    homogeneity,
    sample,
)
from evals.lossless.greedy import compare_greedy, first_difference
from evals.lossless.replay import Replay
from evals.runs.answers import Answer
from evals.runs.executor import LocalExecutor
from evals.runs.runner import Configuration, run_chunk
from evals.runs.verdict import Verdict
from evals.runs.worker import ModelSpec, Worker

pytest.importorskip("scipy")


def tiny_llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


class GreedyModel:
    """transformers' own greedy answers of a tiny model; `wrong` alters one token of the speculative ones.

    wrong: maps (logits, position) to the token that speculation emits.
    """

    def __init__(self, plant: SimpleNamespace, wrong: Any) -> None:
        self.tokenizer = plant.Tokenizer()
        self.tokenizer.chat_template = None
        self.hf_model = tiny_llama()
        self.head = None
        self._scripted = plant.Model()
        self._wrong = wrong

    @torch.inference_mode()
    def generate(self, prompts: Any, params: Any) -> list[Any]:
        scripted = self._scripted.generate(prompts, params)
        done = []
        for prompt, one, completion in zip(prompts, params, scripted, strict=True):
            ids = list(prompt)
            for place in range(6):
                logits = self.hf_model(torch.tensor([ids])).logits[0, -1]
                wrong = self._wrong(logits, place) if one.num_speculative_tokens else None
                ids.append(int(logits.argmax()) if wrong is None else wrong)
            done.append(SimpleNamespace(**{**vars(completion), "token_ids": ids[len(prompt) :], "text": "x"}))
        return done


def compare(plant: SimpleNamespace, wrong: Any) -> dict[str, Any]:
    model = GreedyModel(plant, wrong)
    executor = LocalExecutor(Worker({"main": ModelSpec("main")}, plant.loader({"main": model})))
    data, arms = plant.questions(4), sweep((2,))
    asking = plant.asking()
    asking = type(asking)(asking.params, templated=False)
    answers = run_chunk({"main": model}, arms, data.questions, asking)
    kept = {arm.name: [a for a in answers if a.arm == arm.name] for arm in arms}
    return compare_greedy(executor, data, arms, kept, asking)


def test_identical_answers_pass(plant: SimpleNamespace) -> None:
    found = compare(plant, lambda logits, place: None)
    assert found["verdict"] is Verdict.PASS and found["arms"][0]["identical"] == 4


def test_a_wrong_token_is_a_defect_with_its_gap(plant: SimpleNamespace) -> None:
    found = compare(plant, lambda logits, place: int(logits.argsort()[-2]) if place == 3 else None)
    arm = found["arms"][0]
    assert found["verdict"] is Verdict.FAIL and arm["defects"] == 4 and arm["identical"] == 0
    assert {d["position"] for d in arm["divergences"]} == {3}
    assert all(d["behind"] == pytest.approx(d["gap"]) and d["gap"] > 1e-4 for d in arm["divergences"])


def test_a_swap_inside_the_tolerance_is_a_near_tie(plant: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lossless, "FLOAT32_TOLERANCE", 100.0)
    found = compare(plant, lambda logits, place: int(logits.argsort()[-2]) if place == 3 else None)
    assert found["verdict"] is Verdict.PASS and found["arms"][0]["near_ties"] == 4


def test_the_third_best_token_is_no_near_tie_of_the_best_two(
    plant: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.tensor([5.0, 5.0 - 1e-6, 4.0])
    monkeypatch.setattr(Replay, "logits", lambda self, ids: logits)
    question = plant.questions(1).questions[0]
    worker = Worker({"main": ModelSpec("main")}, plant.loader({"main": GreedyModel(plant, None)}))
    answers = run_chunk(worker.models, [Configuration("alone", 0)], [question], plant.asking())
    case = (question, answers[0], lossless.Place(0, 0, alone=0, speculative=2))
    (verdict,) = lossless.Judge(Configuration("k", 2), plant.asking(), (case,))(worker)
    assert verdict.gap < 1e-4 and not verdict.allowed


def test_an_answer_that_ends_early_differs_where_it_ends(plant: SimpleNamespace) -> None:
    long, short = (
        run_chunk(
            {"main": plant.Model(length=n)}, [Configuration("a", 0)], plant.questions(1).questions, plant.asking()
        )[0]
        for n in (20, 12)
    )
    place = first_difference(long, Answer(short.question_id, "b", "all", "all", short.turns))
    assert place is not None and place.position == 11 and place.speculative == plant.EOS
    assert first_difference(long, long) is None


def test_replay_agrees_with_the_model_and_is_more_precise() -> None:
    model = tiny_llama()
    ids = [1, 5, 9, 2]
    with torch.inference_mode():
        expected = model.double()(torch.tensor([ids])).logits[0, -1]
    found = Replay(tiny_llama()).logits(ids)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert Replay(tiny_llama(torch.bfloat16)).logits(ids).dtype == torch.float32


PROBS = {10: 0.6, 11: 0.3, 12: 0.1}


class SampledModel:
    """Samples three tokens with PROBS; `rule` says how a token after the first is drawn."""

    def __init__(self, plant: SimpleNamespace, rule: Any) -> None:
        self.tokenizer = plant.Tokenizer()
        self._rule = rule

    def generate(self, prompts: Any, params: Any) -> list[Any]:
        done = []
        for one in params:
            rng = random.Random(one.seed)
            first = rng.choices(list(PROBS), list(PROBS.values()))[0]
            rest = [self._rule(rng) for _ in range(one.max_new_tokens - 1)]
            stats = SimpleNamespace(rounds=())
            done.append(SimpleNamespace(token_ids=[first, *rest], stats=stats))
        return done


def right(rng: random.Random) -> int:
    """Speculative sampling with a uniform draft, done right."""
    draft = rng.choice(list(PROBS))
    if rng.random() < min(1.0, PROBS[draft] * 3):
        return draft
    left = {token: max(p - 1 / 3, 0.0) for token, p in PROBS.items()}
    return rng.choices(list(left), list(left.values()))[0]


def resamples_from_p(rng: random.Random) -> int:
    """The planted defect: after a rejection it draws from p, not from the remainder."""
    draft = rng.choice(list(PROBS))
    if rng.random() < min(1.0, PROBS[draft] * 3):
        return draft
    return rng.choices(list(PROBS), list(PROBS.values()))[0]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "passes"), [(right, True), (resamples_from_p, False)])
def test_the_distribution_test_tells_right_rules_from_wrong(plant: SimpleNamespace, rule: Any, passes: bool) -> None:
    sampling = Sampling(samples=2000)
    exact = exact_joint(lambda ids: PROBS, [1], 3)
    counts = [sample(SampledModel(plant, rule), [1], Configuration("k", 2), sampling, name).counts for name in "ab"]
    found = combined_(Configuration("k", 2), sampling.samples, [goodness_of_fit(c, exact) for c in counts])
    assert found.verdict.value == ("PASS" if passes else "FAIL") and found.degrees > 20
    baseline = [
        sample(SampledModel(plant, right), [1], Configuration("alone", 0), sampling, name).counts for name in "ab"
    ]
    fits = [homogeneity(a, b) for a, b in zip(baseline, counts, strict=True)]
    assert combined_(Configuration("k", 2), sampling.samples // 2, fits).verdict.value == ("PASS" if passes else "FAIL")


@pytest.mark.slow
def test_p_values_are_uniform_when_nothing_is_wrong() -> None:
    rng = np.random.default_rng(0)
    exact = exact_joint(lambda ids: PROBS, [1], 2)
    cells, mass = list(exact), np.array(list(exact.values()))
    p_values = []
    for _ in range(300):
        drawn = rng.multinomial(1000, mass)
        fit = goodness_of_fit(dict(zip(cells, drawn.tolist(), strict=True)), exact)
        p_values.append(combined_(Configuration("k", 1), 1000, [fit]).p_value)
    assert 0.4 < np.mean(p_values) < 0.6 and np.mean(np.array(p_values) < 0.05) < 0.1


@pytest.mark.slow
def test_the_stated_distance_is_found_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    exact = exact_joint(lambda ids: PROBS, [1], 2)
    cells, mass = list(exact), np.array(list(exact.values()))
    distance = detectable_distance(4000, len(cells) - 1)
    shifted = mass.copy()
    shifted[:2] += (-distance, distance)  # total variation `distance`
    failed = 0
    for _ in range(200):
        counts = dict(zip(cells, rng.multinomial(4000, shifted).tolist(), strict=True))
        failed += combined_(Configuration("k", 1), 4000, [goodness_of_fit(counts, exact)]).verdict is Verdict.FAIL
    assert failed >= 195


def test_a_sample_outside_the_support_fails() -> None:
    exact = exact_joint(lambda ids: PROBS, [1], 1)
    fit = goodness_of_fit(Counter({(10,): 600, (11,): 300, (12,): 99, (13,): 1}), exact)
    assert fit.impossible == 1 and combined_(Configuration("k", 1), 1000, [fit]).verdict is Verdict.FAIL


def test_rare_cells_are_pooled() -> None:
    exact = {(0,): 0.99, (1,): 0.004, (2,): 0.004, (3,): 0.002}
    fit = goodness_of_fit({(0,): 990, (1,): 4, (2,): 4, (3,): 2}, exact)
    assert fit == Fit(pytest.approx(0.0), 1, 0, drafted_degrees=0)


def test_what_only_the_first_token_shows_is_not_tested() -> None:
    """The first token comes from the prompt's forward pass: no draft had a part in it."""
    fit = goodness_of_fit({(0, 5): 500, (1, 5): 500}, {(0, 5): 0.5, (1, 5): 0.5})
    assert fit.degrees == 1 and fit.drafted_degrees == 0
    assert combined_(Configuration("k", 1), 1000, [fit]).verdict is Verdict.NOT_TESTED
    fit = goodness_of_fit({(0, 5): 500, (0, 6): 500}, {(0, 5): 0.5, (0, 6): 0.5})
    assert fit.drafted_degrees == 1 and combined_(Configuration("k", 1), 1000, [fit]).verdict is Verdict.PASS
    assert combined(Configuration("k", 1), 1000, [fit], [Sampled(Counter())]).verdict is Verdict.NOT_TESTED  # no drafts


def combined_(arm: Configuration, samples: int, fits: list[Fit]) -> Any:
    """The test of a configuration whose drafts were verified."""
    return combined(arm, samples, fits, [Sampled(Counter(), drafts=1, accepted=1)])
