"""Drafts drawn from a head's distribution, round by round: those of the oracle without a cache, given the uniforms.

Eagerly and from graphs (those of tests/specdec/execution/test_graphs.py), for one head that reads its own output and
for several modules; prompts in chunks beside rows that draft, greedy rows among sampled ones, preemption.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import backend_of_ours, count_calls, launch_ahead, wrap

from specdec.execution.graphs import GraphExecutor
from specdec.execution.ragged import RaggedPrefill
from specdec.requests.sampling import SamplingParams
from specdec.rounds.randomness import SamplingRound
from tests.drafters.loops.test_modules_engine import make as make_modules  # noqa: F401
from tests.drafters.loops.test_modules_engine import rounds
from tests.drafters.test_conformance import PROMPTS, Pair, make, oracle_rounds  # noqa: F401
from tests.sampled_rounds import drawn_as, kernels_by_reference, planted
from tests.specdec.execution.test_graphs import FixedPlaceBackend, compile_nothing, record_on_cpu

pytest.importorskip("triton", reason="Triton is not installed")

SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.4, "top_k": 12},
    {},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 2.0, "top_k": 30, "top_p": 0.95},
)
PARAMS = [SamplingParams(max_new_tokens=20, return_drafts=True, seed=40 + i, **own) for i, own in enumerate(SETTINGS)]
SIZES: dict[str, Any] = {"num_speculative_tokens": 3, "max_num_seqs": 5, "draft_sampling": "probabilistic"}
TIGHT = {"kv_cache_tokens": 96, "max_num_batched_tokens": 30}
HEADS = ("eagle3", "table", "deepseek_v3", "glm4_moe", "mimo")
Compared = list[tuple[list[int], list[int]]]


@pytest.fixture(params=["eager", "graphs"])
def execution(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Options of a model that runs so."""
    if request.param == "eager":
        yield {}
        return
    record_on_cpu(monkeypatch)
    compile_nothing(monkeypatch)
    with kernels_by_reference(), backend_of_ours(FixedPlaceBackend(torch.device("cpu"))):
        yield {"cuda_graphs": True}


def check_execution(wrapped: Any, execution: dict[str, Any]) -> None:
    assert isinstance(wrapped.engine.executor, GraphExecutor) == bool(execution)


def drafts_of(pair: Pair, options: dict[str, Any]) -> tuple[Any, Compared]:
    """The model, and (its drafts, the oracle's) of every round of every request."""
    target, head = pair
    wrapped = wrap(target, head, **SIZES, **options)
    launch_ahead(wrapped, "cuda_graphs" in options)
    completions = wrapped.generate(PROMPTS, PARAMS)
    every = zip(PROMPTS, completions, PARAMS, strict=True)
    with torch.inference_mode():
        return wrapped, [r for p, c, own in every for r in oracle_rounds(target, head, p, c, drawn_as(own))]


def pairs() -> list[Any]:
    """A head of each draft loop from graphs, modules over MLA there, and EAGLE-3 eagerly; the other pairs are long
    ones."""
    eagerly = ("eagle3", "mimo")
    marks = {name: pytest.mark.long if name == "glm4_moe" else pytest.mark.slow for name in HEADS}
    found = [pytest.param(name, TIGHT, "graphs", marks=marks[name]) for name in HEADS]
    marks = {name: pytest.mark.slow if name == "eagle3" else pytest.mark.long for name in HEADS}
    found += [pytest.param(name, TIGHT, "eager", marks=marks[name]) for name in HEADS]
    chunks = {"max_num_batched_tokens": 20}
    return found + [pytest.param(n, chunks, e, marks=pytest.mark.long) for n in eagerly for e in ("eager", "graphs")]


@pytest.mark.parametrize(("name", "options", "execution"), pairs(), indirect=["execution"])
@pytest.mark.cases(1)
def test_drawn_drafts_are_the_oracles(
    name: str,
    options: dict[str, int],
    execution: dict[str, Any],
    make: Callable[[str], Pair],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beside_prompts = count_calls(monkeypatch, RaggedPrefill, "run")
    wrapped, compared = drafts_of(make(name), execution | options)
    check_execution(wrapped, execution)
    assert len(compared) > 40 and sum(len(ours) for ours, _ in compared) > 100
    assert [ours for ours, _ in compared] == [oracle for _, oracle in compared]
    assert (wrapped.engine_stats.preemptions > 0) == ("kv_cache_tokens" in options)
    assert bool(beside_prompts) == bool(execution)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "modules", "drafts"),
    [
        ("mimo", 2, 3),
        pytest.param("mimo", 3, 5, marks=pytest.mark.long),
        pytest.param("deepseek_v3", 2, 4, marks=pytest.mark.long),
    ],
)
@pytest.mark.thorough
def test_drawn_drafts_of_several_modules_are_the_oracles(
    name: str,
    modules: int,
    drafts: int,
    execution: dict[str, Any],
    make_modules: Callable[..., Any],  # noqa: F811
) -> None:
    options = SIZES | execution | TIGHT | {"num_speculative_tokens": drafts}
    wrapped = make_modules(name, modules, **options)
    launch_ahead(wrapped, bool(execution))
    check_execution(wrapped, execution)
    completions = wrapped.generate(PROMPTS, PARAMS)
    every = zip(PROMPTS, completions, PARAMS, strict=True)
    with torch.inference_mode():
        compared = [r for p, c, own in every for r in rounds(wrapped, p, c, drawn_as(own))]
    assert len(compared) > 40 and [ours for ours, _ in compared] == [oracle for _, oracle in compared]


def wrong_of(make: Callable[[str], Pair], execution: dict[str, Any]) -> list[int]:  # noqa: F811
    _, compared = drafts_of(make("eagle3"), execution)
    return [i for i, (ours, oracle) in enumerate(compared) if ours != oracle]


@pytest.mark.long
def test_uniforms_of_the_next_position_are_seen(
    execution: dict[str, Any],
    make: Callable[[str], Pair],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted: the uniforms of drafts are those of one position further on."""
    ahead, drafts = SamplingRound.ahead_uniforms, SamplingRound.draft_uniforms
    monkeypatch.setattr(SamplingRound, "ahead_uniforms", lambda self, places: ahead(self, places + 1)[:, 1:])
    monkeypatch.setattr(SamplingRound, "draft_uniforms", lambda self: one_further(self, drafts))
    assert len(wrong_of(make, execution)) > 20


def one_further(sampling: SamplingRound, plain: Callable[[SamplingRound], Any]) -> Any:
    return plain(replace(sampling, first=sampling.first + 1))


@pytest.mark.long
@pytest.mark.parametrize("execution", ["graphs"], indirect=True)
def test_another_distribution_of_the_head_is_seen(
    execution: dict[str, Any],
    make: Callable[[str], Pair],  # noqa: F811
) -> None:
    """Planted: the temperature counts twice."""
    with planted("temperature twice in the draft"):
        assert len(wrong_of(make, execution)) > 20
