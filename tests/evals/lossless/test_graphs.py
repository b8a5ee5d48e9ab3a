"""The distribution test of the built-in pair over rounds from graphs, and that it sees what these could get wrong.

The graphs are those of tests/specdec/execution/test_graphs.py: launches that run again on the same buffers; what
decides and drafts sampled rows is the kernels' torch reference. tests/gpu/test_distribution.py does the same on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from fakes import backend_of_ours, check_mode, launch_ahead

from evals.data.datasets import Question, load, render
from evals.lossless.distribution import DistributionTest, NodesAt, Place, Trial, sample, search
from evals.lossless.evidence import Sampling, measure
from evals.lossless.greedy import Replay
from evals.lossless.verdicts import ConfigurationFit, exact_fit
from evals.runs.conversations import Asking, Configuration, ModelSpec, Worker
from evals.runs.verdict import Verdict
from specdec.execution.graphs import GraphExecutor
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from tests.sampled_rounds import DEFECTS, OF_Q, kernels_by_reference, planted
from tests.specdec.execution.test_graphs import FixedPlaceBackend, compile_nothing, record_on_cpu

pytest.importorskip("scipy")
pytest.importorskip("triton", reason="Triton is not installed")

DRAWN = ("probabilistic", "greedy")
ALONE, SPECULATIVE = Configuration("target alone", 0), Configuration("K=3", 3)
HOT = Sampling(samples=800, tokens=5, top_k=6, top_p=0.9, temperature=6.0)
"""The pair is all but certain of its tokens: hot enough that every filter and every rejection counts."""

SEEN_IN = {
    "uniform of the acceptance again": 200,
    "q of the draft before": HOT.samples,  # p and q are both spread over few tokens: it takes all to be seen
    "temperature twice in the draft": 400,
    "top-p one token short": 500,
    "residual without q": 200,
}
"""The samples in which each defect is seen."""
FEW = 200


def defect_of(name: str) -> str:
    """The rounds that a defect is planted in."""
    return "probabilistic" if name in OF_Q else "greedy"


@pytest.fixture(scope="module")
def graphs_for_all() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched, kernels_by_reference(), check_mode(False):
        record_on_cpu(patched)
        compile_nothing(patched)
        yield


@cache
def built_in(draft_sampling: str) -> SpeculativeModel:
    with backend_of_ours(FixedPlaceBackend(torch.device("cpu"))):
        model = SpeculativeModel.from_pretrained(
            "gsm-llama",
            "auto",
            num_speculative_tokens=3,
            max_num_seqs=128,
            max_model_len=256,
            max_num_batched_tokens=1024,
            cuda_graphs=True,
            draft_sampling=draft_sampling,
        )
    launch_ahead(model)
    assert isinstance(model.engine.executor, GraphExecutor)
    return model


def short_questions() -> tuple[Question, ...]:
    questions = load("arithmetic", limit=200).questions
    return tuple(sorted(questions, key=lambda question: len(question.turns[0]))[:8])


def distribution_test(samples: int, places: int) -> DistributionTest:
    asking = Asking(SamplingParams(max_new_tokens=48), templated=True)
    return DistributionTest(short_questions(), (ALONE, SPECULATIVE), asking, samples, places)


def hot_places(model: SpeculativeModel, replay: Replay) -> tuple[Place, ...]:
    """Two places at which the pair hesitates, of different questions."""

    def answered(questions: Sequence[Question]) -> list[tuple[Question, list[int], list[int]]]:
        messages = [[{"role": "user", "content": question.turns[0]}] for question in questions]
        prompts = [render(model.tokenizer, each, templated=True) for each in messages]
        done = model.generate(prompts, SamplingParams(max_new_tokens=48, num_speculative_tokens=0))
        return [(*each, c.token_ids) for *each, c in zip(questions, prompts, done, strict=True)]

    wanted = Trial("hot", HOT, ("temperature 10 % too high", "temperature 10 % too low"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("evals.lossless.distribution.TEMPERATURES", (HOT.temperature,))
        places = tuple(spot.place for spot in search(answered, replay, short_questions(), 2, (wanted,)).spots)
    assert len(places) == 2
    return places


@dataclass(frozen=True)
class Open:
    """Places where the pair hesitates, and the exact distributions after every prefix there under HOT."""

    places: tuple[Place, ...]
    nodes: tuple[NodesAt, ...]

    def fit(self, draft_sampling: str, samples: int = HOT.samples) -> ConfigurationFit:
        model, sampling = built_in(draft_sampling), replace(HOT, samples=samples)
        drawn = [sample(model, place.prompt, SPECULATIVE, sampling, place.question_id) for place in self.places]
        evidence = [measure(one, known) for one, known in zip(drawn, self.nodes, strict=True)]
        return exact_fit(SPECULATIVE, evidence, drawn)


@pytest.fixture(scope="module")
def hot(graphs_for_all: None) -> Open:
    model = built_in("greedy")
    replay = Replay(model.hf_model)
    places = hot_places(model, replay)
    return Open(places, tuple(NodesAt(replay, place.prompt, HOT) for place in places))


@pytest.mark.long  # `make test`: the next test has the distribution, test_eval_checks.py the search
def test_the_evaluation_passes_in_graphs(graphs_for_all: None) -> None:
    """As `specdec eval lossless --mode sampled` runs it: the places and the temperature are found by its own search."""
    model = built_in("probabilistic")
    worker = Worker({"main": ModelSpec("gsm-llama")}, lambda spec: model)
    tested = distribution_test(samples=60, places=1)(worker)
    alone, speculative = tested.fits
    assert (alone.verdict, speculative.verdict) == (Verdict.PASS, Verdict.PASS)
    assert 0 < speculative.accepted < speculative.drafts and alone.drafts == 0


@pytest.mark.slow
@pytest.mark.parametrize("samples", [FEW, pytest.param(None, marks=pytest.mark.long)])
@pytest.mark.parametrize("draft_sampling", DRAWN)
@pytest.mark.thorough
def test_sampled_rounds_from_graphs_have_the_targets_distribution(
    hot: Open, draft_sampling: str, samples: int | None
) -> None:
    """On as many samples as the quickest defects are seen in, or every defect that such rounds can have."""
    every = max(n for name, n in SEEN_IN.items() if defect_of(name) == draft_sampling)
    found = hot.fit(draft_sampling, samples or every)
    assert found.verdict is Verdict.PASS, found
    assert found.degrees >= (12 if samples else 20) and found.places == 2
    assert 0.2 < found.accepted / found.drafts < 0.8, "many drafts must be accepted, and many rejected"


@pytest.mark.long
@pytest.mark.parametrize(
    ("draft_sampling", "defect"),
    [(defect_of(name), name) for name in DEFECTS],
)
def test_planted_defects_are_seen(hot: Open, draft_sampling: str, defect: str) -> None:
    with planted(defect):
        found = hot.fit(draft_sampling, SEEN_IN[defect])
    assert found.verdict is Verdict.FAIL, found
    assert found.impossible or (found.p_value is not None and found.p_value < 1e-5), found
