"""Which linear layers are plain, and what memory their weights take: by what they are, no library imported."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from attention.hf.weights import (
    address_of,
    computes_plainly,
    dense_weight,
    has_quantised,
    is_quantised,
    model_bytes,
    num_elements,
    runs_plainly,
    stored_bytes,
)
from tests.quantised import Int8Pair


def with_forward() -> nn.Linear:
    layer = nn.Linear(8, 4)
    layer.forward = MethodType(lambda self, x: nn.Linear.forward(self, x.round()), layer)  # as compressed-tensors does
    layer.quantization_scheme = "activations int8"
    return layer


def of_pair() -> nn.Linear:
    layer = nn.Linear(8, 4, bias=False)
    layer.weight = nn.Parameter(Int8Pair.of(layer.weight.detach()), requires_grad=False)
    return layer


def in_8_bits() -> nn.Linear:
    layer = nn.Linear(8, 4, bias=False)
    layer.weight = nn.Parameter(torch.ones(4, 8, dtype=torch.int8), requires_grad=False)
    return layer


class Packed(nn.Module):
    """As GPTQ keeps it: eight 4-bit numbers in an int32."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features, self.out_features = 8, 4
        self.register_buffer("qweight", torch.ones(1, 4, dtype=torch.int32))


class Unfrozen(nn.Linear):
    weight_qtype = "qint8"  # as of optimum-quanto


LAYERS: dict[str, tuple[Callable[[], nn.Module], bool, bool]] = {
    "plain": (lambda: nn.Linear(8, 4), True, False),
    "half": (lambda: nn.Linear(8, 4).half(), True, False),
    "another class": (lambda: nn.modules.linear.NonDynamicallyQuantizableLinear(8, 4), False, False),
    "a forward of its own": (with_forward, False, True),
    "a tensor of others": (of_pair, False, True),
    "int8": (in_8_bits, False, True),
    "packed": (Packed, False, True),
    "not frozen": (lambda: Unfrozen(8, 4), False, True),
    "no linear layer": (lambda: nn.LayerNorm(8), False, False),
    "an embedding": (lambda: nn.Embedding(8, 4), False, False),
}


@pytest.mark.parametrize("name", LAYERS)
def test_kinds_of_layers(name: str) -> None:
    make, plain, quantised = LAYERS[name]
    layer = make()
    assert (computes_plainly(layer), is_quantised(layer)) == (plain, quantised)
    assert runs_plainly(layer) == (not quantised)


def test_a_decompressed_layer_runs_plainly() -> None:
    layer: Any = with_forward()
    del layer.forward
    assert is_quantised(layer) and computes_plainly(layer) and runs_plainly(layer)


def test_bytes_and_addresses_are_those_of_what_a_tensor_is_made_of() -> None:
    layer = of_pair()
    pair: Any = layer.weight
    assert pair.data_ptr() == 0, "what asks a quantised weight itself takes all of them for one"
    assert address_of(pair) == pair.numbers.data_ptr()
    assert stored_bytes(pair) == 4 * 8 + 4 * 4 and pair.numel() * pair.element_size() == 4 * 8 * 4
    assert model_bytes(nn.Sequential(layer, nn.Linear(4, 2), Packed())) == 48 + (4 * 2 + 2) * 4 + 16
    assert num_elements("weight", pair) == 32


def test_a_dense_copy_of_a_weight() -> None:
    plain = nn.Linear(8, 4)
    assert dense_weight(plain) is plain.weight
    assert dense_weight(in_8_bits()) is None and dense_weight(Packed()) is None
    layer = of_pair()
    dense, weight = dense_weight(layer), layer.weight
    assert type(dense) is torch.Tensor and torch.equal(dense, weight.numbers * weight.scales)


@pytest.mark.parametrize("kind", ["plain", "experts in 8 bits", "a mark on attention"])
def test_what_may_be_quantised_need_not_be_a_linear_layer(kind: str) -> None:
    """A mixture whose experts alone are in FP8 must still run by specdec's operators and be tested."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Module())
    if kind == "experts in 8 bits":
        model[1].down_proj = nn.Parameter(torch.zeros(2, 4, 4).to(torch.float8_e4m3fn), requires_grad=False)
    elif kind == "a mark on attention":
        model[1].quantization_scheme = "kv cache"
    assert has_quantised(model) == (kind != "plain")
