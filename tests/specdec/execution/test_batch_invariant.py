"""Batch-invariant rounds on a CPU: one model for all rounds, and what is asked of it. That bits are equal is a matter
of the kernels: tests/gpu/test_batch_invariant.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fakes import eagle3_head, hf_greedy, random_prompts, tiny_llama, wrap
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

import specdec.compiler.compiling
import specdec.execution.graphs
import specdec.execution.ragged
import specdec.ops.mixtures.choice
import specdec.wrapped.target
from specdec.compiler.compiling import unwrapped
from specdec.compiler.passes import Rewriting, read_weights_once, sum_alike
from specdec.errors import UnsupportedModelError
from specdec.ops.linear import invariant_linear
from specdec.requests.sampling import SamplingParams
from specdec.selftest.selftest import experts_test, invariance_test, matmul_test
from tests.specdec.execution.test_graphs import (  # noqa: F401 (fixtures)
    FixedPlaceBackend,
    Replayed,
    graphs_on_cpu,
    mla_mixture_pair,
    recorded_on_cpu,
    with_graphs,
)

pytestmark = pytest.mark.usefixtures("every_self_test")

PROMPTS = random_prompts((5, 60, 1, 50, 9))
"""Two are longer than a round's 24 tokens: parts of them are read in rounds without logits indices."""
PARAMS = SamplingParams(max_new_tokens=16)


class Invariant(FixedPlaceBackend):
    """Says that it is; in float32 it may differ by a rounding, which decides no token here."""

    name = "batch_invariant"
    batch_invariant = True


def graphed(head: Any, **options: Any) -> Any:
    return with_graphs(head, backend=Invariant(torch.device("cpu")), **options)


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The self-tests run, though no CPU passes them."""
    found: list[Any] = []

    def run(target: Any, model: Any) -> None:
        found.append(model)
        with suppress(UnsupportedModelError):
            invariance_test(target, model)

    monkeypatch.setattr(specdec.execution.graphs, "invariance_test", run)
    monkeypatch.setattr(specdec.execution.graphs, "matmul_test", found.append)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [pytest.param(0, marks=pytest.mark.long), 3])
@pytest.mark.thorough
def test_all_rounds_run_the_model_of_the_graphs(
    drafts: int,
    graphs_on_cpu: list[Replayed],  # noqa: F811
    tested: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[int, int, bool]] = []

    def compiled_model(model: Callable[..., Any]) -> Callable[..., Any]:
        def run(**inputs: Any) -> Any:
            logits_indices = inputs["logits_to_keep"]
            calls.append((inputs["input_ids"].shape[1], len(logits_indices), torch.is_inference_mode_enabled()))
            return model(**inputs)

        return run

    built: list[Any] = []

    def for_any_batch(model: Callable[..., Any]) -> Callable[..., Any]:
        built.append(plain_for_any_batch(model))
        return built[-1]

    plain_for_any_batch = specdec.execution.graphs.for_any_batch
    monkeypatch.setattr(specdec.execution.graphs, "for_any_batch", for_any_batch)
    monkeypatch.setattr(specdec.execution.graphs, "compiled_model", compiled_model)
    model = graphed(eagle3_head(tiny_llama()) if drafts else None, num_speculative_tokens=drafts)
    assert len(built) == 1 and tested == [*built, model.hf_model]
    forwards: list[Any] = []

    def count(module: Any, arguments: Any) -> None:
        forwards.append(1)

    count.__module__ = "transformers"  # a user's own hook would be refused
    model.hf_model.register_forward_pre_hook(count)
    calls.clear()
    completions = model.generate(PROMPTS, PARAMS)
    assert [c.token_ids for c in completions] == [hf_greedy(p, 16) for p in PROMPTS]
    assert len(forwards) == len(calls)
    assert all(tokens >= 2 and logits >= 2 for tokens, logits, _ in calls)
    assert {inference for *_, inference in calls} == {False}  # as it was compiled


@pytest.mark.slow
@pytest.mark.parametrize("defect", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.thorough
def test_rounds_of_any_shape_run_what_was_compiled_for_the_graphs(
    defect: bool,
    recorded_on_cpu: list[Replayed],  # noqa: F811
    tested: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted defect: inputs of another kind than the graphs' are compiled for again. Matmuls stay those of a CPU.

    What is counted are the compiler's graphs, whose code is not made: they run operator by operator.
    """
    monkeypatch.setattr(specdec.compiler.compiling, "Rewriting", lambda batch_invariant: Rewriting())
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compiler(f, **{**options, "backend": aot_eager}))
    if defect:
        made = torch.inference_mode()(lambda n, device: torch.zeros(n, dtype=torch.int64))
        monkeypatch.setattr(specdec.execution.ragged, "_integers", made)
    torch.compiler.reset()
    before = counters["stats"]["unique_graphs"]
    model = graphed(None, num_speculative_tokens=0, max_num_seqs=1)
    assert [c.token_ids for c in model.generate(PROMPTS, PARAMS)] == [hf_greedy(p, 16) for p in PROMPTS]
    assert (counters["stats"]["unique_graphs"] - before == 1) == (not defect)


def rounded(target: Any, sizes: list[int], error: Callable[[int], float]) -> Callable[..., Any]:
    """A model of double precision whose logits are rounded to single, so that the CPU's own differences do not show."""

    def run(**inputs: Any) -> Any:
        sizes.append(inputs["input_ids"].shape[1])
        output = target.hf_model(**inputs)
        output.logits = output.logits.float().double() + error(sizes[-1])
        return output

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("kv_cache_tokens", "longest"), [(400, 128), pytest.param(100, 32, marks=pytest.mark.long)])
def test_the_self_test_compares_bits(kv_cache_tokens: int, longest: int) -> None:
    target = wrap(tiny_llama().double(), kv_cache_tokens=kv_cache_tokens, max_model_len=64).target
    sizes: list[int] = []
    invariance_test(target, rounded(target, sizes, lambda tokens: 0.0))
    assert max(sizes) == longest + 9 + 15 and min(sizes) == 2  # one token gets a second
    for few in (5, 20):
        with pytest.raises(
            UnsupportedModelError, match=r"LlamaForCausalLM is not batch-invariant: the logits of tokens"
        ):
            invariance_test(target, rounded(target, sizes, lambda tokens, few=few: 1e-6 if tokens < few else 0.0))


