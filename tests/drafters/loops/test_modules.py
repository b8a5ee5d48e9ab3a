"""Which module reads what in a loop of several: tokens, vectors, cache layers. Its modules note what they are given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import drafters.loops.chain
from drafters.loops.base import LoopSize
from drafters.loops.chain import DraftInputs, ModuleLoop, run_prefill, run_steps

Call = tuple[int, list[int], list[float], list[int], Any]
"""Module, token ids, what it is fed, positions, and what serves its attention."""


class Module:
    """Module m of M; draft id i is the target's i + 500.

    Vectors are one number: `feedback` adds 100·(m+1), the n-th call gives 1000·n, 1000·n + 1, …
    """

    hidden_size = 1

    def __init__(self, number: int, calls: list[Call]) -> None:
        self.number, self.calls = number, calls

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        return aux

    def feedback(self, x: torch.Tensor) -> torch.Tensor:
        return x + 100 * (self.number + 1)

    def forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: Any, attend: Any) -> torch.Tensor:
        served = attend if isinstance(attend, tuple) else (*attend.args, 0)
        self.calls.append((self.number, token_ids.tolist(), hidden[:, 0].tolist(), positions, served))
        return 1000.0 * len(self.calls) + torch.arange(len(token_ids))[:, None]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return draft_ids + 500


class Stack:
    """M modules that write into one list of calls."""

    def __init__(self, num_modules: int) -> None:
        self.calls: list[Call] = []
        self.modules: Any = [Module(m, self.calls) for m in range(num_modules)]


class Choices:
    """Draft j of row r is 10·j + r; what each was chosen from."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[float]]] = []

    def __call__(self, step: int, logits: torch.Tensor) -> tuple[torch.Tensor, None]:
        self.seen.append((step, logits[:, 0].tolist()))
        return 10 * (step + 1) + torch.arange(len(logits)), None


RUNNER: Any = SimpleNamespace(plan=lambda metadata: metadata.name, attend=lambda planned: None)


@pytest.fixture(autouse=True)
def named_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafters.loops.chain, "from_layer", lambda attend, layer: (*attend.args, layer))


def metadata(name: str, positions: list[int] | None = None) -> Any:
    return SimpleNamespace(name=name, positions=positions)


def module_pass(name: str, tokens: list[int], sources: list[int], last_row: list[int]) -> Any:
    ids, rows, last = (torch.tensor(x, dtype=torch.long) for x in (tokens, sources, last_row))
    return SimpleNamespace(metadata=metadata(name), token_ids=ids, sources=rows, last_row=last)


def test_a_step_begins_with_the_module_befores_last_true_row_while_laps_are_new() -> None:
    """Two modules, two requests, four drafts: the third by module 0 again, the fourth in the second lap."""
    stack, choose = Stack(2), Choices()
    last = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])
    steps = tuple(metadata(f"step {s}", [s]) for s in (1, 2, 3))
    draft = run_steps(stack.modules, RUNNER, tuple(last), DraftInputs(None, 2, (), steps), choose)
    assert stack.calls == [
        (1, [510, 511], [101, 102], [1], ("step 1", 1)),
        (0, [510, 520, 511, 521], [203, 1200, 204, 1201], [2], ("step 2", 0)),
        (1, [520, 530, 521, 531], [2100, 2101, 2102, 2103], [3], ("step 3", 1)),
    ]
    assert choose.seen == [(0, [1, 2]), (1, [1000, 1001]), (2, [2001, 2003]), (3, [3001, 3003])]
    assert draft.token_ids.tolist() == [[510, 520, 530, 540], [511, 521, 531, 541]]


def test_the_draft_prefill_feeds_each_module_the_one_before_and_what_is_carried() -> None:
    """Three modules; the row of the round before is the carried vector, by module."""
    stack = Stack(3)
    aux, carried = torch.tensor([[5.0], [6.0], [7.0]]), torch.tensor([[[31.0]], [[32.0]], [[33.0]]])
    passes = [
        module_pass("first", [4, 8], [0, 2], [1]),
        module_pass("second", [8, 9], [0, 1], [1]),
        module_pass("third", [9], [2], [0]),
    ]
    last = torch.stack(run_prefill(stack.modules, RUNNER, aux, passes, carried))
    assert stack.calls == [
        (0, [4, 8], [5, 7], None, ("first", 0)),
        (1, [8, 9], [131, 1100], None, ("second", 1)),
        (2, [9], [2201], None, ("third", 2)),
    ]
    assert last[:, :, 0].tolist() == [[1001], [2001], [3000]]


def test_a_request_that_is_too_short_for_a_module_carries_on_what_it_had() -> None:
    stack = Stack(3)
    passes = [module_pass("first", [4], [0], [0]), *(module_pass(name, [], [], [0]) for name in ("second", "third"))]
    carried = torch.tensor([[[31.0]], [[32.0]], [[33.0]]])
    last = torch.stack(run_prefill(stack.modules, RUNNER, torch.tensor([[5.0]]), passes, carried))
    assert last[:, :, 0].tolist() == [[1000], [32], [33]] and len(stack.calls) == 1


def test_vectors_are_carried_by_the_row_of_the_request() -> None:
    """Two rounds of rows 2 and 0, then one of row 0 alone: it finds its own."""
    stack, choose = Stack(2), Choices()
    loop = ModuleLoop(stack.modules, LoopSize(3, 8, 1, 4))
    aux = torch.tensor([[5.0], [6.0]])

    def run(rows: list[int], sources: list[int]) -> None:
        tokens, last_row = [1] * len(rows), list(range(len(rows)))
        passes = [module_pass("a", tokens, last_row, last_row), module_pass("b", tokens, sources, last_row)]
        inputs: Any = SimpleNamespace(request_rows=torch.tensor(rows), passes=passes, steps=[], num_drafting=0)
        assert loop.run(inputs, RUNNER, aux, choose).token_ids.numel() == 0

    run([2, 0], [2, 3])
    assert [loop.carried_by(row).item() for row in (2, 0, 1)] == [1000, 1001, 0]
    run([0], [0])
    assert stack.calls[-1][2] == [1001 + 100], "module 1 reads row 0's vector, not that of the first in the batch"
    loop.carry(1, torch.tensor([[77.0]]))
    run([1], [0])
    assert stack.calls[-1][2] == [77 + 100] and loop.carried_by(2).item() == 1000


def test_modules_that_no_draft_comes_from_are_not_run() -> None:
    assert [ModuleLoop(Stack(3).modules, LoopSize(1, 8, 1, k)).num_following for k in (2, 3, 7)] == [2, 3, 3]
