"""Accuracy through lm-eval: same answers with and without speculation, a planted defect, resume, and its own side."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("lm_eval")
pytest.importorskip("scipy")

import lm_eval
from fakes import table_head
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

import specdec
import specdec.acceptance.judge
from evals.accuracy import task_functions as humaneval
from evals.accuracy.accuracy import AccuracyPlan, paired_accuracy, prepare, run, settings
from evals.accuracy.engine_lm import EngineLM
from evals.accuracy.lm_eval_model import SpecdecLM
from evals.cli.accuracy_commands import _print
from evals.data.arithmetic import problems
from evals.data.datasets import DATA_VARIABLE
from evals.errors import DataError
from evals.runs.conversations import Configuration, ModelSpec, Worker
from evals.runs.store import RunStore
from specdec.acceptance.accept import VerificationResult
from specdec.cli.main import cli
from specdec.errors import InvalidInputError
from specdec.loading.names import builtin_names, builtin_path

pytestmark = [
    pytest.mark.skipif("gsm-llama" not in builtin_names(), reason="no built-in target"),
    pytest.mark.usefixtures("unchecked"),
]
K = 3


@pytest.fixture(scope="module", autouse=True)
def few_problems() -> Iterator[None]:
    """Lists of generated problems end after 32: of 1000, which take a second a list, these tests ask the first 20."""
    with patch.object(humaneval, "problems", lambda split, n, seed: problems(split, min(n, 32), seed)):
        yield


@pytest.fixture(scope="module")
def model() -> Any:
    """The built-in target with a head that knows its bigrams: no training, and some drafts are accepted."""
    folder = builtin_path("gsm-llama")
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    head = table_head(target, disturbance=0.0)
    sizes: dict[str, Any] = {"max_num_seqs": 16, "kv_cache_tokens": 16384, "max_model_len": 512}
    return specdec.SpeculativeModel.from_pretrained(
        target, head, num_speculative_tokens=K, tokenizer=tokenizer, **sizes
    )


def evaluate(model: Any, folder: Path, **more: Any) -> dict[str, Any]:
    plan = AccuracyPlan(**{"tasks": ("specdec_arithmetic",), "k": K, "limit": 4, "chat_template": True, **more})
    worker = Worker({"main": ModelSpec("gsm-llama")}, lambda spec: model)
    facts = worker.facts()["main"]
    with RunStore(folder, settings(plan, facts)) as store:
        return run(model, facts, prepare(plan), store, lambda answers: None)


@pytest.mark.slow
@pytest.mark.thorough
def test_same_accuracy_and_same_answers(model: Any, tmp_path: Path) -> None:
    document = evaluate(model, tmp_path / "run")
    (row,) = document["scores"]
    assert (row["task"], row["filter"], row["total"]) == ("specdec_arithmetic", "strict-match", 4)
    assert row["right_a"] == row["right_b"] >= 3
    assert row["p_value"] is None and row["only_a"] == row["only_b"] == 0
    assert document["identical"] == {"questions": 4, "identical": 4, "differ": []}
    assert document["arms"][1]["metrics"]["tau"]["estimate"] > 1.0
    assert document["timing"]["void"] == "" and document["arms"][1]["timing"]["speedup"]["estimate"] > 0
    assert json.loads(json.dumps(document, allow_nan=False)) == document


@pytest.mark.slow
@pytest.mark.thorough
def test_a_planted_wrong_rule_drops_the_accuracy(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def accepts_everything(
        drafts: torch.Tensor, num_drafts: torch.Tensor, target_ids: torch.Tensor
    ) -> VerificationResult:
        return VerificationResult(num_drafts.clone(), target_ids.gather(1, num_drafts[:, None])[:, 0])

    monkeypatch.setattr(specdec.acceptance.judge, "accept_greedy", accepts_everything)
    document = evaluate(model, tmp_path / "run", limit=12, max_gen_toks=96)
    (row,) = document["scores"]
    assert row["p_value"] < 0.01 and row["high"] < 0
    assert document["identical"]["identical"] < 5


@pytest.mark.slow
@pytest.mark.thorough
def test_each_configuration_pays_for_its_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted defect: the second configuration begins with pages that the first one has left."""
    model = specdec.SpeculativeModel.from_pretrained("gsm-llama", "lookup", num_speculative_tokens=K, max_model_len=512)
    document = evaluate(model, tmp_path / "right", max_gen_toks=8)
    alone, fast = document["timing"]["prefix_cache"].values()
    assert alone == fast and alone["prompt_tokens"] > 100 and alone["hit_tokens"] == alone["cached_tokens"] == 0
    monkeypatch.setattr("evals.accuracy.accuracy.EngineLM", lambda *a, timed, **more: EngineLM(*a, **more))
    document = evaluate(model, tmp_path / "run", max_gen_toks=8)
    cached = document["timing"]["prefix_cache"]["K=3"]
    assert cached["hit_rate"] == cached["hit_tokens"] / cached["prompt_tokens"] > 0.7
    assert document["timing"]["void"] == "prompts were found in the prefix cache and not paid for"
    assert document["arms"][1]["timing"]["speedup"]["estimate"] is None
    console = Console(record=True, file=io.StringIO(), width=200)
    _print(console, document)
    assert "speed-up: not shown, " in (text := console.export_text()) and "speed-up: 1" not in text
    assert f"K=3: {cached['hit_tokens']:,} of {cached['prompt_tokens']:,} prompt tokens found" in text


