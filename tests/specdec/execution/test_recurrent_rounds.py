"""Rounds from graphs of targets with recurrent layers: tokens of eager rounds; one compiled graph for all shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import backend_of_ours, count_calls, free_everywhere, launch_ahead, random_prompts, wrap

import attention.recurrence.functions
import attention.recurrence.runner
from attention.recurrence.functions import REFERENCE
from specdec import SamplingParams
from specdec.engine.launcher import Launcher
from specdec.errors import InvalidInputError, SpecdecWarning
from specdec.execution.graphs import GraphExecutor
from specdec.rounds.fixed import FixedTarget
from specdec.selftest.eager_reference import DummyRows, ReadPiece, read_eager
from tests.hybrids import TYPES, RecallHead, greedy_text, tiny_hybrid
from tests.specdec.execution.test_graphs import FixedPlaceBackend, Replayed, graphs_on_cpu, recorded_on_cpu  # noqa: F401

PROMPTS = random_prompts([17, 3, 33, 9, 21])
NEW = 24
SIZES: dict[str, Any] = {"max_num_batched_tokens": 48, "max_model_len": 128}


@pytest.fixture
def capturable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference may stand in graphs that are launches."""
    for module in (attention.recurrence.runner, attention.recurrence.functions):
        monkeypatch.setattr(module, "recurrences_of", lambda *_: replace(REFERENCE, capturable=True))


def with_graphs(name: str, drafts: int, prompts: list[list[int]] = PROMPTS, **options: Any) -> Any:
    head = RecallHead([greedy_text(name, prompt, NEW) for prompt in prompts], 0.7) if drafts else None
    with backend_of_ours(FixedPlaceBackend(torch.device("cpu"))):
        wrapped = wrap(
            tiny_hybrid(name), head, cuda_graphs=True, num_speculative_tokens=drafts or None, **SIZES | options
        )
    launch_ahead(wrapped)
    return wrapped


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "drafts"),
    [
        *(("qwen3_next", 3), ("lfm2", 3), ("mamba2", 0)),
        *(pytest.param("falcon_h1", drafts, marks=pytest.mark.long) for drafts in (0, 3)),
        *(pytest.param("jamba", drafts, marks=pytest.mark.long) for drafts in (0, 3)),
        *(pytest.param(name, 0, marks=pytest.mark.long) for name in ("qwen3_next", "lfm2")),
        pytest.param("mamba2", 3, marks=pytest.mark.long),
    ],
)
@pytest.mark.cases(1)
def test_tokens_are_transformers_own(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    capturable: None,
    name: str,
    drafts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fixed, ahead = count_calls(monkeypatch, FixedTarget, "send"), count_calls(monkeypatch, Launcher, "before_commit")
    wrapped = with_graphs(name, drafts)
    captured = len(fixed)
    right = [greedy_text(name, prompt, NEW) for prompt in PROMPTS]
    for _ in range(2):
        completions = wrapped.generate(PROMPTS, SamplingParams(NEW))
        assert [p + list(c.token_ids) for p, c in zip(PROMPTS, completions, strict=True)] == right
    assert isinstance(wrapped.engine.executor, GraphExecutor) and free_everywhere(wrapped)
    assert len(fixed) - captured > 15, "verifications of a fixed shape"
    assert (len(ahead) > 20) == (drafts > 0), "launched before the commit"
    assert wrapped.graphs == "on"


@pytest.mark.slow
@pytest.mark.thorough
def test_a_request_that_leaves_brings_the_state_of_its_prompt(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    capturable: None,
) -> None:
    """Its last chunk may be one token, read in a round like those that decode: the round after it, launched before this
    one is read, would fold the first new token into the state too."""
    prompts = random_prompts([1, 17, 1, 49])
    right = [greedy_text("qwen3_next", prompt, NEW) for prompt in prompts]
    p, d = (with_graphs("qwen3_next", 0, prompts) for _ in range(2))
    for prompt, text in zip(prompts, right, strict=True):
        (completion,) = d.resume(p.prefill([prompt], SamplingParams(NEW)))
        assert prompt + list(completion.token_ids) == text
    completions = d.resume(p.prefill(prompts, SamplingParams(NEW)))
    assert [q + list(c.token_ids) for q, c in zip(prompts, completions, strict=True)] == right


class Compiled:
    """A backend of the compiler that runs what it traced, and counts it."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.graphs.append(module)
        return module.forward


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["qwen3_next", *(pytest.param(n, marks=pytest.mark.long) for n in TYPES if n != "qwen3_next")],
)
@pytest.mark.thorough
def test_one_graph_serves_all_shapes_of_a_compiled_model(name: str) -> None:
    """Recurrences are operators that the compiler does not look into; each layer's has a number of its own."""
    wrapped, counted = wrap(tiny_hybrid(name), max_model_len=128), Compiled()
    target = wrapped.target
    torch.compiler.reset()
    model = torch.compile(target.hf_model, backend=counted, fullgraph=True, dynamic=True)
    lens = np.array([19, 5, 11])
    rows, start = DummyRows.of(target, lens), np.zeros(3, np.int64)
    with torch.no_grad():
        for cut in (lens - 3, lens - 2, lens - 1, lens):
            kept = target.states.copied()
            piece = ReadPiece(start, cut, range(3))
            right = rows.read_by_row(piece)
            target.states.put_back(kept)
            found = rows.read_by_row(piece, model)
            for ours, own in zip(found, right, strict=True):
                torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)
            start = cut
        alone = rows.read_by_row(ReadPiece(lens * 0, lens * 0 + 1, (0,)), model)  # one token, and padding
        torch.testing.assert_close(alone[0], read_eager(target.hf_model, [rows.ids[0][:1]])[0], rtol=1e-4, atol=1e-4)
    assert len(counted.graphs) == 1
    nodes = [node for node in counted.graphs[0].graph.nodes if str(node.target).startswith("specdec")]
    numbers = [node.args[-1] for node in nodes if "attend" not in str(node.target)]
    assert numbers == list(range(len(target.states.states)))


@pytest.mark.slow
def test_what_cannot_be_captured_runs_without_graphs_and_says_so(graphs_on_cpu: list[Replayed]) -> None:  # noqa: F811
    with pytest.raises(InvalidInputError, match="computed by torch functions, which no CUDA graph can hold"):
        with_graphs("qwen3_next", 0)
    with backend_of_ours(FixedPlaceBackend(torch.device("cpu"))), pytest.warns(SpecdecWarning, match="no CUDA graph"):
        wrapped = wrap(tiny_hybrid("qwen3_next"), max_model_len=128, cuda_graphs="auto")
    assert wrapped.graphs.startswith("off: recurrent layers")


@pytest.mark.long
def test_a_compiled_model_says_the_same(
    recorded_on_cpu: list[Replayed],  # noqa: F811
    capturable: None,
) -> None:
    wrapped = with_graphs("qwen3_next", 3)
    completions = wrapped.generate(PROMPTS, SamplingParams(NEW))
    right = [greedy_text("qwen3_next", prompt, NEW) for prompt in PROMPTS]
    assert [p + list(c.token_ids) for p, c in zip(PROMPTS, completions, strict=True)] == right
