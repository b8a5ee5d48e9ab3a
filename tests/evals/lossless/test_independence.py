"""Streams of the noise are independent in the engine, and defects of them are seen."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from fakes import table_head, tiny_llama, wrap

from evals.acceptance.acceptance import sweep
from evals.lossless.certificate import PLANTED, noise_streams
from evals.runs.conversations import Asking, ModelSpec, Worker
from evals.runs.executor import Plan
from specdec.requests.sampling import SamplingParams
from specdec.rounds.randomness import SamplingRound, noise_seeds

pytest.importorskip("scipy")

K = 3


@cache
def worker() -> Worker:
    target = tiny_llama()
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 1024, "page_size": 16, "kv_cache_tokens": 8192}
    model = wrap(target, table_head(target), num_speculative_tokens=K, sampling="keyed", **sizes)
    return Worker({"main": ModelSpec("tiny")}, lambda spec: model)


@pytest.fixture
def plan(plant: SimpleNamespace) -> Plan:
    return Plan(plant.questions(1), sweep((K,)), Asking(SamplingParams(), templated=False), batch_size=8)


@pytest.mark.slow
def test_the_librarys_noise_passes(plan: Plan) -> None:
    found = noise_streams(worker(), plan)
    assert found["verdict"] == "PASS" and found["repeated"] < 5
    assert {kind: pairs for kind, (_, pairs, _) in found["equal"].items()} == {
        "neighbouring positions": 1920,
        "samples of one seed": 1024,
        "neighbouring seeds": 2016,
    }


def of_the_row(self: SamplingRound, places: int) -> Any:
    return noise_seeds(self.keys[:, None], np.arange(len(self.keys))[:, None] + np.zeros(places, np.int64))


def of_no_seed(self: SamplingRound, places: int) -> Any:
    return noise_seeds(0 * self.keys[:, None], self.first[:, None] + np.arange(places))


OTHERS: list[tuple[str, str, Any, str, Any]] = [
    ("streams", "noise of the row, not of the position", SamplingRound, "seeds", of_the_row),
    ("streams", "seed left out", SamplingRound, "seeds", of_no_seed),
]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("planted", [*(one for one in PLANTED if one[0] == "streams"), *OTHERS], ids=lambda one: one[1])
def test_planted_noise_fails(planted: tuple[str, str, Any, str, Any], plan: Plan) -> None:
    with patch.object(*planted[2:]):
        assert noise_streams(worker(), plan)["verdict"] == "FAIL"