def test_the_self_test_compares_with_the_model() -> None:
    target = wrap(tiny_llama().double()).target
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM comes out wrong when compiled"):
        invariance_test(target, rounded(target, [], lambda tokens: 1.0))


@pytest.mark.parametrize("defect", [False, True])
def test_matmuls_are_compared(defect: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        return x[:, :1] * weight[:, 0] + (1e-6 if defect and len(x) == 17 else 0)

    monkeypatch.setattr(F, "linear", linear)
    if not defect:
        return matmul_test(tiny_llama())
    with pytest.raises(UnsupportedModelError, match=r"a weight of \[\d+, \d+\] are not batch-invariant here"):
        matmul_test(tiny_llama())
    return None


@pytest.mark.slow
def test_mixtures_in_float32_are_refused(graphs_on_cpu: list[Replayed]) -> None:  # noqa: F811
    target, head = mla_mixture_pair()
    with pytest.raises(UnsupportedModelError, match=r"has experts whose matmuls .* SwiGLU experts in float16 or"):
        with_graphs(head, target, Invariant(torch.device("cpu")), num_speculative_tokens=2)


@pytest.mark.parametrize("defect", [False, True])
def test_experts_are_compared(defect: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact whatever the number of rows, as whole numbers; planted: another sum of 17 tokens."""
    target = mla_mixture_pair()[0].bfloat16()
    whole = [module for module in target.modules() if hasattr(module, "down_proj") and hasattr(module, "has_gate")]

    def experts(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assert module in whole and len(index) == len(weights) and index.shape[1] == 4
        sizes.append(len(hidden))
        return hidden * 2 + (1 if defect and len(hidden) == 17 else 0)

    sizes: list[int] = []
    monkeypatch.setattr(specdec.ops.mixtures.choice, "capturable_experts", experts)
    if defect:
        with pytest.raises(UnsupportedModelError, match=r"experts of \[4, 32, 24\] are not batch-invariant here"):
            experts_test(target)
    else:
        experts_test(target)
        assert sizes[0] > 48 * 4 and {1, 17, 200, sizes[0] // 4, sizes[0] // 2} <= set(sizes)


def graph_of(run: Callable[..., torch.Tensor], dtype: torch.dtype = torch.float16) -> torch.fx.Graph:
    """run(x [4, 4], weight [4, 4], bias [4]) as the compiler gets it."""
    args = (torch.randn(4, 4, dtype=dtype), torch.randn(4, 4, dtype=dtype), torch.randn(4, dtype=dtype))
    return make_fx(run, tracing_mode="fake")(*args).graph


def called(graph: torch.fx.Graph) -> Counter[str]:
    return Counter(node.target.overloadpacket.__name__ for node in graph.nodes if node.op == "call_function")


def test_matmuls_with_a_weight_are_found() -> None:
    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        angles = torch.bmm(bias.float()[None, :, None], x[:1].float()[None])  # one term a result: nothing is summed
        wide = F.linear(
            *(torch.ops.prims.convert_element_type(each, torch.float32) for each in (x, weight))
        )  # routers'
        return F.linear(x, weight, bias) + F.linear(x, weight) + angles[0] + wide

    graph = graph_of(run)
    sum_alike(graph)
    graph.lint()
    assert called(graph)["invariant_linear"] == 3 and not {"mm", "addmm"} & called(graph).keys()
    graph = graph_of(run)
    read_weights_once(graph)
    assert called(graph)["few_tokens_linear"] == called(graph)["addmm"] == 1


OTHERS: dict[str, tuple[Callable[..., torch.Tensor], torch.dtype]] = {
    "product of results": (lambda x, weight, bias: x @ (weight + 1), torch.float16),
    "weight as it lies": (lambda x, weight, bias: torch.addmm(bias, x, weight), torch.float16),
    "sum of a matrix": (lambda x, weight, bias: torch.addmm(x, x, weight.t()), torch.float16),
    "scaled": (lambda x, weight, bias: torch.addmm(bias, x, weight.t(), beta=2), torch.float16),
    "batched": (lambda x, weight, bias: torch.bmm(x[None], weight[None]), torch.float16),
    "double precision": (lambda x, weight, bias: F.linear(x, weight), torch.float64),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_matmuls_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="not batch-invariant: a matmul aten"):
        sum_alike(graph_of(*OTHERS[name]))


def test_an_error_that_the_compiler_met_is_raised_as_it_was() -> None:
    def refusing(module: Any, inputs: Any) -> Any:
        raise UnsupportedModelError("no")

    with pytest.raises(UnsupportedModelError, match="no"), unwrapped(UnsupportedModelError):
        torch.compile(torch.sin, backend=refusing)(torch.ones(2))
    with pytest.raises(ValueError, match="another"), unwrapped(UnsupportedModelError):
        raise ValueError("another")


def test_compiled_code_of_the_two_kinds_is_kept_apart() -> None:
    assert Rewriting(True).uuid() != Rewriting().uuid()


def test_the_matmul_serves_a_gpu_only() -> None:
    x = torch.randn(2, 4, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"16 and 32 bits on a GPU, not torch.float16 on cpu"):
        invariant_linear(x, x, None)
