"""Sampled answers with a small draft model: the target's distribution, and that a wrong q is seen."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

from evals.data.datasets import load
from evals.lossless import distribution
from evals.lossless.distribution import DistributionTest
from evals.runs.conversations import Asking, ModelSpec, Worker
from evals.runs.verdict import Verdict
from specdec.acceptance.judge import DraftVocab
from specdec.loading.names import builtin_path
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from tests.evals.lossless.test_planted import ALONE, SPECULATIVE, K
from tests.evals.target_once import of_the_target

pytest.importorskip("scipy")
OF_THE_TARGET = of_the_target()


@cache
def built_in() -> SpeculativeModel:
    """The target's own weights draft for it, with logits half as large: q is flatter than p."""
    assistant = AutoModelForCausalLM.from_pretrained(builtin_path("gsm-llama"), dtype=torch.float32)
    assistant.lm_head.weight = torch.nn.Parameter(0.5 * assistant.lm_head.weight.detach().clone())
    sizes: dict[str, Any] = {"max_num_seqs": 64, "max_model_len": 256, "num_speculative_tokens": K, "device": "cpu"}
    return SpeculativeModel.from_pretrained("gsm-llama", assistant, **sizes)


def found(samples: int) -> Any:
    """What the test finds of the configuration that drafts."""
    questions = tuple(sorted(load("arithmetic", limit=100).questions, key=lambda each: len(each.turns[0]))[:8])
    asking = Asking(SamplingParams(max_new_tokens=48), templated=True)
    test = DistributionTest(questions, (ALONE, SPECULATIVE), asking, samples, 1)
    with patch.multiple(distribution, **OF_THE_TARGET):
        alone, speculative = test(Worker({"main": ModelSpec("gsm-llama")}, lambda spec: built_in())).fits
    assert alone.verdict is Verdict.PASS
    return speculative


@pytest.mark.slow
@pytest.mark.thorough
def test_samples_have_the_targets_distribution() -> None:
    fit = found(60)
    assert fit.verdict is Verdict.PASS and 0.1 < fit.accepted / fit.drafts < 0.9, (
        fit.verdict,
        fit.accepted,
        fit.drafts,
    )


@pytest.mark.long
def test_a_q_that_belongs_to_other_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: probabilities are spread to the tokens after those that were drafted."""
    plain = DraftVocab.scatter
    monkeypatch.setattr(DraftVocab, "scatter", lambda self, probs: plain(self, probs).roll(1, -1))
    fit = found(60)
    assert fit.verdict is Verdict.FAIL, (fit.verdict, fit.accepted, fit.drafts)
