"""Packed weights: products of any number of rows, and every other use of a tensor, reading and writing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.errors import ModelChangedError
from specdec.ops.packed_weight import FEWEST_ROWS, Matrix, PackedWeight

DTYPES = [
    torch.float32,
    pytest.param(
        torch.bfloat16,
        marks=pytest.mark.skipif(
            torch.backends.cpu.get_cpu_capability() != "AVX512", reason="no bfloat16 in oneDNN here"
        ),
    ),
]
SHAPES = [(7, 5), (100, 33), (576, 1536), (1024, 576)]


def layers(dtype: torch.dtype, shape: tuple[int, int] = (100, 33), tied: bool = False) -> tuple[Any, Any]:
    """A linear layer, packed, and an equal one."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = nn.Linear(shape[1], shape[0]).to(dtype)
    packed = copy.deepcopy(plain)
    matrix = Matrix([packed.weight.data], tied)
    packed.register_parameter("weight", nn.Parameter(PackedWeight(matrix, 0, packed.weight)))
    return packed, plain


def inputs(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_any_number_of_rows_has_the_right_product(shape: tuple[int, int], dtype: torch.dtype) -> None:
    packed, plain = layers(dtype, shape)
    x = inputs(64, shape[1], dtype=dtype)
    right = F.linear(x.float(), plain.weight.float(), plain.bias.float())
    for rows in range(65):
        found = packed(x[:rows])
        assert found.dtype == dtype
        limit = 1e-5 if dtype is torch.float32 else 0.02
        torch.testing.assert_close(found.float(), right[:rows], rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_rows_are_filled_up_so_that_few_have_the_bits_of_four(dtype: torch.dtype) -> None:
    packed, _ = layers(dtype, (576, 1536))
    x = inputs(FEWEST_ROWS, 1536, dtype=dtype)
    whole = packed(x)
    assert all(torch.equal(packed(x[:rows]), whole[:rows]) for rows in range(1, FEWEST_ROWS))


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_inputs_of_any_form(dtype: torch.dtype) -> None:
    packed, plain = layers(dtype)
    x = inputs(6, 66, dtype=dtype)
    for own in (x[0, :33], x[:1, None, :33], x[:, ::2], x[:0, :33], x[:, :33].reshape(2, 3, 33), x[:2].view(4, 33)):
        torch.testing.assert_close(packed(own), plain(own), rtol=0.02, atol=0.02)


def test_gradients_and_an_optimiser_see_through_it() -> None:
    packed, plain = layers(torch.float32)
    x = inputs(5, 33, dtype=torch.float32)
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        for layer in (packed, plain):
            layer(x).square().sum().backward()
            kind(layer.parameters(), lr=0.1).step()
        assert torch.equal(packed.weight.grad, plain.weight.grad)
    assert torch.equal(packed.weight.plain(), plain.weight)


def fill_data(weight: Any) -> None:
    weight.data = weight.data * 2


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda weight: weight.mul_(2),
    "copy": lambda weight: weight.copy_(torch.ones(100, 33)),
    "rows": lambda weight: weight[3:5].copy_(torch.ones(2, 33)),
    "an element": lambda weight: weight.__setitem__((2, 3), 7.0),
    "a column of the transpose": lambda weight: weight.t()[:, 4].zero_(),
    "a piece": lambda weight: weight.split(50)[1].fill_(3),
    "by .data": lambda weight: weight.data.add_(1),
    "other .data": fill_data,
    "detached": lambda weight: weight.detach().reshape(-1)[5:9].neg_(),
    "several at once": lambda weight: torch._foreach_neg_([weight]),
    "an output": lambda weight: torch.add(weight, 1, out=weight.data),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_what_is_written_is_multiplied_by(write: str, tied: bool) -> None:
    packed, plain = layers(torch.float32, tied=tied)
    x = inputs(4, 33, dtype=torch.float32)
    before = packed(x)
    for layer in (packed, plain):
        WRITES[write](layer.weight)
    assert isinstance(packed.weight, PackedWeight) and torch.equal(packed.weight.plain(), plain.weight)
    for again in (False, True):
        if again:
            packed.weight.matrix.pack()
            assert packed.weight.matrix.packed != tied
        torch.testing.assert_close(packed(x), plain(x), rtol=1e-5, atol=1e-5)
        assert not torch.equal(packed(x), before)


def test_a_planted_write_to_a_copy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test before would see."""
    packed, _ = layers(torch.float32)
    x = inputs(4, 33, dtype=torch.float32)
    with torch.no_grad():
        before = packed(x)
        monkeypatch.setattr(Matrix, "unpack", lambda self: None)
        packed.weight.mul_(2)
        assert torch.equal(packed(x), before)


@torch.no_grad()
def test_a_matrix_stays_plain_while_somebody_can_write_to_it() -> None:
    packed, plain = layers(torch.float32)
    matrix, view = packed.weight.matrix, packed.weight[3]
    matrix.pack()
    assert not matrix.packed
    view.zero_()
    plain.weight[3].zero_()
    del view
    matrix.pack()
    assert matrix.packed and torch.equal(packed.weight.plain(), plain.weight)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_siblings_share_a_product_of_one_input_and_no_other(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [torch.randn(rows, 33, generator=torch.Generator().manual_seed(rows)) for rows in (48, 16, 32)]
    matrix, calls = Matrix(weights, False), []
    times = Matrix.times
    monkeypatch.setattr(Matrix, "times", lambda *given: calls.append(given) or times(*given))
    packed = [PackedWeight(matrix, place, weight) for place, weight in enumerate(weights)]
    with mode():
        x, other = inputs(5, 33, dtype=torch.float32), inputs(5, 33, dtype=torch.float32) + 1
        for order, products in (((0, 1, 2), 1), ((2, 0, 1), 1), ((0, 0, 1, 2), 2)):
            calls.clear()
            for place in order:
                torch.testing.assert_close(F.linear(x, packed[place]), F.linear(x, weights[place]))
            assert len(calls) == products
        assert matrix.last is None
        F.linear(x, packed[0])
        torch.testing.assert_close(F.linear(other, packed[1]), F.linear(other, weights[1]))
        if mode is torch.no_grad:  # torch counts writes
            F.linear(x, packed[0])
            x += 1
            torch.testing.assert_close(F.linear(x, packed[1]), F.linear(x, weights[1]))


def test_what_it_cannot_be_is_refused() -> None:
    packed, plain = layers(torch.float32)
    with pytest.raises(ModelChangedError, match=r"stay torch.float32 on a CPU, given are torch.float16"):
        packed.half()
    with pytest.raises(RuntimeError, match="not supported"):
        packed.weight.detach().numpy()
    assert torch.equal(packed.weight.plain(), plain.weight)


def test_copies_are_plain() -> None:
    packed, plain = layers(torch.float32)
    for other in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert type(other.weight) is nn.Parameter and torch.equal(other.weight, plain.weight)
    assert type(packed.weight + 1) is Tensor
    assert repr(packed.weight) == repr(plain.weight)
    with torch.no_grad():
        assert type(packed(inputs(4, 33, dtype=torch.float32))) is Tensor
