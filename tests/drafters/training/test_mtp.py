"""A module is trained on its own outputs: it learns, a killed run goes on, the result loads and drafts better."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from fakes import random_prompts, wrap
from rich.console import Console
from safetensors.torch import load_file

import specdec.extensions.training.run
from drafters.errors import HeadLoadError
from drafters.families import FAMILIES, family_of
from drafters.mtp.checkpoint import load_mtp, save_mtp
from drafters.mtp.convention import MtpConvention
from drafters.mtp.spec import mtp_target
from drafters.training.data import AnswerSet, answer_set
from drafters.training.state import TrainConfig
from drafters.training.trainer import TrainResult
from specdec.cli.train import train
from specdec.errors import InvalidInputError
from specdec.extensions.training.run_folder import locked
from specdec.loading.names import builtin_path
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from specdec.requests.stats import pool_requests

pytestmark = pytest.mark.slow

SHORT: dict[str, Any] = {
    "batch_size": 8,
    "ttt_steps": 3,
    "warmup_steps": 2,
    "learning_rate": 3e-3,
    "pad_multiple": 8,
    "held_out_every": 4,
    "checkpoint_every": 3,
    "log_every": 2,
}


class Killed(Exception):
    """Stands for a process that ends in the middle of a run."""


class Bench:
    """A tiny random target, its random module's checkpoint, and the target's answers."""

    def __init__(self, case: Any, folder: Path) -> None:
        for name, tensor in case.tensors.items():
            if name.endswith("eh_proj.weight"):  # knows the token it reads, so that little training shows
                tensor.copy_(torch.cat([torch.eye(32), 0.2 * tensor[:, 32:]], dim=1))
        self.case, self.folder = case, case.write(folder / "pair")
        self.model = wrap(
            case.model, max_num_seqs=16, kv_cache_tokens=1000, max_num_batched_tokens=256, max_model_len=32
        )

    @functools.cached_property
    def answers(self) -> AnswerSet:
        """What the target says to a hundred prompts."""
        prompts = random_prompts([4] * 100, seed=2)
        return answer_set(prompts, self.regenerate(prompts), max_length=16)

    def regenerate(self, prompts: list[list[int]]) -> list[list[int]]:
        return [c.token_ids for c in self.model.generate(prompts, SamplingParams(max_new_tokens=12))]

    def train(self, output: Path, convention: MtpConvention | None = None, **settings: Any) -> TrainResult:
        config = TrainConfig(**{**SHORT, **settings})
        quiet = Console(file=io.StringIO())
        how = convention or MtpConvention()
        options = {"module": self.folder, "mtp_concat": how.concat, "mtp_feedback": how.feedback}
        plan = specdec.extensions.training.run.plan_training(self.model, "mtp", options, config, held_out=12)
        with locked(output):
            plan.claim(output, {})
            return plan.run(self.answers, output, quiet)

    def tau(self, module: Path) -> float:
        """Acceptance length on prompts that were not trained on."""
        wrapped = wrap(self.case.model, str(module), num_speculative_tokens=3)
        completions = wrapped.generate(random_prompts([4] * 12, seed=77), SamplingParams(max_new_tokens=12))
        return pool_requests([c.stats for c in completions]).tau


@pytest.fixture
def bench(tiny_case: Callable[..., Any], tmp_path: Path) -> Bench:
    return Bench(tiny_case("deepseek_v3", context=0.03), tmp_path)


def weights(result: TrainResult) -> dict[str, torch.Tensor]:
    return load_file(result.folder / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())


@pytest.mark.slow
@pytest.mark.thorough
def test_the_module_learns_and_drafts_better(bench: Bench, tmp_path: Path) -> None:
    """The loss falls, each of three drafts is right more often, and so the engine accepts more."""
    before = bench.tau(bench.folder)
    result = bench.train(tmp_path / "run", steps=60, batch_size=16, held_out_every=10, checkpoint_every=1000)
    first, last = result.history[0], result.history[-1]
    assert last.loss < first.loss - 0.2
    assert all(late > early for late, early in zip(last.acceptance, first.acceptance, strict=True))
    assert family_of(result.folder) is FAMILIES["mtp"]
    assert bench.tau(result.folder) > before + 0.3
    assert last.evaluation["tau"] > before + 0.3


@pytest.mark.usefixtures("short_evaluations")
@pytest.mark.parametrize("calls", [pytest.param(4, marks=pytest.mark.long), 11])
@pytest.mark.thorough
def test_a_killed_run_goes_on_with_the_same_result(
    calls: int, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = bench.train(tmp_path / "whole", steps=8)
    real = specdec.extensions.training.run.final_features

    def deadly(model: SpeculativeModel) -> Any:
        features, left = real(model), iter(range(calls))

        def counted(*batch: torch.Tensor) -> Any:
            if next(left, None) is None:
                raise Killed
            return features(*batch)

        return counted

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(specdec.extensions.training.run, "final_features", deadly)
        bench.train(tmp_path / "cut", steps=8)
    resumed = bench.train(tmp_path / "cut", steps=8)
    assert same(weights(whole), weights(resumed))
    assert resumed.history == whole.history
    other = bench.train(tmp_path / "other", steps=8, seed=1)
    assert not same(weights(whole), weights(other)), "another order of batches must show"


def test_a_module_of_the_other_order_is_saved_in_the_usual_one(tiny_case: Callable[..., Any], tmp_path: Path) -> None:
    """MiMo's projection reads [hidden, embedding]; DeepSeek-style checkpoints read [embedding, hidden]."""
    case = tiny_case("mimo")
    target = mtp_target(case.model)
    (head,) = load_mtp(case.write(tmp_path / "a"), target, torch.float32, "cpu")
    (again,) = load_mtp(save_mtp(head, tmp_path / "b", target), target, torch.float32, "cpu")
    assert head.spec.hidden_first and not again.spec.hidden_first
    ids, hidden = torch.arange(5), torch.randn(5, 32, generator=torch.Generator().manual_seed(0))

    def own_value(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1)

    ours, theirs = (h.forward(ids, hidden, torch.arange(5), own_value) for h in (head, again))
    assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.thorough
