"""`specdec eval` on recurrent and hybrid targets from a folder: every command as it is for the other models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from fakes import LetterTokenizer, enlarge, wrap
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from drafters.eagle3.checkpoint import save_eagle3
from drafters.eagle3.head import Eagle3Head
from drafters.eagle3.spec import Eagle3Spec
from evals.acceptance.acceptance import Plan, settings, sweep
from evals.lossless.lossless import check
from evals.runs.conversations import ModelSpec, Worker
from evals.runs.store import RunStore
from specdec import SpeculativeModel
from specdec.cli.main import cli
from specdec.loading.names import builtin_names, builtin_path
from tests.hybrids import RecallHead, greedy_text, tiny_config, tiny_hybrid

pytest.importorskip("scipy")
pytestmark = [
    pytest.mark.skipif("gsm-llama" not in builtin_names(), reason="no built-in tokenizer"),
    pytest.mark.usefixtures("unchecked"),
]
VOCAB, SAID = 2048, (70, 75, 80)
"""Tokens of the tokenizer, and those that the tiny models say: a head that guesses among them is right now and then."""
KINDS = ("mamba2", "qwen3_next", "lfm2")
CHECKED = [pytest.param(kind, marks=[pytest.mark.long] * (kind == "lfm2")) for kind in KINDS]
"""Checks that are alike but for the target take two of them or one; each is under several commands."""
Folders = tuple[str, str]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Folders]:
    """The folders of a tiny random model of a type, with a tokenizer, and of a random EAGLE-3 head for it."""
    made: dict[str, Folders] = {}

    def folders(name: str) -> Folders:
        if name not in made:
            made[name] = _save(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folders


def _save(name: str, folder: Path) -> Folders:
    torch.manual_seed(0)
    fields = {"vocab_size": VOCAB, "max_position_embeddings": 2048, "tie_word_embeddings": False}
    target = AutoModelForCausalLM.from_config(tiny_config(name, **fields), attn_implementation="eager").eval()
    enlarge(target.requires_grad_(False))
    others = torch.ones(VOCAB, dtype=torch.bool)
    others[list(SAID)] = False
    target.get_output_embeddings().weight[others] = 0
    target.generation_config = GenerationConfig()
    target.save_pretrained(folder / "target")
    AutoTokenizer.from_pretrained(builtin_path("gsm-llama")).save_pretrained(folder / "target")
    spec = Eagle3Spec(
        hidden_size=target.config.hidden_size,
        target_hidden_size=target.config.hidden_size,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
        draft_vocab_size=len(SAID),
        aux_layers=(1, 2, 3),
    )
    head = Eagle3Head(spec, target.get_input_embeddings().weight, d2t=torch.tensor(SAID) - torch.arange(len(SAID)))
    enlarge(head.eval().requires_grad_(False), 1)
    save_eagle3(head, folder / "head")
    return str(folder / "target"), str(folder / "head")


@pytest.fixture
def evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, dict[str, Any]]]:
    """Run `specdec eval ...` with these folders: exit code, what it printed, and the document it wrote."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPECDEC_DATA", raising=False)

    def run(command: str, folders: Folders, *arguments: str, length: str = "256") -> tuple[int, str, dict[str, Any]]:
        model = ["--model", folders[0], "--draft", folders[1], "--device", "cpu", "--dtype", "float32"]
        rest = [*model, "--max-model-len", length, "--output", "o.json", *arguments]
        done = CliRunner().invoke(cli, ["eval", command, *rest])
        document = json.loads(Path("o.json").read_text()) if Path("o.json").exists() else {}
        return done.exit_code, done.output, document

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.thorough
def test_lossless(saved: Any, evaluate: Any, name: str) -> None:
    asked = ("--data", "arithmetic", "--limit", "4", "--max-new-tokens", "32", "--k", "3", "--mode", "greedy")
    code, text, document = evaluate("lossless", saved(name), *asked)
    assert code == 0 and "PASS" in text, text
    (arm,) = document["greedy"]["arms"]
    assert (arm["questions"], arm["identical"]) == (4, 4)


