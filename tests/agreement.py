"""How far two runs agree that may round differently."""

from __future__ import annotations

from typing import Any

from specdec import Completion


def agreement(ours: list[Any], others: list[Any]) -> float:
    """Share of positions with equal ids, up to each sequence's first difference and one beyond."""
    same = total = 0
    for a, b in zip(ours, others, strict=True):
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        same += len(a) if first is None else first
        total += len(a) if first is None else first + 1
    return same / total


def drafted(completions: list[Completion]) -> list[list[int]]:
    """All draft ids of each completion, one round after the other."""
    return [[t for round_ in c.drafts or () for t in round_] for c in completions]
