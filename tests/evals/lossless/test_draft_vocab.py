"""Sampled answers of a module that drafts on some tokens: the target's distribution, and that a wrong q is seen."""

from __future__ import annotations

import json
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest

from evals.data.datasets import load
from evals.lossless import distribution
from evals.lossless.distribution import DistributionTest
from evals.runs.conversations import Asking, ModelSpec, Worker
from evals.runs.verdict import Verdict
from specdec.acceptance.judge import DraftVocab
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from tests.evals.lossless.test_planted import ALONE, SPECULATIVE, K
from tests.evals.target_once import of_the_target

pytest.importorskip("scipy")


@cache
def built_in() -> SpeculativeModel:
    """Its module drafts on half of the tokens: many that the target writes are not among them."""
    sizes: dict[str, Any] = {"max_num_seqs": 64, "max_model_len": 256, "num_speculative_tokens": K, "device": "cpu"}
    return SpeculativeModel.from_pretrained("gsm-deepseek", "mtp", draft_vocab=range(0, 2048, 2), **sizes)


OF_THE_TARGET = of_the_target()


def found(samples: int) -> Any:
    """What the test finds of the configuration that drafts."""
    with patch.multiple(distribution, **OF_THE_TARGET):
        return judged(samples)


def judged(samples: int) -> Any:
    questions = tuple(sorted(load("arithmetic", limit=100).questions, key=lambda each: len(each.turns[0]))[:8])
    asking = Asking(SamplingParams(max_new_tokens=48), templated=True)
    test = DistributionTest(questions, (ALONE, SPECULATIVE), asking, samples, 1)
    alone, speculative = test(Worker({"main": ModelSpec("gsm-deepseek")}, lambda spec: built_in())).fits
    assert alone.verdict is Verdict.PASS
    return speculative


@pytest.mark.slow
@pytest.mark.thorough
def test_samples_have_the_targets_distribution() -> None:
    fit = found(60)
    assert fit.verdict is Verdict.PASS and 0.1 < fit.accepted / fit.drafts < 0.9, json.dumps(vars(fit), default=str)


@pytest.mark.long
def test_a_q_that_belongs_to_other_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: probabilities are spread to the tokens after those that were drafted."""
    plain = DraftVocab.scatter
    monkeypatch.setattr(DraftVocab, "scatter", lambda self, probs: plain(self, probs).roll(1, -1))
    assert found(60).verdict is Verdict.FAIL
