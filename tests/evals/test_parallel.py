"""Evaluations of a target that is divided among ranks: what they measure is what they measure with one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from evals.data.datasets import load
from evals.lossless.greedy import Replay, check_room
from evals.runs.conversations import Asking, Configuration, ModelSpec, Work, Worker
from specdec.cli.main import cli
from specdec.errors import OutOfDeviceMemoryError
from specdec.options import LoadOptions
from specdec.requests.sampling import SamplingParams
from tests.rank_server import forked_ranks

__all__ = ["forked_ranks"]
K = 3


@pytest.fixture(scope="module")
def workers(forked_ranks: None) -> Iterator[dict[int, Worker]]:
    """By ranks: gsm-llama with its head."""
    pytest.importorskip("accelerate")
    options: dict[str, Any] = {"num_speculative_tokens": K, "max_num_seqs": 4, "max_model_len": 256, "device": "cpu"}
    specs = {
        size: {"main": ModelSpec("gsm-llama", "auto", LoadOptions(**options, tensor_parallel_size=size))}
        for size in (1, 2)
    }
    found = {size: Worker(spec) for size, spec in specs.items()}
    yield found
    for worker in found.values():
        worker.models["main"].close()


@pytest.mark.slow
@pytest.mark.thorough
def test_answers_and_their_rounds_are_those_of_one_rank(workers: dict[int, Worker]) -> None:
    """What acceptance, losslessness and accuracy are computed from; and who has which weights."""
    chunk = tuple(load("arithmetic", limit=3).questions)
    arms = (Configuration("alone", 0, "main"), Configuration("K=3", K, "main"))
    asking = Asking(SamplingParams(max_new_tokens=16), True)
    found = {size: worker.answer(Work(0, chunk, arms, asking)) for size, worker in workers.items()}
    told = {size: [(a.question_id, a.arm, a.error, a.token_ids, a.rounds) for a in own] for size, own in found.items()}
    assert told[2] == told[1] and len(told[1]) == 6 and not any(answer.error for answer in found[1])
    assert sum(record.accepted for answer in found[1] for record in answer.rounds) > 0
    facts = {size: worker.facts()["main"] for size, worker in workers.items()}
    assert facts[2]["target_sha256"].startswith("rank 0 of 2: ") and facts[2]["head_sha256"] == facts[1]["head_sha256"]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_replay_is_of_the_whole_target(workers: dict[int, Worker]) -> None:
    ids = list(range(5, 30))
    right, found = (Replay.of(workers[size].models["main"]).all_logits(ids) for size in (1, 2))
    assert found.dtype == torch.float64 and torch.equal(found, right)


@pytest.mark.slow
@pytest.mark.thorough
def test_loglikelihoods_of_lm_eval_run_on_all_ranks(workers: dict[int, Worker]) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from evals.accuracy.engine_lm import EngineLM

    texts = [("Anna has 12 apples and", " buys 8 more."), ("Tom reads 7 pages a day. How many pages", " does he")]
    asked = [Instance("loglikelihood", {}, each, i) for i, each in enumerate(texts)]
    scores = [
        EngineLM(workers[size].models["main"], Configuration("K=3", K, "main")).loglikelihood(asked) for size in (1, 2)
    ]
    for (right, greedy), (found, as_greedy) in zip(*scores, strict=True):
        assert found == pytest.approx(right, abs=1e-4) and as_greedy == greedy and right < -0.01


def test_lm_evals_own_device_is_rank_0s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command line says cuda:0 where nothing was asked for."""
    pytest.importorskip("lm_eval")
    from evals.accuracy.lm_eval_model import _load_options

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given = {"device": "cuda:0", "tensor_parallel_size": 2}
    assert _load_options(given, 1, None).device is None
    assert str(_load_options({"device": "cuda:0"}, 1, None).device) == "cuda:0"
    assert str(_load_options({**given, "device": "cuda:1"}, 1, None).device) == "cuda:1"  # refused where it is loaded


def test_a_replay_without_room_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    with torch.device("meta"):
        weights = sum(p.numel() for p in LlamaForCausalLM(config).parameters())
    free = [4 * weights]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 1 << 30))
    check_room(config, torch.float32, torch.device("cuda"))
    free[0] -= 1
    check_room(config, torch.float32, torch.device("cpu"))
    with pytest.raises(OutOfDeviceMemoryError, match=r"replays the whole target in float32, .* on cuda; .*kv-cache"):
        check_room(config, torch.float32, torch.device("cuda"))


@pytest.fixture
def evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Run `specdec eval …` on gsm-llama with so many ranks; the document it wrote."""
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)

    def run(command: str, ranks: int, *arguments: str) -> dict[str, Any]:
        model = ("--device", "cpu", "--k", "3", "--tensor-parallel-size", str(ranks), "--run-dir", f"run-{ranks}")
        done = CliRunner().invoke(cli, ["eval", command, *model, "--output", f"{ranks}.json", *arguments])
        assert done.exit_code == 0, done.output
        document: dict[str, Any] = json.loads(Path(f"{ranks}.json").read_text())
        return document

    return run


@pytest.mark.long
@pytest.mark.slow
def test_losslessness_of_two_ranks(evaluate: Callable[..., dict[str, Any]]) -> None:
    asked = ("--data", "arithmetic", "--limit", "3", "--max-new-tokens", "24", "--samples", "100")
    one, two = (evaluate("lossless", ranks, *asked, "--sample-prompts", "1") for ranks in (1, 2))
    assert one["verdict"] == two["verdict"] == "PASS"
    assert two["greedy"] == one["greedy"] and two["sampled"] == one["sampled"]


@pytest.mark.long
@pytest.mark.slow
def test_humaneval_on_two_ranks(evaluate: Callable[..., dict[str, Any]]) -> None:
    """Programs run in children of rank 0's process, which hold nothing of the ranks' open."""
    pytest.importorskip("lm_eval")
    rows = {"task_id": "HumanEval/0", "prompt": "def add(x):\n    ", "canonical_solution": "return x + 1\n"}
    rows |= {"test": "def check(f):\n    assert f(1) == 2\n", "entry_point": "add"}
    Path("humaneval").mkdir()
    Path("humaneval/HumanEval.jsonl").write_text(json.dumps(rows) + "\n")
    asked = ("--data", os.getcwd(), "--max-new-tokens", "24", "--confirm-run-unsafe-code")
    documents = [evaluate("humaneval", ranks, *asked, "--max-model-len", "1280") for ranks in (1, 2)]
    assert documents[1]["identical"] == documents[0]["identical"] == {"questions": 1, "identical": 1, "differ": []}
