"""Several modules in rounds from graphs: drafts are those of eager rounds and of modules that recompute everything.

The graphs are those of tests/specdec/execution/test_graphs.py: launches that run again on the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import backend_of_ours, count_calls, free_everywhere, launch_ahead, random_prompts

import drafters.loops.prefill
import specdec.execution.ragged
import specdec.rounds.fixed
from attention.batch.host import HostBatch
from drafters.loops.base import CarriedRows, FixedPrefill
from drafters.loops.fixed_forms import FixedModules
from drafters.loops.prefill import rows_before, shifted_batch
from specdec.compiler.compiling import compiler_settings
from specdec.engine.launcher import Launcher
from specdec.execution.graphs import GraphExecutor
from specdec.execution.ragged import RaggedPrefill
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from specdec.rounds.randomness import SamplingRound
from tests.drafters.loops.test_modules_engine import GREEDY, NEW, PROMPTS, SHARED, greedy_by_hand, make, rounds  # noqa: F401
from tests.specdec.execution.test_graphs import (
    FixedPlaceBackend,
    FixedPlaceBuilder,
    Replayed,
    graphs_on_cpu,  # noqa: F401
    recorded_on_cpu,  # noqa: F401
    traced_graphs,
)

Make = Callable[..., SpeculativeModel]
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 24}
"""Prompts come in chunks, beside verifications, and rows join and leave."""


def with_graphs(build: Make, *args: Any, **options: Any) -> SpeculativeModel:
    with backend_of_ours(FixedPlaceBackend(torch.device("cpu"))):
        wrapped = build(*args, cuda_graphs=True, **options)
    launch_ahead(wrapped)
    assert isinstance(wrapped.engine.executor, GraphExecutor)
    return wrapped


@torch.inference_mode()
def compared(wrapped: SpeculativeModel, prompts: list[list[int]], completions: list[Any]) -> list[tuple[Any, Any]]:
    return [r for p, c in zip(prompts, completions, strict=True) for r in rounds(wrapped, p, c)]


def emphasise_attention(wrapped: SpeculativeModel) -> None:
    with torch.no_grad():
        for each in wrapped.head.heads:  # type: ignore[union-attr]
            each.blocks[0].self_attn.o_proj.weight.mul_(50)


def found(completions: list[Any]) -> list[Any]:
    return [(c.token_ids, c.drafts, c.stats.rounds) for c in completions]


def check(build: Make, name: str, modules: int, prompts: list[list[int]], params: Any, **options: Any) -> Any:
    """Tokens, drafts and rounds as of eager rounds, drafts as of the oracle; returns the model with graphs."""
    eager = build(name, modules, **options)
    emphasise_attention(eager)
    expected = eager.generate(prompts, params)
    graphed = with_graphs(build, name, modules, **options)
    emphasise_attention(graphed)
    completions = graphed.generate(prompts, params)
    assert found(completions) == found(expected)
    drafted = compared(graphed, prompts, completions)
    assert drafted and [ours for ours, _ in drafted] == [oracle for _, oracle in drafted]
    assert free_everywhere(graphed)
    return graphed


def long(*values: Any) -> Any:
    """A parameter that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.long)


PAIRS = [("mimo", 3, 2, 1), ("ernie", 4, 5, 4)]
"""Fewer drafts than modules; more than modules, so that the last one reads its own output."""
LONG_PAIRS = [("mimo", 2, 1, 1), ("mimo", 3, 5, 4), ("ernie", 4, 3, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "modules", "drafts", "page_size"),
    [("mimo", 2, 3, 4), *PAIRS, *(long(*pair) for pair in LONG_PAIRS)],
)
@pytest.mark.thorough
def test_tokens_and_drafts_are_those_of_eager_rounds(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    make: Make,  # noqa: F811
    name: str,
    modules: int,
    drafts: int,
    page_size: int,
) -> None:
    """Rows that join and leave, prompts in chunks and shorter than the modules are many, few drafts at the end."""
    ahead: list[Any] = []
    before_commit = Launcher.before_commit
    monkeypatch.setattr(Launcher, "before_commit", lambda *args: (ahead.append(before_commit(*args)), ahead[-1])[1])
    prefills = count_calls(monkeypatch, FixedModules, "prefill")
    ragged = count_calls(monkeypatch, RaggedPrefill, "run")
    lengths = (40, 14, 45, 3, 20, 9) if modules == 4 else (24, 10, 27, 3, 14, 7)
    params = [SamplingParams(max_new_tokens=n, return_drafts=True) for n in lengths]
    sizes = {"num_speculative_tokens": drafts, "page_size": page_size, **SIZES}
    check(make, name, modules, PROMPTS, params, **sizes)
    assert sum(graph.replays for graph in graphs_on_cpu) > 20 and len(ragged) > 6
    assert any(upcoming is not None for upcoming in ahead)
    assert drafts == 1 or len(prefills) > len(ragged) + 10, "rounds of one shape as well"


