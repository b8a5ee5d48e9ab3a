"""Layers that are alike are compiled once, those that are not each for themselves, and the results stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch.fx import GraphModule, Node

import specdec.compiler.compiling
from attention.hf.custom_op import Channel
from specdec.compiler.compiling import compile_regions, compiler_settings

WIDTH = 8
CHANNEL = Channel()


def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: Any) -> torch.Tensor:
    """No attention, but one that tells layers and tokens apart."""
    return query * (layer + 1) + key.cumsum(0) - value


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[GraphModule]:
    """What went through the compiler."""
    torch.compiler.reset()
    found: list[GraphModule] = []
    real = specdec.compiler.compiling.compile_fx

    def compile_fx(module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        found.append(module)
        return real(module, inputs)

    monkeypatch.setattr(specdec.compiler.compiling, "compile_fx", compile_fx)
    return found


class Layers(nn.Module):
    """Layers with an attention each; `factors`: a constant of each, `transposed`: whose weight lies the other way."""

    def __init__(self, factors: tuple[float, ...], transposed: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.factors = factors
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 3 for _ in factors)
        if transposed >= 0:
            self.weights[transposed].data = self.weights[transposed].data.t().contiguous().t()
        self.seen = torch.zeros(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, (factor, weight) in enumerate(zip(self.factors, self.weights, strict=True)):
            states = torch.tanh(x @ weight) * factor
            if layer == 2:
                self.seen[: len(x)].copy_(states)  # as aux hidden states are kept
            heads = states[:, None]
            out = torch.ops.specdec.attend(heads, heads + 1, heads * 2, None, CHANNEL.number, layer)
            x = x + out[:, 0]
        return x * 2


class Shaped(Layers):
    """All layers under one autocast, which is entered in the first region and left in the last one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


def run(model: Layers, tokens: int = 5, backend: Any = compile_regions) -> None:
    """Compiled and plain, with two numbers of tokens."""
    x = torch.linspace(-1, 1, tokens * WIDTH).view(tokens, WIDTH)
    function = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    with torch.no_grad(), compiler_settings(), CHANNEL.carrying(attend):
        for count in (tokens, tokens - 2):
            model.seen.zero_()
            plain, kept = model(x[:count]), model.seen.clone()
            model.seen.zero_()
            assert torch.allclose(function(x[:count]), plain, atol=1e-5)
            assert torch.allclose(model.seen, kept, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [5, pytest.param(9, marks=pytest.mark.long)])
@pytest.mark.thorough
def test_layers_that_are_alike_are_compiled_once(compiled: list[GraphModule], layers: int) -> None:
    """Four forms: the first and the last region have no layer on one side, and one layer keeps its states."""
    run(Layers((1.0,) * layers))
    assert len(compiled) == 4


@pytest.mark.slow
@pytest.mark.thorough
def test_another_constant_is_another_form(compiled: list[GraphModule]) -> None:
    run(Layers((1.0, 1.0, 1.0, 0.5, 1.0, 0.5, 1.0)))
    assert len(compiled) == 5


@pytest.mark.slow
def test_another_layout_is_another_form(compiled: list[GraphModule]) -> None:
    run(Layers((1.0,) * 7, transposed=4))
    assert len(compiled) == 5


@pytest.mark.slow
def test_few_attentions_are_compiled_as_one(compiled: list[GraphModule]) -> None:
    run(Layers((1.0,) * 2))
    assert len(compiled) == 1


@pytest.mark.slow
@pytest.mark.thorough
def test_regions_that_pass_on_other_things_are_compiled_as_one(compiled: list[GraphModule]) -> None:
    """The compiler takes tensors and sizes; an autocast around all layers is neither."""
    run(Shaped((1.0,) * 5))
    assert len(compiled) == 1


@pytest.mark.slow
def test_a_constant_amid_a_region_is_one_of_its_inputs(compiled: list[GraphModule]) -> None:
    def with_constant(module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """The factor of the result as a constant of the graph, in the middle of its last region."""
        last = module.graph.output_node().args[0][0]  # type: ignore[index, union-attr]
        assert isinstance(last, Node) and last.args[1] == 2
        module.register_buffer("factor", torch.tensor(2.0))
        with module.graph.inserting_before(last):
            constant = module.graph.get_attr("factor")
        mode = detect_fake_mode(inputs)
        assert mode is not None
        constant.meta["example_value"] = mode.from_tensor(module.factor)
        last.args = last.args[0], constant
        return compile_regions(module, inputs)

    run(Layers((1.0,) * 7), backend=with_constant)
    assert len(compiled) == 4
    assert not any(node.op == "get_attr" for module in compiled for node in module.graph.nodes)
