"""A certificate passes, its checks see what is planted, and it fails where the library has a defect."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from evals.acceptance.acceptance import sweep
from evals.data.datasets import digest, load
from evals.lossless import certificate as module
from evals.lossless.certificate import PLANTED, certificate, certified
from evals.report.page import render_certificate
from evals.report.terminal import template
from evals.runs.conversations import Asking, ModelSpec, Worker
from evals.runs.executor import Plan
from evals.runs.verdict import Verdict
from specdec.acceptance import judge
from specdec.acceptance.accept import accept_greedy
from specdec.model import SpeculativeModel
from specdec.requests import noise
from specdec.requests.noise import gumbel
from specdec.requests.sampling import SamplingParams
from specdec.requests.target_probs import target_probs
from specdec.rounds.randomness import SamplingRound, noise_seeds
from tests.evals.target_once import of_the_target

pytest.importorskip("scipy")

K = 3


@cache
def worker(sampling: str) -> Worker:
    sizes: dict[str, Any] = {"max_num_seqs": 64, "max_model_len": 256, "sampling": sampling}
    model = SpeculativeModel.from_pretrained("gsm-llama", "auto", num_speculative_tokens=K, **sizes)
    return Worker({"main": ModelSpec("gsm-llama")}, lambda spec: model)


REMEMBERED = {name: found for name, found in of_the_target().items() if name != "sample"}
"""Places and their distributions, which follow from the target's logits alone."""


def rule(sampling: str) -> dict[str, Any]:
    questions = sorted(load("arithmetic", limit=100).questions, key=lambda each: len(each.turns[0]))[:8]
    data = replace(load("arithmetic", limit=1), questions=tuple(questions))
    asking = Asking(SamplingParams(max_new_tokens=48, cache_prefix=False), templated=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, found in REMEMBERED.items():
            patch.setattr(f"evals.lossless.distribution.{name}", found)
        return dict(certified(worker(sampling), Plan(data, sweep((K,)), asking, 8), samples=150, places=1))


@pytest.mark.thorough
@pytest.mark.slow
def test_the_certificate_of_the_built_in_pair_passes_and_finds_what_is_planted() -> None:
    rules = {sampling: rule(sampling) for sampling in ("rejection", "keyed")}
    document = certificate(rules, {"model": "gsm-llama"})
    assert document["verdict"] == "PASS" and not document["void"]
    assert all(planted["found"] for one in rules.values() for planted in one["planted"])
    assert len(rules["keyed"]["planted"]) == len(PLANTED) and len(rules["rejection"]["planted"]) == 2
    whole = json.loads(json.dumps(document, allow_nan=False))
    assert digest({name: value for name, value in whole.items() if name != "sha256"}) == document["sha256"]
    missing = " ".join(document["not_covered"])
    assert "kernels and graphs of a GPU; this ran on cpu" in missing and "options of requests but" in missing
    text, page = template("certificate.txt").render(document=whole), render_certificate(whole)
    for shown in ("planted, noise of 24 bits: found", f"sha256 {document['sha256']}", "8 of 8 identical"):
        assert shown in text and shown in page


def one_too_many(drafts: torch.Tensor, num_drafts: torch.Tensor, ids: torch.Tensor) -> Any:
    """The first rejected draft is accepted, too; the next token is that of the place after it."""
    right = accept_greedy(drafts, num_drafts, ids)
    accepted = torch.minimum(right.num_accepted + 1, num_drafts)
    return replace(right, num_accepted=accepted, next_token=ids.gather(1, accepted[:, None])[:, 0])


def of_the_row(self: SamplingRound, places: int) -> np.ndarray:
    return noise_seeds(self.keys[:, None], np.arange(len(self.keys))[:, None] + np.zeros(places, np.int64))


def reused(self: SamplingRound, places: int) -> np.ndarray:
    return noise_seeds(self.keys[:, None], (self.first[:, None] + np.arange(places)) // 2)


def coarse(seeds: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Noise of uniforms with 24 bits."""
    w = -torch.expm1(-(-gumbel(seeds, ids)).exp())
    return -(-torch.log1p(-(w * 2**24).ceil() / (2**24 + 1))).log()


def hotter(logits: torch.Tensor, sampling: Any) -> torch.Tensor:
    """target_probs of verifications (several tokens a row)."""
    return target_probs(
        logits, replace(sampling, temperature=1.1 * sampling.temperature) if len(logits) > 1 else sampling
    )


DEFECTS: dict[str, tuple[str, Any, str, Any]] = {
    "a draft too many": ("keyed", judge, "accept_greedy", one_too_many),
    "noise of the row": ("keyed", SamplingRound, "seeds", of_the_row),
    "noise used again": ("keyed", SamplingRound, "seeds", reused),
    "noise of 24 bits": ("keyed", noise, "gumbel", coarse),
    "another temperature": ("rejection", judge, "target_probs", hotter),
}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_of_the_library_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling, *place = DEFECTS[name]
    monkeypatch.setattr(module, "PLANTED", ())
    monkeypatch.setattr(*place)
    document = certificate({sampling: rule(sampling)}, {})
    assert document["verdict"] == "FAIL" and not document["void"], document


def test_a_certificate_that_misses_a_planted_defect_is_void() -> None:
    found: dict[str, Any] = {
        "settings": {"models": {"main": {"device": "cuda", "dtype": "bfloat16", "backend": "flashinfer"}}},
        "greedy": {"verdict": Verdict.PASS, "logprob_limit": None},
        "sampled": {
            "verdict": Verdict.NOT_TESTED,
            "arms": [{"arm": "K=3", "powers": [{"defect": "min_p", "everywhere": 0.5}]}],
        },
        "planted": [{"check": "greedy", "defect": "any", "found": False}],
        "verdict": Verdict.PASS,
    }
    document = certificate({"rejection": found}, {"target": "any"})
    assert document["void"] and document["verdict"] == "FAIL"
    assert document["not_covered"][:-1] == [
        "sampling=rejection: equal log-probabilities; flashinfer in bfloat16 rounds by the batch's shape",
        "sampling=rejection, K=3: min_p",
        "sampling=keyed",
    ]
    right = certificate({"rejection": found | {"planted": []}}, {"target": "any"})
    assert right["verdict"] == "PASS" and right["sha256"] != document["sha256"]
