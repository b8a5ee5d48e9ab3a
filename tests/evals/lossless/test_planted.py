"""The named defects, planted in the library's own verification of the built-in pair, are found by the evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import specdec.acceptance.judge as judge
from evals.data.datasets import load
from evals.lossless.distribution import DistributionTest
from evals.runs.conversations import Asking, Configuration, ModelSpec, Worker
from evals.runs.verdict import Verdict
from specdec.acceptance.accept import SampledInputs, VerificationResult, accept_sampled
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams, SamplingTensors
from specdec.requests.target_probs import draw, target_probs

pytest.importorskip("scipy")

K = 3
ALONE, SPECULATIVE = Configuration("target alone", 0), Configuration("K=3", K)


@cache
def built_in() -> SpeculativeModel:
    sizes = {"max_num_seqs": 64, "max_model_len": 256}
    return SpeculativeModel.from_pretrained("gsm-llama", "auto", num_speculative_tokens=K, **sizes)


def verdict(samples: int = 150) -> tuple[Verdict, Verdict]:
    """Of the target alone, and of the configuration that drafts."""
    questions = tuple(sorted(load("arithmetic", limit=100).questions, key=lambda each: len(each.turns[0]))[:8])
    asking = Asking(SamplingParams(max_new_tokens=48), templated=True)
    test = DistributionTest(questions, (ALONE, SPECULATIVE), asking, samples, 1)
    alone, speculative = test(Worker({"main": ModelSpec("gsm-llama")}, lambda spec: built_in())).fits
    return alone.verdict, speculative.verdict


def changed(change: Callable[[SamplingTensors], SamplingTensors]) -> Callable[..., torch.Tensor]:
    """target_probs of verifications (several tokens a row) with other sampling."""

    def probs(logits: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
        return target_probs(logits, change(sampling) if len(logits) > 1 else sampling)

    return probs


def bonus_from_the_residual(drafts: torch.Tensor, num_drafts: torch.Tensor, inputs: SampledInputs) -> Any:
    """The token after all drafts is drawn from p without the last draft."""
    right = accept_sampled(drafts, num_drafts, inputs)
    if not drafts.shape[1]:
        return right
    is_full = (right.num_accepted == num_drafts) & (num_drafts > 0)
    p = inputs.target_probs[torch.arange(len(drafts)), right.num_accepted].clone()
    last = drafts.gather(1, (num_drafts - 1).clamp(min=0)[:, None])
    left = p.scatter(1, last, 0.0)
    uniform = inputs.next_uniform.gather(1, right.num_accepted[:, None])[:, 0]
    wrong = draw(torch.where(left.sum(1, keepdim=True) > 0, left, p), uniform)
    return VerificationResult(right.num_accepted, torch.where(is_full, wrong, right.next_token))


DEFECTS: dict[str, tuple[str, Any]] = {
    "temperature 10 % too high": ("target_probs", changed(lambda s: replace(s, temperature=1.1 * s.temperature))),
    "temperature 10 % too low": ("target_probs", changed(lambda s: replace(s, temperature=0.9 * s.temperature))),
    "top_p 0.1 too high": ("target_probs", changed(lambda s: replace(s, top_p=(s.top_p + 0.1).clamp(max=1.0)))),
    "top_p 0.1 too low": (
        "target_probs",
        changed(lambda s: replace(s, top_p=torch.where(s.top_p < 1, s.top_p - 0.1, s.top_p))),
    ),
    "min_p left out": ("target_probs", changed(lambda s: replace(s, min_p=0 * s.min_p))),
    "bonus from the residual": ("accept_sampled", bonus_from_the_residual),
}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_of_the_librarys_verification_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, defect = DEFECTS[name]
    monkeypatch.setattr(judge, function, defect)
    assert verdict()[1] is Verdict.FAIL


@pytest.mark.long
@pytest.mark.slow
def test_without_a_defect_it_passes() -> None:
    assert verdict() == (Verdict.PASS, Verdict.PASS)
