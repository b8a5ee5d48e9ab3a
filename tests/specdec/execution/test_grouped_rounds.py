"""Rounds from graphs of a target with two cache groups, the second with a window or in chunks: the tokens and drafts of
eager rounds with one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import backend_of_ours, count_calls, free_everywhere, launch_ahead, table_head, wrap

from attention.runner import FixedPlanner
from specdec.engine.launcher import Launcher
from specdec.execution.graphs import GraphExecutor
from specdec.requests.sampling import SamplingParams
from specdec.rounds.fixed import FixedTarget
from tests.specdec.execution.test_graphs import FixedPlaceBackend, Replayed, graphs_on_cpu, recorded_on_cpu  # noqa: F401
from tests.specdec.test_hybrid_kv_cache import PROMPTS, SIZES, freed_pages, lived, mixed


def with_graphs(model: Any, head: Any, **options: Any) -> Any:
    with backend_of_ours(FixedPlaceBackend(torch.device("cpu"))):
        wrapped = wrap(model, head, cuda_graphs=True, **options)
    launch_ahead(wrapped)
    return wrapped


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3_text", pytest.param("llama4_text", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"page_size": 16, "max_num_seqs": 5, "kv_cache_tokens": 700}, marks=pytest.mark.long)]
)
@pytest.mark.thorough
def test_tokens_and_drafts_are_those_of_one_group_run_eagerly(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    options: dict[str, Any],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, asked = mixed(kind), SamplingParams(max_new_tokens=40, return_drafts=True)
    right = lived(wrap(model, table_head(model), hybrid_kv_cache=False, **SIZES).generate(PROMPTS, asked))
    replanned, fixed = count_calls(monkeypatch, FixedPlanner, "replan"), count_calls(monkeypatch, FixedTarget, "send")
    launched = count_calls(monkeypatch, Launcher, "before_commit")
    wrapped = with_graphs(model, table_head(model), **SIZES | options)
    captured, most, completions = len(fixed), 0, {}
    for update in wrapped.stream(PROMPTS, asked):
        most = max(most, freed_pages(wrapped))
        if update.completion is not None:
            completions[update.index] = update.completion
    assert [(tokens, drafts) for tokens, drafts, _ in right] == [
        (c.token_ids, c.drafts) for _, c in sorted(completions.items())
    ]
    assert isinstance(wrapped.engine.executor, GraphExecutor) and free_everywhere(wrapped)
    planned = [host for (host,) in replanned if host.other_groups]
    assert len(fixed) - captured == len(planned) > 15, "verifications of a fixed shape plan both groups"
    assert wrapped.engine_stats.rounds > len(planned) + 5, "others run by segments"
    assert len(launched) > 20 and most > 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("gemma3_text", marks=pytest.mark.long), "llama4_text"])
def test_without_drafts_rounds_are_launched_before_the_read(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    kind: str,
) -> None:
    model, sizes = mixed(kind), SIZES | {"num_speculative_tokens": 0}
    asked = SamplingParams(max_new_tokens=40)
    right = wrap(model, hybrid_kv_cache=False, **sizes).generate(PROMPTS, asked)
    wrapped = with_graphs(model, None, **sizes)
    assert [c.token_ids for c in wrapped.generate(PROMPTS, asked)] == [c.token_ids for c in right]
    assert free_everywhere(wrapped)
