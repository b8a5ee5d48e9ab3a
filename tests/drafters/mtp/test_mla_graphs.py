"""One module of an MLA target with experts in rounds of any shape: segments and sampled kernels serve it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fakes import count_calls, free_everywhere

import specdec.execution.graphs
from drafters.mtp.head import MtpHead
from specdec.execution.ragged import RaggedPrefill, RaggedTarget
from specdec.execution.sampled import SampledDrafts
from specdec.requests.sampling import SamplingParams
from tests.drafters.loops.test_modules_engine import PROMPTS, make  # noqa: F401
from tests.drafters.loops.test_modules_graphs import SIZES, found, with_graphs
from tests.specdec.execution.test_graphs import Replayed, graphs_on_cpu, recorded_on_cpu  # noqa: F401


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("sampled", [pytest.param(False, marks=pytest.mark.long), True])
def test_prompts_in_chunks_beside_verifications(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    make: Callable[..., Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    drafts: int,
    sampled: bool,
) -> None:
    """Tokens, drafts and rounds are those of eager rounds; every second row is sampled."""
    ragged = count_calls(monkeypatch, RaggedTarget, "logits")
    prefills = count_calls(monkeypatch, RaggedPrefill, "run")
    decided = count_calls(monkeypatch, specdec.execution.graphs, "decide_sampled")
    drawn = count_calls(monkeypatch, SampledDrafts, "choose")
    params = [
        SamplingParams(max_new_tokens=16, seed=i, temperature=0.5 * (sampled and i % 2), return_drafts=True)
        for i in range(len(PROMPTS))
    ]
    sizes: dict[str, Any] = {"num_speculative_tokens": drafts, **SIZES, "max_num_batched_tokens": 16}
    expected = make("deepseek_v3", 1, **sizes).generate(PROMPTS, params)
    graphed = with_graphs(make, "deepseek_v3", 1, **sizes)
    assert isinstance(graphed.head, MtpHead) and len(graphed.runners) == 2
    assert all(spec.value_in_key for runner in graphed.runners for spec in runner.group.attention_specs), "MLA"
    before = len(drawn)
    completions = graphed.generate(PROMPTS, params)
    assert found(completions) == found(expected)
    assert max(r.accepted for c in completions for r in c.stats.rounds) >= 1
    assert len(prefills) == len(ragged) > 9, "every round of any shape drafts before it is read"
    assert any(len(indices) > drafts + 1 for _, _, indices, *_ in ragged), "prompts beside verifications"
    assert (len(decided) > 0) == sampled and (len(drawn) > before) == sampled
    assert sum(graph.replays for graph in graphs_on_cpu) > 20
    assert free_everywhere(graphed)
