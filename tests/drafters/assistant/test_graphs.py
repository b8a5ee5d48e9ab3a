"""A small model in rounds from graphs: the target's own tokens, and the drafts that the model makes without a cache.

The graphs are those of tests/specdec/execution/test_graphs.py: launches that run again on the same buffers.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from fakes import count_calls, free_everywhere, hf_greedy, hooks_of, tiny_llama, wrap

from drafters.loops.fixed_forms import FixedTokens
from specdec.compiler.compiling import compiler_settings
from specdec.execution.graphs import GraphExecutor
from specdec.execution.ragged import RaggedPrefill
from specdec.requests.sampling import SamplingParams
from specdec.selftest.twin import enlarge
from tests.drafters.assistant.test_rounds import GREEDY, OTHERS, PROMPTS, TIGHT, check, small
from tests.specdec.execution.test_graphs import (
    Replayed,
    graphs_on_cpu,  # noqa: F401
    recorded_on_cpu,  # noqa: F401
    traced_graphs,
    with_graphs,
)

SIZES: dict[str, Any] = {"num_speculative_tokens": 4, "max_num_seqs": 5, "max_num_batched_tokens": 36}
SETTINGS: list[dict[str, Any]] = [{}, {"temperature": 0.9}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 2.0}]


def found(completions: Any) -> list[Any]:
    return [(c.token_ids, c.drafts, c.stats.rounds) for c in completions]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, TIGHT, {"page_size": 1, "enable_prefix_caching": False}])
def test_tokens_are_the_targets_own_and_drafts_those_without_a_cache(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    """Prompts in chunks beside verifications, rows that join and leave, padding rows, few drafts at the end."""
    prefills = count_calls(monkeypatch, FixedTokens, "prefill")
    ragged = count_calls(monkeypatch, RaggedPrefill, "run")
    wrapped = with_graphs(small(), **SIZES | options)
    assert isinstance(wrapped.engine.executor, GraphExecutor)
    completions = wrapped.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in completions] == [hf_greedy(p, 24) for p in PROMPTS]
    check(small(), completions)
    assert found(completions) == found(wrap(tiny_llama(), small(), **SIZES | options).generate(PROMPTS, GREEDY))
    assert (wrapped.engine_stats.preemptions > 0) == (options is TIGHT)
    assert len(ragged) > 4 and len(prefills) > len(ragged) + 10, "rounds of any shape, and of one"
    assert free_everywhere(wrapped)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("drafts", [1, 2, 5])
@pytest.mark.cases(1)
def test_every_number_of_drafts_one_request_at_once_to_the_last_position(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    drafts: int,
) -> None:
    """Draft steps have a row beside it; the bonus token may be the first one that no page is kept for."""
    sizes = {"num_speculative_tokens": drafts, "max_num_seqs": 1, "max_model_len": 40}
    prompts = PROMPTS[:4]
    wrapped = with_graphs(small(), **sizes)
    completions = wrapped.generate(prompts, SamplingParams(max_new_tokens=100, return_drafts=True))
    assert [c.token_ids for c in completions] == [hf_greedy(p, 40 - len(p)) for p in prompts]
    check(small(), completions)
    assert free_everywhere(wrapped)


@pytest.mark.slow
@pytest.mark.thorough
def test_pages_of_a_shared_prefix(graphs_on_cpu: list[Replayed]) -> None:  # noqa: F811
    """Requests that begin behind another's pages, in the middle of a prompt and at its last token."""
    wrapped = with_graphs(small(), **SIZES)
    first = PROMPTS[1]
    wrapped.generate([first], SamplingParams(max_new_tokens=4))
    prompts = [[*first[:26], 1, 2], first, first[:29], first[:25]]
    completions = wrapped.generate(prompts, SamplingParams(max_new_tokens=8, return_drafts=True))
    assert wrapped.engine_stats.cached_tokens >= 24 * 4
    assert [c.token_ids for c in completions] == [hf_greedy(p, 8) for p in prompts]
    check(small(), completions, 4)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("drawn", ["probabilistic", "greedy"])
@pytest.mark.cases(1)
def test_sampled_rows_draft_and_verify_beside_greedy_ones_as_eagerly(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    drawn: str,
) -> None:
    """Draft ids, given the uniforms, are those of eager rounds, which are the oracle's."""
    params = [SamplingParams(max_new_tokens=16, seed=i, return_drafts=True, **SETTINGS[i % 4]) for i in range(6)]
    sizes = SIZES | {"draft_sampling": drawn}
    eager = found(wrap(tiny_llama(), small(), **sizes).generate(PROMPTS, params))
    assert found(with_graphs(small(), **sizes).generate(PROMPTS, params)) == eager


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.cases(1)
def test_models_of_other_series(graphs_on_cpu: list[Replayed], kind: str) -> None:  # noqa: F811
    """Among them one whose positions end before the target's."""
    torch.manual_seed(0)
    model = OTHERS[kind]().eval()
    enlarge(model, 0)
    wrapped = with_graphs(model, **SIZES)
    completions = wrapped.generate(PROMPTS[:4], GREEDY)
    assert [c.token_ids for c in completions] == [hf_greedy(p, 24) for p in PROMPTS[:4]]
    wrapped.close()
    check(model, completions)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_model_is_traced_once_and_is_as_it_was_afterwards(
    recorded_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one compiled graph with fused siblings, for the draft prefill and the steps (float32)."""
    traced = traced_graphs(monkeypatch)
    model, ids = small(), torch.tensor([PROMPTS[0]])
    before, hooks = model(ids).logits, hooks_of(model)
    graphed = with_graphs(model, **SIZES)
    assert graphed.engine.executor.report.fused_groups == 2 * 4 * 2
    with compiler_settings():  # a real replay compiles nothing anew
        completions = graphed.generate(PROMPTS, GREEDY)
    assert len(traced) == 2, "the target and the small model"
    assert torch.equal(model(ids).logits, before), "the user's own forward meanwhile"
    graphed.close()
    check(small(), completions)
    del graphed
    recorded_on_cpu.clear()
    gc.collect()  # graphs refer to themselves
    assert hooks_of(model) == hooks and torch.equal(model(ids).logits, before)
