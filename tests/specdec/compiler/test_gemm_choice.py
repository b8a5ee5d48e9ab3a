"""Which algorithm is taken, from timings alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specdec.compiler.gemm_selection import FINALISTS, NEAR, fastest
from specdec.ops.gemm import Algorithm, Launch

USUAL_US = 20.0
USUAL: Any = torch.nn.functional.linear


class Told:
    """A timer that is told how long each algorithm takes, at the first look and at length."""

    def __init__(self, brief: dict[str, float], final: dict[str, float] | None = None) -> None:
        self.brief, self.final = brief, brief if final is None else final
        self.asked: list[list[str]] = []
        self.calls: list[int] = []

    def __call__(self, launches: Sequence[Launch], calls: int, rounds: int) -> list[float]:
        names = ["usual" if launch is USUAL else str(launch) for launch in launches]
        self.asked.append(names)
        self.calls.append(calls)
        us = {"usual": USUAL_US} | (self.final if len(self.asked) > 1 else self.brief)
        return [us[name] for name in names]


def chosen(timer: Told) -> str | None:
    """The name of the algorithm that is chosen."""
    algorithms = [Algorithm(name.encode(), 0) for name in timer.brief]
    launcher: Any = lambda algorithm: algorithm.data.decode()  # noqa: E731
    choice = fastest(algorithms, launcher, USUAL, timer)
    return None if choice is None else choice.data.decode()


def test_the_fastest_is_taken() -> None:
    assert chosen(Told({"a": 19.0, "b": 15.0, "c": 16.0})) == "b"


def test_the_long_look_decides_among_the_best_of_the_brief_one() -> None:
    brief = {f"a{i}": 10.0 + i / 10 for i in range(FINALISTS + 3)}
    timer = Told(brief, brief | {"a0": 30.0, "a1": 12.0, "a2": 11.5, "a3": 13.0, f"a{FINALISTS}": 1.0})
    assert chosen(timer) == "a2"
    assert timer.asked[1] == ["usual", *(f"a{i}" for i in range(FINALISTS))]


def test_what_the_brief_look_finds_clearly_slower_is_not_timed_again() -> None:
    timer = Told({"a": 10.0 * NEAR + 0.1, "b": 10.0, "c": 10.0 * NEAR - 0.1}, {"b": 10.0, "c": 9.0})
    assert chosen(timer) == "c" and timer.asked[1] == ["usual", "b", "c"]


@pytest.mark.parametrize(("us", "calls"), [(5.0, 4), (100.0, 4), (190.0, 2), (3_000.0, 1), (float("inf"), 1), (0.0, 4)])
def test_long_matmuls_are_called_less_often(us: float, calls: int) -> None:
    timer = Told({"a": us})
    chosen(timer)
    assert timer.calls == [2, calls]


@pytest.mark.parametrize("us", [USUAL_US * 0.995, USUAL_US, 40.0, float("inf")])
def test_the_usual_call_stays_where_nothing_is_clearly_faster(us: float) -> None:
    assert chosen(Told({"a": us})) is None


def test_an_algorithm_that_fails_is_not_timed_again() -> None:
    timer = Told({"a": float("inf"), "b": 15.0})
    assert chosen(timer) == "b" and timer.asked[1] == ["usual", "b"]


def test_the_usual_call_stays_where_the_library_lists_nothing() -> None:
    assert chosen(Told({})) is None


def test_nothing_is_chosen_where_the_usual_call_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "USUAL_US", float("inf"))
    assert chosen(Told({"a": float("inf")})) is None and chosen(Told({})) is None
