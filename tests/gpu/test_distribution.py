"""The distribution test of the built-in pair over CUDA graphs, with the kernels; and that planted defects are seen.

In half precision, so that sampled answers are compared with those of the target alone (`homogeneity`): the target's own
rounding is in both. Every defect is captured into the graphs, so each has a start of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest
import torch

from evals.lossless.distribution import NodesAt, Place, against, sample
from evals.lossless.evidence import Sampled
from evals.lossless.greedy import Replay
from evals.lossless.verdicts import ConfigurationFit
from evals.runs.conversations import Configuration, ModelSpec, Worker
from evals.runs.verdict import Verdict
from specdec.execution.graphs import GraphExecutor
from specdec.model import SpeculativeModel
from tests.evals.lossless.test_graphs import ALONE, DRAWN, HOT, SPECULATIVE, distribution_test, hot_places
from tests.sampled_rounds import DEFECTS, OF_Q, planted

pytest.importorskip("scipy")

SAMPLES = 6000
SAMPLING = replace(HOT, samples=SAMPLES)


@contextmanager
def built_in(
    draft_sampling: str, defect: str = "", backend: str = "flashinfer", draft: str = "auto", sampling: str = "rejection"
) -> Iterator[SpeculativeModel]:
    with (
        planted(defect),
        SpeculativeModel.from_pretrained(
            "gsm-llama",
            draft,
            num_speculative_tokens=7 if draft == "block" else 3,
            max_num_seqs=64,
            max_model_len=256,
            dtype=torch.float16,
            backend=backend,
            draft_sampling=draft_sampling,
            sampling=sampling,
        ) as model,
    ):
        assert isinstance(model.engine.executor, GraphExecutor)
        yield model


@cache
def alone() -> tuple[tuple[Place, ...], tuple[NodesAt, ...], tuple[Sampled, ...]]:
    """Two places where the pair hesitates, and what the target says there without drafts."""
    with built_in("probabilistic") as model:
        replay = Replay(model.hf_model)
        places = hot_places(model, replay)
        baseline = tuple(drawn(model, places, ALONE))
        nodes = tuple(NodesAt(replay, place.prompt, SAMPLING) for place in places)
        return places, nodes, baseline


def drawn(model: SpeculativeModel, places: tuple[Place, ...], arm: Configuration) -> list[Sampled]:
    return [sample(model, place.prompt, arm, SAMPLING, place.question_id) for place in places]


def fit(draft_sampling: str, defect: str = "", backend: str = "flashinfer", **head: str) -> ConfigurationFit:
    places, nodes, baseline = alone()
    arm = Configuration("K=7", 7) if head else SPECULATIVE
    with built_in(draft_sampling, defect, backend, **head) as model:
        found = drawn(model, places, arm)
    return against(arm, baseline, found, nodes)


@pytest.mark.parametrize("backend", ["flashinfer", "batch_invariant"])
@pytest.mark.parametrize("draft_sampling", DRAWN)
def test_sampled_rounds_have_the_distribution_of_the_target_alone(draft_sampling: str, backend: str) -> None:
    found = fit(draft_sampling, backend=backend)
    assert found.verdict is Verdict.PASS, found
    assert found.degrees >= 20 and 0.2 < found.accepted / found.drafts < 0.8


@pytest.mark.parametrize("sampling", ["rejection", "keyed"])
def test_rounds_of_the_block_head_have_the_distribution_too(sampling: str) -> None:
    found = fit("probabilistic", draft="block", sampling=sampling)
    assert found.verdict is Verdict.PASS, found
    assert found.degrees >= 20 and 0.05 < found.accepted / found.drafts < 0.8


@pytest.mark.parametrize("draft_sampling", DRAWN)
def test_the_evaluation_passes(draft_sampling: str) -> None:
    """As `specdec eval lossless --mode sampled` runs it."""
    with built_in(draft_sampling) as model:
        worker = Worker({"main": ModelSpec("gsm-llama")}, lambda spec: model)
        tested = distribution_test(samples=2000, places=2)(worker)
    assert [found.verdict for found in tested.fits] == [Verdict.PASS]
    assert 0 < tested.fits[0].accepted < tested.fits[0].drafts


@pytest.mark.parametrize(
    ("draft_sampling", "defect", "head"),
    [(mode, name, {}) for mode in DRAWN for name in DEFECTS if mode == "probabilistic" or name not in OF_Q]
    + [("probabilistic", "residual without q", {"draft": "block"})],
)
def test_planted_defects_are_seen(draft_sampling: str, defect: str, head: dict[str, str]) -> None:
    found = fit(draft_sampling, defect, **head)
    assert found.verdict is Verdict.FAIL, found
