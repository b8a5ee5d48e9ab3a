"""The seed contract: a sampled request goes through the rounds that it goes through alone, whatever is beside it.

Eagerly and from graphs (those of test_graphs.py), against the eager rounds of the request alone (float32): the same
tokens, drafts and statistics of every round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from fakes import (
    backend_of_ours,
    engine_of,
    free_everywhere,
    launch_ahead,
    random_prompts,
    table_head,
    tiny_llama,
    wrap,
)

import specdec.rounds.randomness
from specdec.execution.graphs import GraphExecutor
from specdec.requests.sampling import SamplingParams
from specdec.rounds.randomness import Role, SamplingRound, uniforms
from tests.sampled_rounds import kernels_by_reference
from tests.specdec.execution.test_graphs import FixedPlaceBackend, compile_nothing, record_on_cpu

pytest.importorskip("triton", reason="Triton is not installed")

PROMPTS = random_prompts((5, 33, 1, 17, 60, 9), seed=2)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "top_p": 0.9},
    {},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.02},
    {},
    {"temperature": 1.0},
)
PARAMS = [SamplingParams(max_new_tokens=18, seed=70 + i, return_drafts=True, **own) for i, own in enumerate(SETTINGS)]
BATCHES: dict[str, dict[str, Any]] = {
    "at once": {"max_num_seqs": 6, "max_num_batched_tokens": 256},
    "chunks": {"max_num_seqs": 5, "max_num_batched_tokens": 20},
    "few rows": {"max_num_seqs": 2, "page_size": 16},
    "preempted": {"max_num_seqs": 5, "max_num_batched_tokens": 30, "kv_cache_tokens": 92},
}
SAMPLED = [not own.greedy for own in PARAMS]
DRAWN = ("probabilistic", "greedy")
USUAL = {"chunks": "greedy", "preempted": "probabilistic"}
"""What `make test` tries of their pairs."""
Found = list[tuple[Any, ...]]


@pytest.fixture(params=["eager", "graphs"])
def execution(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Options of a model that runs so."""
    for drawn in DRAWN:
        rounds_alone(drawn)  # eagerly
    if request.param == "eager":
        yield {}
        return
    record_on_cpu(monkeypatch)
    compile_nothing(monkeypatch)
    with kernels_by_reference(), backend_of_ours(FixedPlaceBackend(torch.device("cpu"))):
        yield {"cuda_graphs": True}


def loaded(execution: dict[str, Any], drawn: str, **sizes: Any) -> Any:
    options = {"num_speculative_tokens": 3, "draft_sampling": drawn} | sizes | execution
    wrapped = wrap(tiny_llama(), table_head(tiny_llama()), **options)
    launch_ahead(wrapped, bool(execution))
    assert isinstance(wrapped.engine.executor, GraphExecutor) == bool(execution)
    return wrapped


def of(completion: Any) -> tuple[Any, ...]:
    return completion.token_ids, completion.drafts, completion.stats.rounds


@cache
def rounds_alone(drawn: str) -> Found:
    alone = loaded({}, drawn, max_num_seqs=1)
    return [of(alone.generate([p], own)[0]) for p, own in zip(PROMPTS, PARAMS, strict=True)]


def joining(wrapped: Any) -> Found:
    """Requests come two rounds after each other: prompts are read beside rows that decode."""
    engine, found = engine_of(wrapped), {}
    waiting = list(zip(PROMPTS, PARAMS, strict=True))
    rounds = 0
    while waiting or engine.has_work:
        if waiting and rounds % 2 == 0:
            engine.submit(*waiting.pop(0))
        found |= {u.request_id: of(u.completion) for u in engine.step() if u.completion is not None}
        rounds += 1
    return [each for _, each in sorted(found.items())]


