"""What a chain feeds its head: at each step its own feedback and its last draft, at first the accepted rows alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from drafters.loops.chain import ChainLoop, DraftInputs
from drafters.loops.head_passes import HeadPasses


class Head:
    """Vectors are one number. The n-th call gives 1000·n, 1000·n + 1, …; feedback adds 7; draft id d is d + 50."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[float], Any]] = []

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        return aux * 2

    def feedback(self, x: torch.Tensor) -> torch.Tensor:
        return x + 7

    def forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: Any, attend: Any) -> torch.Tensor:
        self.calls.append((token_ids.tolist(), hidden[:, 0].tolist(), positions))
        return 1000.0 * len(self.calls) + torch.arange(len(token_ids))[:, None]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return x - 0.5

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return draft_ids + 50


def test_each_step_feeds_the_draft_before_and_the_heads_feedback() -> None:
    runner: Any = SimpleNamespace(plan=lambda metadata: None, attend=lambda *given: None)
    head: Any = Head()
    seen: list[tuple[int, list[float]]] = []

    def choose(step: int, logits: torch.Tensor) -> tuple[torch.Tensor, None]:
        seen.append((step, logits[:, 0].tolist()))
        return 10 * (step + 1) + torch.arange(len(logits)), None

    prefill: Any = SimpleNamespace(
        sources=torch.tensor([0, 2, 3]),
        token_ids=torch.tensor([1, 2, 3]),
        metadata=SimpleNamespace(positions="prefill"),
        last_row=torch.tensor([1, 2]),
    )
    steps: Any = [SimpleNamespace(positions=f"step {n}") for n in (2, 3)]
    aux = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    draft = ChainLoop(head).run(DraftInputs(None, 2, (prefill,), steps), runner, aux, choose)
    assert head.calls == [
        ([1, 2, 3], [2, 6, 8], "prefill"),
        ([60, 61], [1008, 1009], "step 2"),
        ([70, 71], [2007, 2008], "step 3"),
    ]
    assert seen == [(0, [1000.5, 1001.5]), (1, [1999.5, 2000.5]), (2, [2999.5, 3000.5])]
    assert draft.token_ids.tolist() == [[60, 70, 80], [61, 71, 81]]


def test_the_passes_of_a_graph_are_those_of_the_loop() -> None:
    head: Any = Head()
    passes = HeadPasses(head)
    ids, positions = torch.tensor([1, 2, 3]), torch.arange(3)
    x, logits = passes.prefill(torch.tensor([[1.0], [3.0], [4.0]]), ids, positions, torch.tensor([2, 1]))
    assert x[:, 0].tolist() == [1002, 1001] and logits[:, 0].tolist() == [1001.5, 1000.5]
    passes.step(x, torch.tensor([60, 61]), positions[:2])
    assert [call[:2] for call in head.calls] == [([1, 2, 3], [2, 6, 8]), ([60, 61], [1009, 1008])]
