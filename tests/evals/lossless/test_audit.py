"""Answers of another engine: transformers' own pass, and those of another temperature or with another token do not."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import random_prompts, tiny_llama, wrap
from transformers import AutoModelForCausalLM

from evals.data.datasets import load
from evals.errors import DataError
from evals.lossless.audit import audit
from evals.runs.conversations import Asking, ModelSpec, Worker, prompt_of
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams

pytest.importorskip("scipy")
Rows = list[dict[str, Any]]


def written(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@cache
def tiny() -> Worker:
    model = wrap(tiny_llama())
    return Worker({"main": ModelSpec("tiny")}, lambda spec: model)


def greedy(tokens: int = 12) -> Rows:
    model = tiny_llama()
    prompts = random_prompts((5, 9, 14))
    made = [model.generate(torch.tensor([p]), max_new_tokens=tokens, do_sample=False)[0].tolist() for p in prompts]
    return [
        {"prompt": p, "tokens": ids[len(p) :], "id": i} for i, (p, ids) in enumerate(zip(prompts, made, strict=True))
    ]


def test_greedy_answers_of_transformers_pass_and_another_token_is_named(tmp_path: Path) -> None:
    rows = greedy()
    found = audit(tiny(), written(tmp_path / "a.jsonl", rows))
    assert found["verdict"] == "PASS" and found["audit"]["greedy"] == 3 and found["audit"]["behind"] == []
    rows[1]["tokens"][4] = (rows[1]["tokens"][4] + 1) % 60
    found = audit(tiny(), written(tmp_path / "b.jsonl", rows))
    first = found["audit"]["behind"][0]
    assert found["verdict"] == "FAIL" and first["token"] == "b.jsonl:2, token 4" and not first["allowed"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": [1, 2]}, r"a.jsonl:1: prompt \(text or ids\) and tokens \(ids\) are needed"),
        ({"prompt": [1], "tokens": [3], "repetition_penalty": 1.1}, "allowed are prompt, tokens, top_k"),
        ({"prompt": [1], "tokens": ["a"]}, "are needed"),
        ({"prompt": [1], "tokens": [3, 10**6]}, "ids below "),
        ({"prompt": 5, "tokens": [3]}, "are needed"),
        ({"prompt": [1], "tokens": [3], "top_p": 2.0}, "a.jsonl:1: top_p=2.0"),
    ],
)
def test_a_bad_line_is_refused(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        audit(tiny(), written(tmp_path / "a.jsonl", [row]))


def test_no_answers_are_not_a_pass(tmp_path: Path) -> None:
    assert audit(tiny(), written(tmp_path / "a.jsonl", []))["verdict"] == "NOT TESTED"


@pytest.mark.thorough
@pytest.mark.slow
def test_sampled_answers_of_transformers_pass_and_those_of_another_temperature_fail(tmp_path: Path) -> None:
    model = SpeculativeModel.from_pretrained("gsm-llama", device="cpu", dtype="float32")
    alone = AutoModelForCausalLM.from_pretrained(model.checkpoint.path, dtype=torch.float32)
    asking = Asking(SamplingParams(), templated=True)
    prompts = [prompt_of(model.tokenizer, question, asking) for question in load("arithmetic", limit=30).questions]
    worker = Worker({"main": ModelSpec("gsm-llama")}, lambda spec: model)

    def audited(actual: float, stated: float) -> dict[str, Any]:
        torch.manual_seed(0)
        sampling = {"do_sample": True, "temperature": actual, "top_k": 0, "max_new_tokens": 64}
        made = [alone.generate(torch.tensor([p]), **sampling)[0].tolist()[len(p) :] for p in prompts]
        rows = [{"prompt": p, "tokens": ids, "temperature": stated} for p, ids in zip(prompts, made, strict=True)]
        return dict(audit(worker, written(tmp_path / "a.jsonl", rows)))

    right = audited(2.0, stated=2.0)
    assert right["verdict"] == "PASS" and right["audit"]["powers"]["temperature 10 % too high"] > 0.95
    assert audited(2.2, stated=2.0)["verdict"] == "FAIL"