def test_what_cannot_be_trained_is_refused(tiny_case: Callable[..., Any], tmp_path: Path) -> None:
    bench = Bench(tiny_case("ernie"), tmp_path / "ernie")
    with pytest.raises(HeadLoadError, match="final norm"):
        bench.train(tmp_path / "run", steps=1)
    bench = Bench(tiny_case("deepseek_v3", modules=2), tmp_path / "two")
    with pytest.raises(HeadLoadError, match="2 multi-token-prediction modules; one can be trained"):
        bench.train(tmp_path / "run", steps=1)
    case = tiny_case("deepseek_v3")
    bench = Bench(case, tmp_path / "one")
    bench.model = wrap(case.model, str(bench.folder), num_speculative_tokens=1)
    with pytest.raises(InvalidInputError, match="draft=None"):
        bench.train(tmp_path / "run", steps=1)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("short_evaluations")
@pytest.mark.thorough
def test_the_command_trains_the_built_in_module(tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    lines = [json.dumps({"question": f"Anna has {n} apples and buys 8 more. How many has she now?"}) for n in range(6)]
    questions.write_text("\n".join(lines), encoding="utf-8")
    options = "--steps 2 --batch-size 2 --held-out 2 --max-new-tokens 12 --ttt-steps 2 --device cpu --max-num-seqs 6"
    arguments = ["mtp", "--data", str(questions), "--output", str(tmp_path / "run"), *options.split()]
    result = CliRunner().invoke(train, arguments, catch_exceptions=False)
    assert result.exit_code == 0 and "the head is in" in result.output
    head = tmp_path / "run" / "head"
    model = SpeculativeModel.from_pretrained("gsm-deepseek", head, num_speculative_tokens=2, max_model_len=128)
    assert model.generate("Anna has 3 apples.", SamplingParams(max_new_tokens=4))[0].token_ids
    (module,) = load_mtp(head, mtp_target(model.hf_model), torch.float32, "cpu")
    (built_in,) = load_mtp(builtin_path("gsm-deepseek"), mtp_target(model.hf_model), torch.float32, "cpu")
    assert not torch.equal(module.eh_proj.weight, built_in.eh_proj.weight)