@pytest.mark.slow
@pytest.mark.thorough
def test_lossless_fails_where_accepted_drafts_are_not_replayed(
    saved: Any, evaluate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.extras.recurrent_states.replay_of", lambda start, folded: 0 * start)
    asked = ("--data", "arithmetic", "--limit", "4", "--max-new-tokens", "32", "--k", "3", "--mode", "greedy")
    code, text, _ = evaluate("lossless", saved("mamba2"), *asked)
    assert code == 1 and "FAIL" in text, text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba2", pytest.param("qwen3_next", marks=pytest.mark.long)])
@pytest.mark.thorough
def test_sampled_answers_are_drawn_from_the_targets_distribution(
    plant: SimpleNamespace, name: str, tmp_path: Path
) -> None:
    plan = Plan(plant.questions(4), sweep((3,)), replace(plant.asking(), templated=False), batch_size=8, warmup=0)
    prompts = [LetterTokenizer()(question.turns[0])["input_ids"] for question in plan.data.questions]
    head = RecallHead([greedy_text(name, prompt, 8) for prompt in prompts], 0.7)
    sizes = {"max_num_seqs": 32, "max_num_batched_tokens": 512, "kv_cache_tokens": 4096, "max_model_len": 128}
    model = wrap(tiny_hybrid(name), head, num_speculative_tokens=3, **sizes)
    executor = Worker({"main": ModelSpec("main")}, lambda spec: model)
    store = RunStore(tmp_path / "run", settings(plan, executor.facts()))
    found = check(executor, plan, store, lambda answers: None, mode="sampled", samples=60, places=1)
    assert found["passed"] and [arm["verdict"] for arm in found["sampled"]["arms"]] == ["PASS", "PASS"]
    assert found["sampled"]["arms"][1]["drafts"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba2", pytest.param("qwen3_next", marks=pytest.mark.long)])
@pytest.mark.thorough
def test_acceptance(saved: Any, evaluate: Any, name: str) -> None:
    asked = ("--data", "arithmetic", "--limit", "4", "--max-new-tokens", "32", "--k", "1,3", "--batch-size", "2")
    code, text, document = evaluate("acceptance", saved(name), *asked)
    assert code == 0, text
    arms = {arm["name"]: arm for arm in document["arms"]}
    assert arms["K=3"]["identical_to_target_alone"] == {"questions": 4, "identical": 4}
    assert 1.0 < arms["K=3"]["metrics"]["tau"]["estimate"] < 4.0


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKED[::2])
@pytest.mark.thorough
def test_gsm8k(saved: Any, evaluate: Any, name: str, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    rows = [{"question": f"Tom has {i} eggs. How many?", "answer": f"So {i}.\n#### {i}"} for i in range(9)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ("--data", str(tmp_path), "--limit", "5", "--max-new-tokens", "24", "--k", "3", "--num-fewshot", "2")
    code, text, document = evaluate("gsm8k", saved(name), *asked)
    assert code == 0, text
    assert document["identical"] == {"questions": 5, "identical": 5, "differ": []}
    assert document["arms"][1]["metrics"]["tau"]["estimate"] > 1.0


@pytest.fixture
def humaneval_data(tmp_path: Path) -> str:
    row = {
        "task_id": "HumanEval/0",
        "prompt": "def add(x):\n    ",
        "canonical_solution": "return x + 1\n",
        "test": "def check(f):\n    assert f(1) == 2\n",
        "entry_point": "add",
    }
    (tmp_path / "humaneval").mkdir()
    (tmp_path / "humaneval" / "HumanEval.jsonl").write_text(json.dumps(row) + "\n")
    return str(tmp_path)


@pytest.mark.slow
@pytest.mark.thorough
def test_humaneval(saved: Any, evaluate: Any, humaneval_data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task asks for 1,024 tokens, and a random model never stops: it is told to after 96."""
    pytest.importorskip("lm_eval")
    from evals.accuracy import generation

    asked_for = generation.normalize_gen_kwargs
    monkeypatch.setattr(generation, "normalize_gen_kwargs", lambda *given: {**asked_for(*given), "max_gen_toks": 96})
    asked = ("--data", humaneval_data, "--k", "3", "--confirm-run-unsafe-code")
    code, text, document = evaluate("humaneval", saved("lfm2"), *asked)
    assert code == 0, text
    assert document["identical"] == {"questions": 1, "identical": 1, "differ": []}
    assert document["arms"][1]["metrics"]["tau"]["estimate"] > 1.0


@pytest.mark.slow
def test_a_task_that_leaves_no_room_for_a_prompt_is_refused(saved: Any, evaluate: Any, humaneval_data: str) -> None:
    pytest.importorskip("lm_eval")
    asked = ("--data", humaneval_data, "--k", "3", "--confirm-run-unsafe-code")
    code, text, _ = evaluate("humaneval", saved("mamba2"), *asked)
    assert code == 2 and "leaves no room for a prompt in max_model_len=256; raise max_model_len" in " ".join(
        text.split()
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.cases(1)
def test_scores_of_given_texts_are_the_models_own(saved: Any, name: str) -> None:
    """lm-eval's loglikelihood runs the user's model between rounds of ours."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from evals.accuracy.engine_lm import EngineLM
    from evals.runs.conversations import Configuration

    target, head = saved(name)
    model = SpeculativeModel.from_pretrained(target, head, num_speculative_tokens=3, device="cpu", max_model_len=256)
    lm = EngineLM(model, Configuration("K=3", 3), max_gen_toks=16)
    plain = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()

    def right(context: list[int], continuation: list[int]) -> float:
        with torch.no_grad():
            logp = plain(torch.tensor([context + continuation]), use_cache=False).logits[0].log_softmax(-1)
        return sum(float(logp[len(context) + i - 1, token]) for i, token in enumerate(continuation))

    asked = [Instance("generate_until", {}, ("2 + 2 =", {"until": [], "do_sample": False}), 0, ("task", 0, 1))]
    before = lm.generate_until(asked)
    (score, _), (other, _) = lm.loglikelihood(
        [Instance("loglikelihood", {}, ("2 + 2 =", text), i, ("task", i, 1)) for i, text in enumerate((" 4", " five"))]
    )
    ids = lm.tok_encode("2 + 2 =")
    for found, text in ((score, " 4"), (other, " five")):
        assert found == pytest.approx(right(ids, lm.tok_encode("2 + 2 =" + text)[len(ids) :]), abs=1e-4)
    (rolling,) = lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("Tom has 3 eggs.",), 0, ("t", 0, 1))])
    assert rolling == pytest.approx(right([lm.prefix_token_id], lm.tok_encode("Tom has 3 eggs.")), abs=1e-3)
    assert lm.generate_until(asked) == before
