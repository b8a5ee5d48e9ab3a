"""Packed weights: products of any number of rows, and every other use of a tensor, reading and writing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.errors import ModelChangedError
from specdec.ops.packed_weight import EVEN_ROWS, FEWEST_ROWS, Matrix, PackedWeight, blocks_of

DTYPES = [
    torch.float32,
    pytest.param(
        torch.bfloat16,
        marks=pytest.mark.skipif(
            torch.backends.cpu.get_cpu_capability() != "AVX512", reason="no bfloat16 in oneDNN here"
        ),
    ),
]
BLOCKS = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="other blocks, from which no rows are read"
)
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


def embeddings(dtype: torch.dtype, shape: tuple[int, int]) -> tuple[Any, Any]:
    """An embedding whose weight is packed, and an equal one."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = nn.Embedding(*shape).to(dtype)
    packed = copy.deepcopy(plain)
    matrix = Matrix([packed.weight.data], tied=True)
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


EVEN_SHAPES = [(100, 33), (64, 1536), (33, 4096)]


def uneven_rows(matrix: Matrix, dtype: torch.dtype, width: int) -> list[int]:
    """The numbers of rows, of 1 to 64 and some more, in which a row has other bits than among others."""
    x = inputs(300, width, dtype=dtype)
    whole = matrix.times(x, None)
    found = [n for n in (*range(1, 65), 100, 129, 257) if not torch.equal(matrix.times(x[:n], None), whole[:n])]
    found += [-n for n in (1, 2, 3, 5, 17) if not torch.equal(matrix.times(x[7 : 7 + n], None), whole[7 : 7 + n])]
    return found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_from_two_rows_on_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, tied: bool, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for shape in EVEN_SHAPES:
            weight = inputs(*shape, dtype=dtype)
            assert not uneven_rows(Matrix([weight], tied, EVEN_ROWS), dtype, shape[1]), shape
        planted = uneven_rows(Matrix([weight], tied, 0), dtype, shape[1])
    finally:
        torch.set_num_threads(before)
    # Rounding to bfloat16 hides bits, and packed weights in float32 are filled up anyway.
    assert planted == [1, -1] or dtype is torch.bfloat16 or not tied


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_inputs_of_any_form(dtype: torch.dtype) -> None:
    packed, plain = layers(dtype)
    x = inputs(6, 66, dtype=dtype)
    for own in (x[0, :33], x[:1, None, :33], x[:, ::2], x[:0, :33], x[:, :33].reshape(2, 3, 33), x[:2].view(4, 33)):
        torch.testing.assert_close(packed(own), plain(own), rtol=0.02, atol=0.02)


@BLOCKS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 32), (320, 576), (49152, 64)])
@torch.inference_mode()
def test_rows_of_an_embedding_are_read_from_the_blocks(shape: tuple[int, int], dtype: torch.dtype) -> None:
    embedding, plain = embeddings(dtype, shape)
    assert embedding.weight.matrix.packed
    every = torch.arange(shape[0]).flip(0)
    for ids in (every, every[:1], every[:0], every[:6].view(1, 2, 3), torch.tensor(5), every[:8].int()):
        found = embedding(ids)
        assert found.dtype == dtype and torch.equal(found, plain(ids)) and found.stride() == plain(ids).stride()
    for outside in (-1, shape[0]):
        with pytest.raises(IndexError):
            embedding(torch.tensor([3, outside]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(100, 32), (128, 33), (192, 39)])
@torch.inference_mode()
def test_an_embedding_whose_blocks_are_laid_out_otherwise_stays_plain(shape: Any, dtype: torch.dtype) -> None:
    embedding, plain = embeddings(dtype, shape)
    assert not embedding.weight.matrix.packed
    assert torch.equal(embedding(torch.arange(100)), plain(torch.arange(100)))


@BLOCKS
def test_another_layout_of_oneDNN_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 32 rows, as without AVX-512."""
    weight = torch.randn(128, 32)
    other = weight.view(4, 32, 32).mT.contiguous()
    real = Matrix([weight], tied=True).memory
    assert blocks_of(real, weight) is not None
    monkeypatch.setattr("specdec.ops.packed_weight.ONEDNN", SimpleNamespace(data_ptr=lambda _: other.data_ptr()))
    assert blocks_of(real, weight) is None


@BLOCKS
def test_an_embedding_is_written_and_has_gradients() -> None:
    embedding, plain = embeddings(torch.float32, (64, 32))
    ids = torch.tensor([3, 60, 3])
    for each in (embedding, plain):
        each(ids).square().sum().backward()
    assert torch.equal(embedding.weight.grad, plain.weight.grad)
    with torch.no_grad():
        for each in (embedding, plain):
            each.weight[3] += 1
        for again in (False, True):
            if again:
                embedding.weight.matrix.pack()
            assert torch.equal(embedding(ids), plain(ids))
        embedding.max_norm = plain.max_norm = 1.0
        assert torch.equal(embedding(ids), plain(ids)) and torch.equal(embedding.weight.plain(), plain.weight)


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