@pytest.mark.parametrize(
    ("name", "drawn"),
    [
        pytest.param(name, drawn, marks=pytest.mark.slow if drawn == USUAL.get(name) else pytest.mark.long)
        for name in BATCHES
        for drawn in DRAWN
    ],
)
@pytest.mark.thorough
def test_in_any_batch_as_alone(execution: dict[str, Any], name: str, drawn: str) -> None:
    wrapped = loaded(execution, drawn, **BATCHES[name])
    together = wrapped.generate(PROMPTS, PARAMS)
    assert [of(c) for c in together] == rounds_alone(drawn)
    if name != "preempted":
        backwards = wrapped.generate(PROMPTS[::-1], PARAMS[::-1])
        assert [of(c) for c in backwards[::-1]] == rounds_alone(drawn)
    assert (wrapped.engine_stats.preemptions > 0) == (name == "preempted")
    assert free_everywhere(wrapped)


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [DRAWN[0], pytest.param(DRAWN[1], marks=pytest.mark.long)])
@pytest.mark.thorough
def test_joining_as_alone(execution: dict[str, Any], drawn: str) -> None:
    assert joining(loaded(execution, drawn, **BATCHES["chunks"])) == rounds_alone(drawn)


@pytest.mark.slow
@pytest.mark.cases(1)
def test_alone_from_graphs_as_eagerly(execution: dict[str, Any]) -> None:
    wrapped = loaded(execution, DRAWN[0], max_num_seqs=1)
    alone = [of(wrapped.generate([p], own)[0]) for p, own in zip(PROMPTS, PARAMS, strict=True)]
    assert alone == rounds_alone(DRAWN[0])


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["graphs"], indirect=True)
@pytest.mark.parametrize("planted", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.thorough
def test_rounds_that_are_launched_before_the_read_as_alone(
    execution: dict[str, Any], planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without drafts. Planted: a round that is launched ahead takes the uniforms of the position before its own."""
    eager = wrap(tiny_llama(), num_speculative_tokens=0, max_num_seqs=1)
    alone = [of(eager.generate([p], own)[0]) for p, own in zip(PROMPTS, PARAMS, strict=True)]
    wrapped = wrap(tiny_llama(), num_speculative_tokens=0, **BATCHES["at once"], **execution)
    launch_ahead(wrapped)
    ahead: list[bool] = []
    launch_next = GraphExecutor.launch_next

    def noting(self: GraphExecutor, round_: Any, target: Any, sampling: SamplingRound | None) -> Any:
        ahead.append(sampling is not None)
        if planted and sampling is not None:
            sampling = replace(sampling, first=sampling.first - 1)
        return launch_next(self, round_, target, sampling)

    monkeypatch.setattr(GraphExecutor, "launch_next", noting)
    together = [of(c) for c in wrapped.generate(PROMPTS, PARAMS)]
    assert sum(ahead) > 10, "sampled rounds must be launched ahead"
    assert [one != other for one, other in zip(together, alone, strict=True)] == (SAMPLED if planted else [False] * 6)


def differ(found: Found) -> list[bool]:
    return [one != alone for one, alone in zip(found, rounds_alone(DRAWN[0]), strict=True)]


@pytest.mark.long
def test_uniforms_of_a_row_are_seen(execution: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: uniforms follow the row of the batch instead of the request. Greedy rows stay."""

    def by_row(keys: np.ndarray, positions: np.ndarray, role: Role) -> np.ndarray:
        return uniforms(np.arange(len(keys), dtype=np.uint64)[:, None], positions, role)

    monkeypatch.setattr(specdec.rounds.randomness, "uniforms", by_row)
    assert differ(joining(loaded(execution, DRAWN[0], **BATCHES["chunks"]))) == SAMPLED


@pytest.mark.long
@pytest.mark.parametrize("execution", ["graphs"], indirect=True)
def test_positions_off_by_one_ahead_of_the_read_are_seen(
    execution: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the drafts after a verification take the uniforms of one position further back."""
    plain = SamplingRound.ahead_uniforms

    def late(self: SamplingRound, places: int) -> np.ndarray:
        own = plain(self, places)
        return np.concatenate([own[:, :1], own[:, :-1]], 1)

    monkeypatch.setattr(SamplingRound, "ahead_uniforms", late)
    assert differ(joining(loaded(execution, DRAWN[0], **BATCHES["chunks"]))) == SAMPLED