@pytest.mark.slow
def test_one_request_at_once(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    make: Make,  # noqa: F811
) -> None:
    """Its draft steps have a row beside it, and so have the vectors that passes of any shape carry."""
    sizes = {"num_speculative_tokens": 3, **SIZES, "max_num_seqs": 1}
    check(make, "mimo", 2, PROMPTS[:2], SamplingParams(max_new_tokens=9, return_drafts=True), **sizes)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "modules"), [("mimo", 3), long("deepseek_v3", 2)])
@pytest.mark.thorough
def test_pages_of_other_requests(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    make: Make,  # noqa: F811
    name: str,
    modules: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted: a pass of any shape begins a module's rows before the first position that the request reads."""
    graphed = check(make, name, modules, SHARED, GREEDY, num_speculative_tokens=4, **SIZES)
    again = graphed.generate(SHARED, GREEDY)
    drafted = compared(graphed, SHARED, again)
    assert drafted and [ours for ours, _ in drafted] == [oracle for _, oracle in drafted]
    assert graphed.engine_stats.cached_tokens > 100
    monkeypatch.setattr(drafters.loops.prefill, "shifted_batch", lambda m, *place: shifted_batch(m, *place[:4]))
    graphed.refresh()
    assert any(ours != oracle for ours, oracle in compared(graphed, SHARED, graphed.generate(SHARED, GREEDY)))


@pytest.mark.slow
@pytest.mark.parametrize(("modules", "drafts"), [(2, 3), long(3, 5)])
@pytest.mark.thorough
def test_a_latent_mixture(graphs_on_cpu: list[Replayed], make: Make, modules: int, drafts: int) -> None:  # noqa: F811
    """MLA and experts in target and modules, prompts beside verifications."""
    check(make, "deepseek_v3", modules, PROMPTS, GREEDY, num_speculative_tokens=drafts, **SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mimo", long("deepseek_v3")])
@pytest.mark.thorough
def test_pages_that_lie_head_by_head(graphs_on_cpu: list[Replayed], make: Make, name: str) -> None:  # noqa: F811
    graphed = check(make, name, 2, PROMPTS[:4], GREEDY, num_speculative_tokens=3, kv_cache_layout="HND", **SIZES)
    assert {layer.layout for runner in graphed.runners for layer in runner.layers} == {"HND"}
    assert sum(graph.replays for graph in graphs_on_cpu) > 20


@pytest.mark.slow
@pytest.mark.parametrize(("modules", "drafts", "temperature"), [long(2, 4, 0.0), long(4, 4, 0.0), (3, 4, 0.9)])
@pytest.mark.thorough
def test_preempted_and_short_requests_go_through_the_rounds_they_would_alone(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    make: Make,  # noqa: F811
    modules: int,
    drafts: int,
    temperature: float,
) -> None:
    """A sampled request's drafts are not the oracle's, but those that it has alone."""
    prompts = random_prompts((1, 33, 1, 2, 30, 3, 17), seed=4)
    params = [
        SamplingParams(max_new_tokens=14, temperature=temperature, seed=i, return_drafts=True)
        for i in range(len(prompts))
    ]
    name = "ernie" if modules == 4 else "mimo"
    graphed = with_graphs(make, name, modules, num_speculative_tokens=drafts, kv_cache_tokens=72, **SIZES)
    emphasise_attention(graphed)
    together = graphed.generate(prompts, params)
    assert graphed.engine_stats.preemptions > 0
    alone = [graphed.generate([p], s)[0] for p, s in zip(prompts, params, strict=True)]
    assert found(together) == found(alone)
    if not temperature:
        drafted = compared(graphed, prompts * 2, together + alone)
        assert [ours for ours, _ in drafted] == [oracle for _, oracle in drafted]
    first = [min(drafts, len(p) + 1) if len(p) < modules else drafts for p in prompts]
    assert [len(c.drafts[0]) for c in alone] == first
    assert sum(graph.replays for graph in graphs_on_cpu) > 30


@pytest.mark.slow
@pytest.mark.parametrize(("modules", "drafts"), [(2, 4), long(3, 5)])
@pytest.mark.thorough
def test_prompts_of_one_token(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    make: Make,  # noqa: F811
    modules: int,
    drafts: int,
) -> None:
    """Later modules have no rows yet: such rounds have no fixed shape, and the row gets fewer drafts, ahead as well."""
    options = {"num_speculative_tokens": drafts, "max_num_seqs": 2}
    check(make, "mimo", modules, [PROMPTS[2], [7]], GREEDY, **options)
    assert sum(graph.replays for graph in graphs_on_cpu) > 20


@pytest.mark.slow
@pytest.mark.thorough
def test_what_is_captured_while_requests_run_leaves_what_they_carry(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    make: Make,  # noqa: F811
) -> None:
    """The third prompt joins a request that drafts, in a round of a bucket that is captured then."""
    captured: list[int] = []
    capture = specdec.execution.ragged.record_segments
    monkeypatch.setattr(
        specdec.execution.ragged, "record_segments", lambda *args: (captured.append(1), capture(*args))[1]
    )
    params = [SamplingParams(max_new_tokens=n, return_drafts=True) for n in (40, 4, 8)]
    sizes = {"num_speculative_tokens": 3, "max_num_seqs": 2, "max_num_batched_tokens": 320}
    check(make, "mimo", 2, random_prompts((5, 9, 90)), params, **sizes)
    assert len(captured) == 4 + 3 + 2, "of the target and of the modules at the start, and one of each meanwhile"


@pytest.mark.slow
@pytest.mark.thorough
def test_modules_are_traced_without_a_break(
    recorded_on_cpu: list[Replayed],  # noqa: F811
    make: Make,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As compiled graphs with fused siblings in every module: prefill and steps share their code (float32)."""
    sizes, prompts = {"num_speculative_tokens": 3, "max_num_seqs": 2}, PROMPTS[:3]
    expected = make("mimo", 2, **sizes).generate(prompts, GREEDY)
    traced = traced_graphs(monkeypatch)
    graphed = with_graphs(make, "mimo", 2, **sizes)
    assert len(traced) <= 9  # the target, and of the modules what is new for one row, or for tokens of one step
    with compiler_settings():  # a real replay compiles nothing anew
        completions = graphed.generate(prompts, GREEDY)
    assert found(completions) == found(expected)
    assert graphed.engine.executor.report.fused_groups == 2 * 4 + 2 * 2  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drawn", "planted"), [("probabilistic", False), long("probabilistic", True), long("greedy", True)]
)
@pytest.mark.thorough
def test_sampled_rows_draft_and_verify_beside_greedy_ones_as_eagerly(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    make: Make,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    drawn: str,
    planted: bool,
) -> None:
    """Draft ids, given the uniforms, are those of eager rounds, in rounds with prompts and without.

    Planted: drafts take the uniforms of the position one further on; greedy drafts take none.
    """
    if planted:
        plain = SamplingRound.ahead_uniforms
        monkeypatch.setattr(SamplingRound, "ahead_uniforms", lambda self, places: plain(self, places + 1)[:, 1:])
    settings: list[dict[str, Any]] = [{}, {"temperature": 0.9}, {"temperature": 0.7, "top_p": 0.8}]
    settings += [{"temperature": 1.2, "top_k": 9, "min_p": 0.02}, {}, {"temperature": 2.0}]
    params = [SamplingParams(max_new_tokens=16, seed=i, return_drafts=True, **each) for i, each in enumerate(settings)]
    sizes: dict[str, Any] = {"num_speculative_tokens": 5, "draft_sampling": drawn, **SIZES}
    eager = found(make("mimo", 3, **sizes).generate(PROMPTS, params))
    graphed = found(with_graphs(make, "mimo", 3, **sizes).generate(PROMPTS, params))
    same = [a == b for a, b in zip(eager, graphed, strict=True)]
    if planted and drawn == "probabilistic":
        assert same == [True, False, False, False, True, False]
    else:
        assert all(same)


def altered_prefill(change: Callable[[FixedModules, FixedPrefill], FixedPrefill], keep: bool = False) -> Any:
    """The draft prefill over changed inputs; keep: what is carried stays as it was."""
    plain = FixedModules.prefill

    def prefill(self: FixedModules, inputs: FixedPrefill, *args: Any, **options: Any) -> Any:
        carried = self.carried.clone()
        chosen = plain(self, change(self, inputs), *args, **options)
        if keep:
            self.carried.copy_(carried)
        return chosen

    return prefill


def _with_rows(inputs: FixedPrefill, rows: torch.Tensor) -> FixedPrefill:
    assert inputs.carried is not None
    return replace(inputs, carried=CarriedRows(rows, inputs.carried.sources))


def _same(loop: FixedModules, inputs: FixedPrefill) -> FixedPrefill:
    return inputs


def _one_slot(loop: FixedModules, inputs: FixedPrefill) -> FixedPrefill:
    assert inputs.carried is not None
    return _with_rows(inputs, inputs.carried.request_rows * 0)


def _other_module(loop: FixedModules, inputs: FixedPrefill) -> FixedPrefill:
    loop.carried.copy_(loop.carried.roll(1, 0))
    return inputs


def _row_itself(query_start_loc: np.ndarray, num_carried: int) -> np.ndarray:
    return np.arange(num_carried, num_carried + query_start_loc[-1])


def _wrong_first(query_start_loc: np.ndarray, num_carried: int) -> np.ndarray:
    sources = rows_before(query_start_loc, num_carried)
    sources[query_start_loc[:-1]] = np.roll(sources[query_start_loc[:-1]], 1)
    return sources


def _not_shifted(module: int, *place: Any) -> HostBatch:
    return shifted_batch(module - 1, *place)


def _not_split(
    module: int, query_start_loc: np.ndarray, first_positions: np.ndarray, table: np.ndarray, page_size: int, *_: Any
) -> HostBatch:
    return shifted_batch(0, query_start_loc, np.maximum(first_positions - module, 0), table, page_size)


PLANTED: dict[str, tuple[Any, str, Any]] = {
    "what is carried is not updated": (FixedModules, "prefill", altered_prefill(_same, keep=True)),
    "what is carried is another module's": (FixedModules, "prefill", altered_prefill(_other_module)),
    "all requests carry in one place": (FixedModules, "prefill", altered_prefill(_one_slot)),
    "rows read their own output": (drafters.loops.prefill, "rows_before", _row_itself),
    "rows carry a neighbour's": (drafters.loops.prefill, "rows_before", _wrong_first),
    "a pass stands where the one before does": (
        drafters.loops.prefill,
        "shifted_batch",
        _not_shifted,
    ),
    "rows that do not exist are the first ones": (drafters.loops.prefill, "shifted_batch", _not_split),
}


SHOWN = ("what is carried is not updated", "rows that do not exist are the first ones")
"""What `make test` plants: one defect of what is carried, one of where a pass stands."""


def drafts_with(build: Make, modules: int = 3) -> list[tuple[Any, Any]]:
    wrapped = with_graphs(build, "mimo", modules, num_speculative_tokens=4, **SIZES)
    emphasise_attention(wrapped)
    return compared(wrapped, PROMPTS, wrapped.generate(PROMPTS, GREEDY))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name in SHOWN else long(name) for name in PLANTED],
)
@pytest.mark.thorough
def test_a_planted_defect_shows_in_the_drafts(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    make: Make,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setattr(*PLANTED[name])
    assert any(ours != oracle for ours, oracle in drafts_with(make))


@pytest.mark.long
def test_a_stale_plan_of_a_later_pass_shows(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    make: Make,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted: pass 1 of one shape is never planned anew."""
    sent = specdec.rounds.fixed.FixedTarget.send
    later: list[HostBatch] = []
    replan = FixedPlaceBuilder.replan

    def send(self: Any, target: Any) -> Any:
        result = sent(self, target)
        later[:] = result[1][1:2]
        return result

    def stale(self: FixedPlaceBuilder, host: HostBatch) -> None:
        if not any(host is each for each in later) or self.box.plan is None:
            replan(self, host)

    monkeypatch.setattr(specdec.rounds.fixed.FixedTarget, "send", send)
    monkeypatch.setattr(FixedPlaceBuilder, "replan", stale)
    assert any(ours != oracle for ours, oracle in drafts_with(make, 2))


@pytest.mark.slow
def test_tokens_are_the_targets_own(graphs_on_cpu: list[Replayed], make: Make) -> None:  # noqa: F811
    wrapped = with_graphs(make, "mimo", 2, num_speculative_tokens=3)
    completions = wrapped.generate(PROMPTS[:4], GREEDY)
    with torch.inference_mode():
        expected = [greedy_by_hand(wrapped.hf_model, p, NEW) for p in PROMPTS[:4]]
    assert [c.token_ids for c in completions] == expected
