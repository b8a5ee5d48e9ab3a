"""CUDA graphs by default: tried where they can be, given up by name where they cannot, an error where they must."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from fakes import backend_of_ours, eagle3_head, hf_greedy, hooks_of, random_prompts, tiny_llama, wrap
from torch._dynamo.utils import counters

import specdec.compiler.compiling
import specdec.execution.capture
import specdec.execution.graphs
from specdec import InvalidInputError, InvariantError, SpecdecWarning, UnsupportedModelError
from specdec.cli.tables import route_rows
from specdec.compiler.siblings import SiblingLinear
from specdec.execution.capture import rehearse
from specdec.execution.eager import EagerExecutor
from specdec.execution.graphs import GraphExecutor
from specdec.requests.sampling import SamplingParams
from tests.specdec.execution.test_graphs import FixedPlaceBackend, Replayed, graphs_on_cpu, recorded_on_cpu  # noqa: F401

PROMPTS = random_prompts((5, 17))


def load(target: Any = None, **options: Any) -> Any:
    target = target or tiny_llama()
    with backend_of_ours(FixedPlaceBackend(torch.device("cpu"))):
        return wrap(target, eagle3_head(target), num_speculative_tokens=2, **options)


def broken(monkeypatch: pytest.MonkeyPatch, stage: str, error: Exception) -> None:
    """Let compiling or capturing fail in its middle."""
    real, calls = getattr(specdec.execution.graphs, f"{stage}_bucket"), []

    def fails(*args: Any) -> Any:
        if args[-1] is rehearse:
            return real(*args)
        calls.append(real(*args))
        if stage == "compile" or len(calls) == 2:
            raise error
        return calls[-1]

    monkeypatch.setattr(specdec.execution.graphs, f"{stage}_bucket", fails)


@pytest.mark.slow
def test_the_default_is_graphs_where_there_are_any(graphs_on_cpu: list[Replayed]) -> None:  # noqa: F811
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpecdecWarning)
        model, plain = load(), wrap(tiny_llama())
    assert isinstance(model.engine.executor, GraphExecutor) and model.graphs == "on"
    assert model.describe()["graphs"]["state"] == "on"
    assert isinstance(plain.engine.executor, EagerExecutor) and plain.graphs == "off: backend 'torch' has none"


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["compile", "capture"])
@pytest.mark.cases(1)
def test_what_cannot_be_compiled_or_captured_runs_without_and_says_so(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
) -> None:
    broken(monkeypatch, stage, RuntimeError("a graph break\nat line 7"))
    target = tiny_llama()
    weights = {name: p.clone() for name, p in target.named_parameters()}
    with pytest.warns(SpecdecWarning, match="LlamaForCausalLM runs without CUDA graphs.*RuntimeError: a graph break"):
        model = load(target)
    assert isinstance(model.engine.executor, EagerExecutor) and model.graphs == "off: RuntimeError: a graph break"
    assert ("CUDA graphs", model.graphs) in route_rows(model.describe())
    assert not any(isinstance(m, SiblingLinear) for m in [*target.modules(), *model.head.modules()])
    assert all(torch.equal(p, weights[name]) for name, p in target.named_parameters())
    completions = model.generate(PROMPTS, SamplingParams(max_new_tokens=8))
    assert [c.token_ids for c in completions] == [hf_greedy(p, 8) for p in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param("compile", marks=pytest.mark.long), "capture"])
def test_asked_for_it_is_an_error_and_the_model_is_as_it_was(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
) -> None:
    broken(monkeypatch, stage, RuntimeError("a graph break"))
    target = tiny_llama()
    before = [hooks_of(m) for m in target.modules()]
    with pytest.raises(RuntimeError, match="a graph break"):
        load(target, cuda_graphs=True)
    assert not any(isinstance(m, SiblingLinear) for m in target.modules())
    assert [hooks_of(m) for m in target.modules()] == before


@pytest.mark.slow
def test_a_bug_of_ours_is_no_reason(graphs_on_cpu: list[Replayed], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    broken(monkeypatch, "capture", InvariantError("a plan changed"))
    with pytest.raises(InvariantError, match="a plan changed"):
        load()


@pytest.mark.slow
def test_a_wrong_model_is_refused_before_what_the_compiler_said(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(*_: Any) -> float:
        raise UnsupportedModelError("comes out wrong")

    broken(monkeypatch, "compile", RuntimeError("a graph break"))
    monkeypatch.setattr("specdec.loading.assembly.check_target", refuses)
    for cuda_graphs in (True, "auto"):
        with pytest.raises(UnsupportedModelError, match="comes out wrong"):
            load(cuda_graphs=cuda_graphs)


def test_asked_for_on_a_cpu_it_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="cuda_graphs=True needs a backend for a GPU"):
        wrap(tiny_llama(), cuda_graphs=True)


@pytest.mark.slow
@pytest.mark.thorough
def test_everything_is_compiled_once_before_a_kernel_is_needed(
    recorded_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compiling runs with no attention, for the largest bucket; no other bucket, one row included, compiles again."""
    torch._dynamo.reset()
    # What is counted are graphs, not their kernels: each region runs operator by operator.
    monkeypatch.setattr(specdec.compiler.compiling, "compile_fx", lambda module, inputs: module)
    made: list[int] = []
    real = specdec.execution.graphs.compile_bucket

    def counted(*args: Any) -> None:
        before = counters["stats"]["unique_graphs"]
        with monkeypatch.context() as patch:
            patch.setattr(FixedPlaceBackend, "run", None)
            real(*args)
        made.append(counters["stats"]["unique_graphs"] - before)

    monkeypatch.setattr(specdec.execution.graphs, "compile_bucket", counted)
    before = counters["stats"]["unique_graphs"]
    load(cuda_graphs=True, max_num_seqs=5)
    assert made == [3] and counters["stats"]["unique_graphs"] - before == 3  # target, draft prefill, draft step