class Killed(Exception):
    """Stands for the process being killed."""


@pytest.mark.slow
@pytest.mark.thorough
def test_a_killed_run_is_continued(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = AccuracyPlan(("specdec_arithmetic",), K, limit=3, chat_template=True)
    facts = Worker({"main": ModelSpec("gsm-llama")}, lambda spec: model).facts()["main"]
    done: list[Any] = []

    def kill(answers: Any) -> None:
        done.extend(answers)
        if len(done) == 4:
            raise Killed

    with pytest.raises(Killed), RunStore(tmp_path / "run", settings(plan, facts)) as store:
        run(model, facts, prepare(plan), store, kill)
    kept = len((tmp_path / "run" / "answers.jsonl").read_text().splitlines())
    asked: list[int] = []
    plain = model.generate_iter
    monkeypatch.setattr(model, "generate_iter", lambda p, q: asked.append(len(p)) or plain(p, q))
    document = run(model, facts, prepare(plan), RunStore(tmp_path / "run", settings(plan, facts)), lambda answers: None)
    assert kept == 4 and sum(asked) == 2
    assert document["identical"]["identical"] == 3
    assert "the run was interrupted" in document["timing"]["void"]
    assert document["arms"][1]["timing"]["speedup"]["estimate"] is None


@pytest.mark.slow
@pytest.mark.thorough
def test_missing_data_is_named(model: Any, tmp_path: Path) -> None:
    """(tests/evals/cli/test_commands.py has the unknown task: lm-eval reads 13,000 files for one.)"""
    with pytest.raises(DataError, match=r"test\.jsonl does not exist|train\.jsonl does not exist"):
        evaluate(model, tmp_path / "b", tasks=("gsm8k",), data_dir=tmp_path)


@pytest.mark.slow
@pytest.mark.thorough
def test_no_network_is_named_with_its_remedy(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> Any:
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr("datasets.load_dataset", offline)
    message = r"gsm8k cannot be loaded \(Couldn't reach the Hub\)\. .* --data FOLDER, .* specdec_arithmetic"
    with pytest.raises(DataError, match=message):
        evaluate(model, tmp_path / "b", tasks=("gsm8k",))


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get(DATA_VARIABLE), reason=f"{DATA_VARIABLE} is not set")
@pytest.mark.thorough
def test_gsm8k_reads_local_data_with_its_own_shots(model: Any, tmp_path: Path) -> None:
    """Of a folder with the first questions: test_datasets.py reads them all."""
    folder = tmp_path / "data" / "gsm8k"
    folder.mkdir(parents=True)
    for name in ("train.jsonl", "test.jsonl"):
        lines = (Path(os.environ[DATA_VARIABLE]) / "gsm8k" / name).read_text("utf-8").splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:8]), encoding="utf-8")
    document = evaluate(
        model, tmp_path / "run", tasks=("gsm8k",), data_dir=folder.parent, limit=4, num_fewshot=0, max_gen_toks=64
    )
    assert {row["filter"] for row in document["scores"]} == {"strict-match", "flexible-extract"}
    assert document["identical"]["identical"] == 4


def request(context: str, index: int = 0, **gen_kwargs: Any) -> Instance:
    arguments = (context, {"until": ["Question:"], "do_sample": False, **gen_kwargs})
    return Instance("generate_until", {}, arguments, 0, ("task", index, 1))


@pytest.mark.slow
def test_unknown_arguments_are_refused(model: Any) -> None:
    lm = EngineLM(model, Configuration("x", K))
    with pytest.raises(InvalidInputError, match=r"not supported: \['repetition_penalti'\]"):
        lm.generate_until([request("a", repetition_penalti=1.2)])
    with pytest.raises(InvalidInputError, match=r"unknown model_args 'drfat': did you mean draft\?"):
        SpecdecLM("gsm-llama", drfat="auto")


