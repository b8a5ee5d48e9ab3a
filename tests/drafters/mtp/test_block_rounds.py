"""A module of several blocks in rounds on a recurrent target: from graphs as eagerly, compiled, and two in turn.

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
from torch._dynamo.backends.debugging import aot_eager

import attention.recurrence.functions
import attention.recurrence.runner
from attention.recurrence.functions import REFERENCE
from drafters.loops.head_passes import MtpPasses
from drafters.mtp.checkpoint import load_mtp
from drafters.mtp.head import MtpStack
from drafters.mtp.spec import mtp_target
from specdec.execution.graphs import GraphExecutor
from specdec.model import SpeculativeModel
from specdec.ops.mixtures.choice import using_capturable_experts
from specdec.requests.sampling import SamplingParams
from tests.drafters.loops.test_modules_engine import greedy_by_hand, make, rounds  # noqa: F401
from tests.specdec.execution.test_graphs import FixedPlaceBackend, Replayed, graphs_on_cpu, recorded_on_cpu  # noqa: F401

PROMPTS = random_prompts((5, 33, 1, 17))
GREEDY = SamplingParams(max_new_tokens=16, return_drafts=True)


@pytest.mark.slow
@pytest.mark.thorough
def test_drafts_from_graphs(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tiny_case: Callable[..., Any],
    tmp_path: Path,
) -> None:
    for module in (
        attention.recurrence.runner,
        attention.recurrence.functions,
    ):
        monkeypatch.setattr(module, "recurrences_of", lambda *_: replace(REFERENCE, capturable=True))
    case = tiny_case("nemotron_h", context=0.02)
    noise = torch.randn(32, 32, generator=torch.Generator().manual_seed(3))
    case.tensors["mtp.layers.0.eh_proj.weight"].copy_(torch.cat([torch.eye(32), 0.2 * noise], dim=1))
    folder, sizes = str(case.write(tmp_path)), {"num_speculative_tokens": 3, "max_num_batched_tokens": 24}
    eager = wrap(case.model, folder, **sizes).generate(PROMPTS, GREEDY)
    with backend_of_ours(FixedPlaceBackend(torch.device("cpu"))):
        graphed = wrap(case.model, folder, cuda_graphs=True, **sizes)
    launch_ahead(graphed)
    assert isinstance(graphed.engine.executor, GraphExecutor) and len(graphed.head.blocks) == 2
    completions = graphed.generate(PROMPTS, GREEDY)
    assert [(c.token_ids, c.drafts) for c in completions] == [(c.token_ids, c.drafts) for c in eager]
    accepted = [r.accepted for c in completions for r in c.stats.rounds]
    assert 0 in accepted and max(accepted) >= 2
    assert sum(graph.replays for graph in graphs_on_cpu) > 20 and free_everywhere(graphed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_5"])
@torch.inference_mode()
@pytest.mark.thorough
def test_a_pass_is_one_compiled_graph(name: str, tiny_case: Callable[..., Any], tmp_path: Path) -> None:
    """Of any number of rows, experts and rotary positions of three sections included."""
    case, traced = tiny_case(name), list[Any]()
    (head,) = load_mtp(case.write(tmp_path), mtp_target(case.model), torch.float32, "cpu")
    passes = MtpPasses(head)

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return query + 2 * value.repeat_interleave(2, dim=1)  # a stand-in: the compiler does not look into it

    def backend(graph: Any, inputs: Any) -> Any:
        traced.append(graph)
        return aot_eager(graph, inputs)

    torch.compiler.reset()
    step = torch.compile(passes.step, backend=backend, fullgraph=True, dynamic=True)
    with passes.carrying(attend), using_capturable_experts(head):
        for rows in (3, 7, 5):
            x, ids = torch.randn(rows, 32), torch.arange(rows)
            for ours, plain in zip(step(x, ids, ids + 4), passes.step(x, ids, ids + 4), strict=True):
                torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    assert len(traced) == 1


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.thorough
def test_two_modules_of_two_blocks_in_turn(make: Callable[..., SpeculativeModel]) -> None:  # noqa: F811
    """Tokens are the target's, drafts those of modules that recompute everything."""
    wrapped = make("nemotron_h", 2, num_speculative_tokens=3, max_num_batched_tokens=16)
    assert isinstance(wrapped.head, MtpStack) and len(wrapped.runners[1].layers) == 2
    completions = wrapped.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in completions] == [greedy_by_hand(wrapped.hf_model, p, 16) for p in PROMPTS]
    compared = [r for p, c in zip(PROMPTS, completions, strict=True) for r in rounds(wrapped, p, c)]
    assert len(compared) > 20 and [ours for ours, _ in compared] == [oracle for _, oracle in compared]
    assert max(r.accepted for c in completions for r in c.stats.rounds) >= 2 and free_everywhere(wrapped)
