"""What a start times, reads and uses, with a library and a clock that are told what to do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specdec.compiler import gemm_selection
from specdec.compiler.gemm_selection import (
    ChoiceStore,
    choose,
    choose_products,
    invariant_product,
    sums_alike,
    wanted_products,
)
from specdec.ops.gemm import Algorithm, Launch, ProductShape, chosen_launch, forget, library_of, use
from specdec.ops.linear import few_tokens_linear, usual_product

FAST, SLOW = Algorithm(b"f" * 64, 0), Algorithm(b"s" * 64, 32)


class Library:
    """Lists a slow and a fast algorithm for every shape; `supported` of them it runs."""

    version = 1

    def __init__(self) -> None:
        self.supported = {FAST, SLOW}

    def matmul(self, shape: ProductShape) -> Any:
        self.shape = shape
        return self

    def algorithms(self) -> list[Algorithm]:
        return [SLOW, FAST]

    def supports(self, algorithm: Algorithm) -> bool:
        return algorithm in self.supported

    def launcher(self, algorithm: Algorithm) -> Any:
        return algorithm


class Start:
    """One start over a folder: what it timed and what it uses. Every timing takes a second of its clock."""

    def __init__(self, folder: Path, most_seconds: float = 99.0, library: Library | None = None) -> None:
        self.timed: list[str] = []
        self.used: dict[str, Any] = {}
        self.seconds = 0.0
        self.room = True
        self.library: Any = Library() if library is None else library
        self.store, self.most_seconds = ChoiceStore("gpu", self.library.version, folder), most_seconds
        self.alike: Any = None

    def timer(self, weights: Sequence[torch.Tensor], tokens: int) -> Any:
        if not self.room:
            raise torch.OutOfMemoryError("planted")
        self.timed.append(f"{len(weights[0])} {tokens}")
        self.seconds += 1

        def times(launches: Sequence[Launch], calls: int, rounds: int) -> list[float]:
            us: dict[Any, float] = {FAST: 10, SLOW: 30, usual_product: 20, invariant_product: 40}
            return [us[launch] for launch in launches]

        return times

    def use(self, device: torch.device, shape: ProductShape, launch: Any, invariant: bool) -> None:
        assert invariant == (self.alike is not None)
        self.used[f"{shape.rows} {shape.tokens}"] = launch

    def choose(self, *wanted: dict[ProductShape, list[torch.Tensor]]) -> Start:
        every = {shape: weights for each in wanted for shape, weights in each.items()}
        with patch.object(gemm_selection, "use", self.use):
            clock = lambda: self.seconds  # noqa: E731
            parts = self.library, self.store, self.timer, clock, self.most_seconds, self.alike
            self.tally = choose(every, *parts)
        return self


def wanted(rows: int, *tokens: int, count: int = 1, width: int = 64) -> dict[ProductShape, list[torch.Tensor]]:
    weights = [torch.zeros(rows, width, dtype=torch.bfloat16)] * count
    return {ProductShape(torch.bfloat16, rows, width, each): weights for each in tokens}


def test_every_shape_is_timed_once_and_read_at_the_next_start(tmp_path: Path) -> None:
    first = Start(tmp_path).choose(wanted(64, 24, 48), wanted(128, 24))
    assert sorted(first.timed) == ["128 24", "64 24", "64 48"]
    assert first.used == dict.fromkeys(first.timed, FAST)
    second = Start(tmp_path).choose(wanted(64, 24, 48), wanted(128, 24), wanted(128, 96))
    assert second.timed == ["128 96"] and second.used == first.used | {"128 96": FAST}
    assert str(second.tally) == "4 of 4 shapes by measurement (3 from disk, 1 timed in 1.0 s)"


def test_few_tokens_and_odd_rows_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    layers = [nn.Linear(width, rows, bias=False).bfloat16() for rows, width in ((64, 64), (65, 64), (64, 65))]
    (shape,) = wanted_products([(layers[0], {1, 16, 17}), (layers[1], {24}), (layers[2], {24})])
    assert (shape.rows, shape.tokens) == (64, 17)


def test_few_tokens_and_then_large_weights_are_timed_first_and_the_rest_at_the_next_start(tmp_path: Path) -> None:
    both = wanted(128, 24, 48), wanted(64, 24, 48, count=5)
    first = Start(tmp_path, most_seconds=3).choose(*both)
    assert first.timed == ["64 24", "128 24", "64 48"] and set(first.used) == set(first.timed)
    assert "1 left to the next start" in str(first.tally)
    assert Start(tmp_path, most_seconds=3).choose(*both).timed == ["128 48"]


def test_a_kept_choice_that_the_library_refuses_is_timed_anew(tmp_path: Path) -> None:
    Start(tmp_path).choose(wanted(64, 24))
    library = Library()
    library.supported = {SLOW}
    assert Start(tmp_path, library=library).choose(wanted(64, 24)).timed == ["64 24"]


def test_batch_invariant_matmuls_take_only_algorithms_of_the_same_bits(tmp_path: Path) -> None:
    first, second = Start(tmp_path), Start(tmp_path)
    first.alike = lambda matmul, weight: lambda algorithm: algorithm == SLOW  # faster than the own kernel, too
    assert first.choose(wanted(64, 24)).used == {"64 24": SLOW}
    second.alike = lambda matmul, weight: lambda algorithm: False  # the one that is kept has other bits here
    assert second.choose(wanted(64, 24)).timed == ["64 24"] and not second.used


def test_without_room_for_a_comparison_the_own_kernel_stays(tmp_path: Path) -> None:
    """Also of a choice that is kept: a start goes on, and the choice stays for the next one."""

    def no_room(matmul: Any, weight: torch.Tensor) -> Any:
        raise torch.OutOfMemoryError("planted")

    first, second, third = (Start(tmp_path) for _ in range(3))
    first.alike = third.alike = lambda matmul, weight: lambda algorithm: True
    second.alike = no_room
    used = first.choose(wanted(64, 24)).used
    assert used and not second.choose(wanted(64, 24), wanted(64, 48)).used and second.tally.timed == 0
    assert third.choose(wanted(64, 24)).used == used and not third.timed


def test_without_room_for_timing_the_usual_calls_stay(tmp_path: Path) -> None:
    start = Start(tmp_path)
    start.room = False
    start.choose(wanted(64, 24))
    assert start.used == {} and start.tally.timed == 0
    assert ChoiceStore("gpu", 1, tmp_path).read() == {}


def test_without_the_binding_the_usual_calls_stay_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_selection, "wanted_products", lambda _: wanted(64, 24))
    monkeypatch.setitem(__import__("sys").modules, "nvmath", None)
    library_of.cache_clear()
    said = choose_products([])
    library_of.cache_clear()
    assert said.startswith("left to the library (") and "nvmath" in said


@pytest.fixture
def table() -> Any:
    yield
    forget()


def refuse(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    raise AssertionError("called")


def test_the_table_is_asked_by_device_dtype_shape_and_tokens(table: None) -> None:
    x, weight = torch.zeros(24, 64, dtype=torch.bfloat16), torch.zeros(32, 64, dtype=torch.bfloat16)
    assert chosen_launch(x, weight) is None
    use(x.device, ProductShape(torch.bfloat16, 32, 64, 24), refuse)
    assert chosen_launch(x, weight) is refuse
    assert chosen_launch(x[:17], weight) is None
    assert chosen_launch(x, weight[:16]) is None
    assert chosen_launch(x.half(), weight.half()) is None


def test_tensors_with_gaps_or_at_odd_addresses_are_left_to_the_library(table: None) -> None:
    use(torch.device("cpu"), ProductShape(torch.bfloat16, 32, 64, 24), refuse)
    weight = torch.zeros(32, 64, dtype=torch.bfloat16)
    assert chosen_launch(torch.zeros(24, 128, dtype=torch.bfloat16)[:, 64:], weight) is None
    assert chosen_launch(torch.zeros(1 + 24 * 64, dtype=torch.bfloat16)[1:].view(24, 64), weight) is None


def test_nothing_chosen_is_used_on_a_cpu(table: None) -> None:
    use(torch.device("cpu"), ProductShape(torch.bfloat16, 32, 64, 24), refuse)
    x, weight = torch.randn(24, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    assert torch.equal(few_tokens_linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width", "tokens"), [(64, 64, 1), (8, 30, 2), (64, 512, 1)])
def test_another_order_of_sums_is_seen_in_a_small_product(
    rows: int, width: int, tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random numbers would show it in few of them: two of a tiny model's products could agree by luck."""

    def summed(order: list[int], x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(x), len(weight))
        for column in order:
            total += x.float()[:, column, None] * weight.float()[:, column]
        assert total.isfinite().all() and total.abs().max() < 60_000
        return total.to(dtype)

    forwards = list(range(width))
    monkeypatch.setattr(gemm_selection, "invariant_product", partial(summed, forwards))
    shape = ProductShape(dtype, rows, width, tokens)
    matmul: Any = SimpleNamespace(shape=shape, launcher=lambda order: partial(summed, order))
    is_alike: Any = sums_alike(matmul, torch.randn(rows, width).to(dtype))
    assert is_alike(forwards)
    halves = [*forwards[width // 2 :], *forwards[: width // 2]]
    assert not is_alike(forwards[::-1]) and not is_alike(halves) and not is_alike(forwards[::2] + forwards[1::2])
