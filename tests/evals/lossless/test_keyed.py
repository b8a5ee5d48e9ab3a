"""Sampled answers of a keyed model are compared token by token; a difference is judged with the noise of its place."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import specdec.acceptance.judge as judge
from evals.data.datasets import load
from evals.lossless.greedy import FLOAT32_TOLERANCE
from evals.lossless.lossless import answers_to, identity
from evals.runs.conversations import Asking, Configuration, ModelSpec, Worker, prompt_of, question_seed
from evals.runs.executor import Plan
from specdec.acceptance.judge import keyed_ids
from specdec.model import SpeculativeModel
from specdec.requests.noise import gumbel
from specdec.requests.sampling import SamplingParams
from specdec.rounds.randomness import Role, position_bits, request_key

K = 3
ASKING = Asking(SamplingParams(max_new_tokens=24, temperature=2.0), templated=True, seed=5)


@cache
def worker() -> Worker:
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 256, "sampling": "keyed"}
    model = SpeculativeModel.from_pretrained("gsm-llama", "auto", num_speculative_tokens=K, **sizes)
    return Worker({"main": ModelSpec("gsm-llama")}, lambda spec: model)


def compared() -> tuple[Plan, Any]:
    arms = Configuration("target alone", 0), Configuration("K=3", K)
    plan = Plan(load("arithmetic", limit=6), arms, ASKING, batch_size=6)
    found = identity(worker(), plan, answers_to(worker(), plan))
    return plan, found | found["arms"][0]


@pytest.mark.thorough
def test_sampled_answers_are_identical() -> None:
    _, found = compared()
    assert (found["verdict"], found["identical"], found["near_ties"]) == ("PASS", 6, 0) and found["accepted"] > 5


@pytest.mark.thorough
def test_noise_of_another_position_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """And how far behind the tokens are is said of logits over the temperature, with the right noise."""

    def late(logits: Any, index: Any, sampling: Any) -> Any:
        right = sampling.seed
        try:
            if index.shape[1] > 1:
                sampling.__dict__["seed"] = right.roll(-1, 1)
            return keyed_ids(logits, index, sampling)
        finally:
            sampling.__dict__["seed"] = right

    monkeypatch.setattr(judge, "keyed_ids", late)
    plan, found = compared()
    assert found["verdict"] == "FAIL" and found["defects"] > 3
    one = next(each for each in found["divergences"] if None not in (each["alone"], each["speculative"]))
    assert not one["allowed"] and one["behind"] > FLOAT32_TOLERANCE
    model = worker().models["main"]
    question = next(each for each in plan.data.questions if each.id == one["question_id"])
    prompt = prompt_of(model.tokenizer, question, ASKING)
    params = SamplingParams(
        max_new_tokens=one["position"] + 1,
        temperature=2.0,
        num_speculative_tokens=0,
        seed=question_seed(5, question.id, 0),
    )
    ids = prompt + model.generate([prompt], params)[0].token_ids
    assert ids[-1] == one["alone"]
    key = np.array([request_key(params.seed or 0, 0)], np.uint64)
    seed = position_bits(key, np.array([len(ids) - 1]), Role.TOKEN).view(np.int64)
    with torch.inference_mode():
        logits = model.hf_model(torch.tensor([ids[:-1]]), use_cache=False).logits[0, -1]
    scores = logits / 2.0 + gumbel(torch.from_numpy(seed), torch.arange(len(logits)))
    assert int(scores.argmax()) == one["alone"]
    assert float(scores.max() - scores[one["speculative"]]) == pytest.approx(one["behind"], abs=1e-3)