def test_every_option_of_the_model_can_be_given(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """lm-eval passes on words: what they say reaches from_pretrained."""
    specs: list[ModelSpec] = []
    monkeypatch.setattr(ModelSpec, "load", lambda spec: (specs.append(spec), model)[1])
    given = {"kv_cache_dtype": "fp8", "cuda_graphs": True, "mtp_concat": "hidden_first", "mtp_feedback": "pre_norm"}
    SpecdecLM("gsm-deepseek", draft="auto", **given)
    assert {name: getattr(specs[0].options, name) for name in given} == given


@pytest.mark.slow
@pytest.mark.thorough
def test_repeats_of_a_sampled_request_differ_and_order_is_kept(model: Any) -> None:
    lm = EngineLM(model, Configuration("x", K), max_gen_toks=24)
    one = request("<|user|>How many apples?<|end|><|assistant|>", do_sample=True, temperature=1.5)
    answers = lm.generate_until([one] * 6)
    assert len(set(answers)) > 3
    assert lm.generate_until([one] * 6) == answers
    assert lm.get_model_info()["specdec_stats"]["tau"] > 1.0


def test_scoring_agrees_with_the_model(model: Any) -> None:
    lm = EngineLM(model, Configuration("x", 0))
    ids = lm.tok_encode("2+2 = 4")
    (score,) = lm._loglikelihood_tokens([(None, ids[:3], ids[3:])])
    with torch.no_grad():
        logp = model.hf_model(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert score[0] == pytest.approx(sum(float(logp[i - 1, ids[i]]) for i in range(3, len(ids))), abs=1e-4)


@pytest.mark.long
def test_stock_hf_model_gives_the_same_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our model through lm-eval's own command line, and lm-eval's own hf model, on the same task.

    lm-eval's own tasks are left out: it would read their 13,000 files.
    """
    pytest.importorskip("accelerate")
    folder = str(builtin_path("gsm-llama"))
    asked = ["eval", "lm-eval", "--model", "specdec", "--model_args", f"pretrained={folder}", "--device", "cpu"]
    asked += ["--tasks", "specdec_arithmetic", "--limit", "6", "--batch_size", "3"]
    asked += ["--apply_chat_template", "--log_samples"]
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    monkeypatch.setattr(sys, "argv", ["specdec"])
    cli([*asked, "--output_path", str(tmp_path / "results.json")], standalone_mode=False)
    (samples,) = tmp_path.glob("samples_*.jsonl")
    ours = [json.loads(line) for line in samples.read_text().splitlines()]
    stock = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={folder},dtype=float32",
        tasks=["specdec_arithmetic"],
        limit=6,
        batch_size=3,
        device="cpu",
        apply_chat_template=True,
        task_manager=prepare(AccuracyPlan(("specdec_arithmetic",), K)).manager,
        bootstrap_iters=0,
    )
    assert len(ours) == 6
    assert [told(row) for row in ours] == [told(row) for row in stock["samples"]["specdec_arithmetic"]]


def told(row: dict[str, Any]) -> tuple[Any, ...]:
    """What lm-eval asked, was answered and made of it."""
    return row["prompt_hash"], json.loads(json.dumps(row["resps"])), row["exact_match"]


def test_mcnemar_by_hand() -> None:
    a = [True] * 8 + [False] * 2 + [True] * 10
    b = [False] * 8 + [True] * 2 + [True] * 10
    found = paired_accuracy(a, b)
    assert [found[name] for name in ("only_a", "only_b", "right_a", "right_b")] == [8, 2, 18, 12]
    assert found["p_value"] == pytest.approx(2 * (1 + 10 + 45) / 1024)  # two-sided binomial tail of 2 in 10
    assert found["difference"] == pytest.approx(-0.3) and found["low"] < -0.3 < found["high"]


GOOD = "def f(x):\n    return x + 1\n"
TEST = "def check(candidate):\n    assert candidate(1) == 2\ncheck(f)\n"


@pytest.mark.parametrize(
    ("program", "passed"),
    [
        (GOOD, True),
        (GOOD.replace("+ 1", "+ 2"), False),
        ("import sys\nsys.exit(0)\n", False),
        ("import os\nos._exit(0)\n", False),
        pytest.param("while True:\n    pass\n", False, marks=pytest.mark.slow),
        ("x = [0] * (1 << 33)\n" + GOOD, False),
        ("def f(x:\n", False),
    ],
)
@pytest.mark.cases(1)
def test_the_scorer_cannot_be_fooled_by_leaving_early(program: str, passed: bool) -> None:
    assert humaneval.passes(f"{program}\n{TEST}", seconds=3.0 if "while" not in program else 0.5) is passed


@pytest.mark.slow
@pytest.mark.thorough
def test_what_a_candidate_started_is_ended_with_it(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    child = f"import time; time.sleep(1); open({str(mark)!r}, 'w')"
    program = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}])\n{GOOD}"
    assert humaneval.passes(f"{program}\n{TEST}", seconds=2.0)
    subprocess.run(["sleep", "1.5"], check=True)
    assert not mark.exists()


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get(DATA_VARIABLE), reason=f"{DATA_VARIABLE} is not set")
@pytest.mark.thorough
def test_the_canonical_solutions_pass() -> None:
    path = Path(os.environ[DATA_VARIABLE]) / "humaneval" / "HumanEval.jsonl"
    docs = [json.loads(line) for line in path.read_text("utf-8").splitlines()][::8]
    for doc in docs:
        ((program,),) = humaneval.programs([[doc["canonical_solution"]]], [doc])
        assert humaneval.pass_at_1([f"{doc['test']}\ncheck({doc['entry_point']})"], [[program]]) == {"pass@1": 1.0}
