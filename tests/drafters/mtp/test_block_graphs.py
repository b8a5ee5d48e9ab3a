"""A module of several blocks in rounds from graphs on a recurrent target: drafts are those of eager rounds.

The graphs are those of tests/specdec/execution/test_graphs.py: launches that run again on the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import backend_of_ours, free_everywhere, launch_ahead, random_prompts, wrap

import attention.recurrence.runner
import specdec.loading.states
from attention.recurrence.registry import REFERENCE
from specdec.execution.graphs import GraphExecutor
from specdec.requests.sampling import SamplingParams
from tests.specdec.execution.test_graphs import FixedPlaceBackend, Replayed, graphs_on_cpu, recorded_on_cpu  # noqa: F401

PROMPTS = random_prompts((5, 33, 1, 17))
GREEDY = SamplingParams(max_new_tokens=16, return_drafts=True)


def test_drafts_from_graphs(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tiny_case: Callable[..., Any],
    tmp_path: Path,
) -> None:
    for module in (attention.recurrence.runner, specdec.loading.states):  # torch's functions may stand in these graphs
        monkeypatch.setattr(module, "recurrences_of", lambda device: replace(REFERENCE, capturable=True))
    case = tiny_case("nemotron_h", context=0.02)
    noise = torch.randn(32, 32, generator=torch.Generator().manual_seed(3))
    case.tensors["mtp.layers.0.eh_proj.weight"].copy_(torch.cat([torch.eye(32), 0.2 * noise], dim=1))
    folder, sizes = str(case.write(tmp_path)), {"num_speculative_tokens": 3, "max_num_batched_tokens": 24}
    eager = wrap(case.model, folder, **sizes).generate(PROMPTS, GREEDY)
    with backend_of_ours(FixedPlaceBackend(torch.device("cpu"))):
        graphed = wrap(case.model, folder, cuda_graphs=True, **sizes)
    launch_ahead(graphed)
    assert isinstance(graphed.executor, GraphExecutor) and len(graphed.head.blocks) == 2
    completions = graphed.generate(PROMPTS, GREEDY)
    assert [(c.token_ids, c.drafts) for c in completions] == [(c.token_ids, c.drafts) for c in eager]
    accepted = [r.accepted for c in completions for r in c.stats.rounds]
    assert 0 in accepted and max(accepted) >= 2
    assert sum(graph.replays for graph in graphs_on_cpu) > 20 and free_everywhere(graphed)
