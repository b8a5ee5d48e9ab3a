"""The evaluations on the real engine with a tiny model: what is right passes, planted wrong acceptance rules fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import table_head, tiny_llama, wrap

import specdec.acceptance.judge
from evals.acceptance.acceptance import Plan, run, settings, sweep
from evals.lossless.lossless import check
from evals.runs.conversations import Asking, ModelSpec, Worker
from evals.runs.store import RunStore
from specdec.acceptance.accept import SampledInputs, VerificationResult, accept_greedy, accept_sampled
from specdec.requests.sampling import SamplingParams
from tests.evals.target_once import of_the_target

pytest.importorskip("scipy")
K, SAMPLES = 3, 150


@pytest.fixture(scope="module")
def worker() -> Worker:
    target = tiny_llama()
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 1024, "page_size": 16, "kv_cache_tokens": 8192}
    model = wrap(target, table_head(target), num_speculative_tokens=K, **sizes)
    return Worker({"main": ModelSpec("tiny")}, lambda spec: model)


def asking(**params: Any) -> Asking:
    return Asking(SamplingParams(**{"max_new_tokens": 24, **params}), templated=False)


def verdict(plant: SimpleNamespace, worker: Worker, folder: Path, **more: Any) -> dict[str, Any]:
    plan = Plan(plant.questions(8), sweep((K,)), asking(), batch_size=8, warmup=0)
    store = RunStore(folder, settings(plan, worker.facts()))
    return check(worker, plan, store, lambda answers: None, **{"samples": 400, **more})


@pytest.fixture(scope="module")
def targets_share() -> dict[str, Any]:
    return of_the_target()


@pytest.fixture
def target_once(targets_share: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not depend on drafts is found once."""
    for name, found in targets_share.items():
        monkeypatch.setattr(f"evals.lossless.distribution.{name}", found)


@pytest.mark.slow
@pytest.mark.usefixtures("target_once")
@pytest.mark.thorough
def test_the_engine_passes(plant: SimpleNamespace, worker: Worker, tmp_path: Path) -> None:
    found = verdict(plant, worker, tmp_path / "run", samples=SAMPLES)
    assert found["passed"]
    assert found["greedy"]["arms"][0]["identical"] == 8
    assert [fit["arm"] for fit in found["sampled"]["arms"]] == ["target alone", "K=3"]


def accepts_everything(drafts: torch.Tensor, num_drafts: torch.Tensor, target_ids: torch.Tensor) -> VerificationResult:
    return VerificationResult(num_drafts.clone(), target_ids.gather(1, num_drafts[:, None])[:, 0])


def one_too_many(drafts: torch.Tensor, num_drafts: torch.Tensor, target_ids: torch.Tensor) -> VerificationResult:
    right = accept_greedy(drafts, num_drafts, target_ids).num_accepted
    more = torch.minimum(right + 1, num_drafts)
    return VerificationResult(more, target_ids.gather(1, more[:, None])[:, 0])


@pytest.mark.slow
@pytest.mark.parametrize("rule", [pytest.param(accepts_everything, marks=pytest.mark.long), one_too_many])
def test_a_wrong_greedy_rule_fails(
    plant: SimpleNamespace, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: Any
) -> None:
    monkeypatch.setattr(specdec.acceptance.judge, "accept_greedy", rule)
    found = verdict(plant, worker, tmp_path / "run", mode="greedy")
    arm = found["greedy"]["arms"][0]
    assert not found["passed"] and arm["defects"] > 0
    assert all(d["behind"] > 1e-4 for d in arm["divergences"])


@pytest.fixture
def resampling_from_p(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After a rejection the token comes from p instead of the remainder: a classic mistake."""

    def rule(drafts: torch.Tensor, num_drafts: torch.Tensor, inputs: SampledInputs) -> VerificationResult:
        right = accept_sampled(drafts, num_drafts, inputs)
        none = torch.zeros_like(num_drafts)
        shifted = SampledInputs(
            inputs.target_probs.gather(
                1,
                right.num_accepted[:, None, None].expand(
                    -1, inputs.target_probs.shape[1], inputs.target_probs.shape[2]
                ),
            ),
            inputs.draft_probs,
            inputs.accept_uniform,
            inputs.next_uniform.gather(1, right.num_accepted[:, None]).expand_as(inputs.next_uniform),
        )
        return VerificationResult(right.num_accepted, accept_sampled(drafts, none, shifted).next_token)

    monkeypatch.setattr(specdec.acceptance.judge, "accept_sampled", rule)
    yield


@pytest.mark.slow
@pytest.mark.usefixtures("resampling_from_p", "target_once")
@pytest.mark.thorough
def test_a_wrong_sampling_rule_fails(plant: SimpleNamespace, worker: Worker, tmp_path: Path) -> None:
    found = verdict(plant, worker, tmp_path / "run", mode="sampled", samples=SAMPLES)
    control, speculative = found["sampled"]["arms"]
    assert control["verdict"] == "PASS" and speculative["verdict"] == "FAIL"


@pytest.mark.slow
@pytest.mark.thorough
def test_acceptance_on_the_engine(plant: SimpleNamespace, worker: Worker, tmp_path: Path) -> None:
    executor = worker
    plan = Plan(plant.questions(6), sweep((1, K)), asking(), batch_size=2, worst=1, predict_batch_sizes=(1, 2))
    store = RunStore(tmp_path / "run", settings(plan, executor.facts()))
    document = run(executor, plan, store, lambda answers: None)
    arms = {arm["name"]: arm for arm in document["arms"]}
    assert arms["K=3"]["identical_to_target_alone"] == {"questions": 6, "identical": 6}
    assert arms["target alone"]["metrics"]["tau"]["estimate"] == 1.0
    assert 1.0 < arms["K=1"]["metrics"]["tau"]["estimate"] < arms["K=3"]["metrics"]["tau"]["estimate"] <= 4.0
    shown = "".join(text for kind, text in document["worst"][0]["turns"][0] if kind != "rejected")
    row = next(a for a in store.answers.values() if a.question_id == document["worst"][0]["question_id"])
    assert shown == row.turns[0].text
    assert document["timing"]["prediction"]["round_seconds"]["2"]["3"] > 0
