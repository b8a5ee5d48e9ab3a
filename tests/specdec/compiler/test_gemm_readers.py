"""Which matmuls are chosen for: the weights that compiled code reads, with the numbers of tokens of its graphs."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest
import torch
from torch import nn

import specdec.compiler.gemm_selection
import specdec.ops.linear
from specdec.compiler.gemm_selection import choose_products, product_weights, wanted_products
from specdec.compiler.siblings import SiblingLinear


class Layer(nn.Module):
    """Two fused siblings, two layers with one weight, one with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False), nn.Linear(16, 8)
        self.head, self.embedding = nn.Linear(8, 32, bias=False), nn.Linear(8, 32, bias=False)
        self.head.weight = self.embedding.weight
        fused = torch.cat([self.gate.weight.detach(), self.up.weight.detach()])
        for layer, start in ((self.gate, 0), (self.up, 16)):
            SiblingLinear.join(layer, fused, None, start)


def test_siblings_and_tied_weights_count_once_and_biased_layers_not() -> None:
    assert [tuple(weight.shape) for weight in product_weights(Layer())] == [(32, 8), (32, 8)]


def test_weights_of_one_shape_are_those_of_all_modules_with_so_many_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes: dict[str, list[Any]] = {
        "target": [torch.zeros(32, 8, dtype=torch.bfloat16) for _ in range(2)],
        "head": [torch.zeros(32, 8, dtype=torch.bfloat16), torch.zeros(16, 8, dtype=torch.bfloat16)],
    }
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    modules = {name: nn.Module() for name in shapes}
    names = {module: name for name, module in modules.items()}
    monkeypatch.setattr(specdec.compiler.gemm_selection, "product_weights", lambda module: shapes[names[module]])
    found = wanted_products([(modules["target"], {24, 48}), (modules["head"], {24, 4})])
    assert {(shape.rows, shape.tokens): len(weights) for shape, weights in found.items()} == {
        (32, 24): 3,
        (32, 48): 2,
        (16, 24): 1,
    }


def test_nothing_is_chosen_off_the_gpu_or_in_single_precision() -> None:
    assert wanted_products([(Layer(), {24})]) == {}
    assert choose_products([(Layer(), {24}), (None, {24})]) == "none to choose"


def test_the_batch_invariant_operator_takes_only_choices_of_its_own_kind() -> None:
    source = ast.parse(inspect.getsource(specdec.ops.linear))
    functions = {f.name: f for f in source.body if isinstance(f, ast.FunctionDef)}
    called = {name: {n.id for n in ast.walk(f) if isinstance(n, ast.Name)} for name, f in functions.items()}
    assert "chosen_launch" in called["few_tokens_linear"]
    assert not called["invariant_linear"] & {"few_tokens_linear", "usual_product"}
    asked = [n for n in ast.walk(functions["invariant_linear"]) if isinstance(n, ast.Call)]
    (choice,) = (n for n in asked if getattr(n.func, "id", "") == "chosen_launch")
    assert [ast.unparse(keyword) for keyword in choice.keywords] == ["invariant=True"]
