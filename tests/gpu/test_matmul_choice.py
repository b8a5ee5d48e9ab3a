"""cuBLASLt's algorithms, chosen by timing: each gives the product, in CUDA graphs too, and is found again on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec.compiler.gemm_selection import (
    ChoiceStore,
    GpuTimer,
    choose,
    choose_products,
    fastest,
    invariant_product,
    sums_alike,
)
from specdec.ops.gemm import Library, ProductShape, chosen_launch, forget, library_of, use
from specdec.ops.linear import few_tokens_linear, invariant_linear, usual_product

pytest.importorskip("nvmath")

CUDA = torch.device("cuda", 0)
ROUNDING = {torch.float16: 5e-4, torch.bfloat16: 3e-3}
SHAPES = [(256, 512, 24), (4096, 4096, 96), (1000, 14336, 48), (6144, 4096, 192), (20_008, 512, 40)]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    forget()
    yield
    forget()


@pytest.fixture
def library() -> Library:
    found = library_of(CUDA)
    assert isinstance(found, Library), found
    return found


def tensors(rows: int, width: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(rows + width + tokens)
    return tuple(torch.randn(n, width, device=CUDA, dtype=dtype) for n in (tokens, rows))


def error(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    right = x.float() @ weight.float().T
    return ((got.float() - right).norm() / right.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width", "tokens"), SHAPES)
def test_every_algorithm_that_is_listed_gives_the_product(
    library: Library, dtype: torch.dtype, rows: int, width: int, tokens: int
) -> None:
    """Into memory that held something else, so that nothing is left from an algorithm before."""
    x, weight = tensors(rows, width, tokens, dtype)
    matmul = library.matmul(ProductShape(dtype, rows, width, tokens))
    algorithms = matmul.algorithms()
    assert len(algorithms) > 1 and len({each.data for each in algorithms}) == len(algorithms)
    usual = error(usual_product(x, weight), x, weight)
    for algorithm in algorithms:
        assert matmul.supports(algorithm)
        launch = matmul.launcher(algorithm)
        launch(-x, weight)
        assert error(launch(x, weight), x, weight) <= min(1.1 * usual, ROUNDING[dtype])


@pytest.mark.parametrize(("rows", "width", "tokens"), SHAPES)
def test_the_chosen_one_follows_its_input_in_a_graph(library: Library, rows: int, width: int, tokens: int) -> None:
    """Also where it has a workspace: graphs hold their own. Eager calls of other data come between the replays."""
    x, weight = tensors(rows, width, tokens)
    shape = ProductShape(torch.bfloat16, rows, width, tokens)
    matmul = library.matmul(shape)
    algorithms = matmul.algorithms()
    choice = fastest(algorithms, matmul.launcher, usual_product, GpuTimer([weight], tokens))
    scratch = [each for each in algorithms if each.workspace]
    for algorithm in [choice or algorithms[0], *scratch[:3]]:
        use(CUDA, shape, matmul.launcher(algorithm))
        few_tokens_linear(x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = few_tokens_linear(few_tokens_linear(x, weight)[:, :1] * 0 + x, weight)
        for seed in range(5):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            other = few_tokens_linear(-x, weight)
            assert torch.equal(out, few_tokens_linear(x, weight)) and torch.equal(other, -out)
            assert error(out, x, weight) <= ROUNDING[torch.bfloat16]


def test_two_streams_at_once_do_not_disturb_each_other(library: Library) -> None:
    """With an algorithm that has a workspace."""
    rows, width, tokens = 1000, 14336, 48
    x, weight = tensors(rows, width, tokens)
    matmul = library.matmul(ProductShape(torch.bfloat16, rows, width, tokens))
    launch = matmul.launcher(next(each for each in matmul.algorithms() if each.workspace))
    inputs = [x, -x]
    right = [launch(each, weight) for each in inputs]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    got: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        for stream, own, found in zip(streams, inputs, got, strict=True):
            with torch.cuda.stream(stream):
                found.append(launch(own, weight))
    torch.cuda.synchronize()
    assert all(torch.equal(each, want) for found, want in zip(got, right, strict=True) for each in found)


def test_choices_are_read_at_the_next_start(library: Library, tmp_path: Path) -> None:
    """The same algorithms, hence the same bits; a planted one that does not exist is timed anew."""
    x, weight = tensors(4096, 4096, 96)
    wanted = {ProductShape(weight.dtype, 4096, 4096, tokens): [weight] for tokens in (24, 48, 96)}
    store = ChoiceStore("test", library.version, tmp_path)
    first = choose(wanted, library, store)
    assert (first.timed, first.read) == (3, 0)
    before = few_tokens_linear(x, weight)
    forget()
    second = choose(wanted, library, store)
    assert (second.timed, second.read, second.chosen) == (0, 3, first.chosen)
    assert torch.equal(few_tokens_linear(x, weight), before)
    text = store.path.read_text()
    for choice in store.read().values():
        if choice is not None:
            text = text.replace(choice.data.hex(), "ff" * 64)
    store.path.write_text(text)
    assert choose(wanted, library, store).timed == first.chosen


def test_what_was_done_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    layer = torch.nn.Linear(4096, 4096, bias=False, device=CUDA, dtype=torch.bfloat16)
    assert "1 timed" in choose_products([(layer, {96})])
    assert "1 from disk, 0 timed" in choose_products([(layer, {96})])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_batch_invariant_choices_keep_the_bits_of_every_token(
    library: Library, tmp_path: Path, dtype: torch.dtype
) -> None:
    x, weight = tensors(6144, 4096, 768, dtype)
    whole = invariant_product(x, weight)
    wanted = {ProductShape(dtype, 6144, 4096, tokens): [weight] for tokens in (24, 32, 48, 96, 192, 384, 768)}
    tally = choose(wanted, library, ChoiceStore("alike", library.version, tmp_path), most_seconds=60, alike=sums_alike)
    assert tally.chosen
    for tokens in (1, 16, 17, *(shape.tokens for shape in wanted)):
        for start in (0, 768 - tokens):
            got = invariant_linear(x[start : start + tokens].contiguous(), weight, None)
            assert torch.equal(got, whole[start : start + tokens])


def test_another_order_of_summation_is_seen(library: Library) -> None:
    """Two halves added up, as split-K does; and some of the library's own algorithms."""
    _, weight = tensors(1024, 4096, 24)

    def halves(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        parts = [a.float() @ b.float().T for a, b in zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)]
        return sum(parts).to(x.dtype)  # type: ignore[union-attr]

    matmul = library.matmul(ProductShape(torch.bfloat16, 1024, 4096, 24))
    plain = SimpleNamespace(shape=matmul.shape, launcher=lambda launch: launch)
    is_alike: Any = sums_alike(plain, weight)  # type: ignore[arg-type]
    assert is_alike(invariant_product) and not is_alike(halves)
    assert not all(map(sums_alike(matmul, weight), matmul.algorithms()))


def test_batch_invariant_matmuls_use_no_other_choice() -> None:
    x, weight = tensors(4096, 4096, 96)
    before = invariant_linear(x, weight, None)

    def refuse(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise AssertionError("called")

    use(CUDA, ProductShape(torch.bfloat16, 4096, 4096, 96), refuse)
    assert chosen_launch(x, weight) is refuse
    assert torch.equal(invariant_linear(x, weight, None), before)
