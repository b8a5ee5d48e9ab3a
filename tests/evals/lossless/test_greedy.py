"""Verdicts on divergences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from evals.acceptance.acceptance import sweep
from evals.lossless import greedy as lossless
from evals.lossless.greedy import Replay, compare_greedy, first_difference
from evals.runs.answers import Answer
from evals.runs.conversations import Configuration, ModelSpec, Work, Worker, run_chunk
from evals.runs.verdict import Verdict


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
    executor = Worker({"main": ModelSpec("main")}, plant.loader({"main": model}))
    data, arms = plant.questions(4), sweep((2,))
    asking = plant.asking()
    asking = type(asking)(asking.params, templated=False)
    answers = run_chunk({"main": model}, Work(0, data.questions, arms, asking))
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
    answers = run_chunk(worker.models, Work(0, (question,), (Configuration("alone", 0),), plant.asking()))
    case = (question, answers[0], lossless.Difference(0, 0, alone=0, speculative=2))
    (verdict,) = lossless.judge(worker, Configuration("k", 2), plant.asking(), (case,))
    assert verdict.gap < 1e-4 and not verdict.allowed


def test_an_answer_that_ends_early_differs_where_it_ends(plant: SimpleNamespace) -> None:
    long, short = (
        run_chunk(
            {"main": plant.Model(length=n)},
            Work(0, plant.questions(1).questions, (Configuration("a", 0),), plant.asking()),
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
