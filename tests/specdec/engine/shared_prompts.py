"""Prompts that begin alike, and what the prefix cache has of them by arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from evals.data.arithmetic import problems
from evals.data.datasets import read_jsonl

_SHOTS = 5


def five_shots(count: int, data: Path | None) -> list[str]:
    """`count` prompts with the same five worked problems before their own: GSM8K's of a folder, or generated ones."""
    if data is None:
        drawn = [(p.question, p.answer) for p in problems("train", _SHOTS + count)]
        shots, asked = drawn[:_SHOTS], drawn[_SHOTS:]
    else:
        splits = ((data / "gsm8k" / f"{name}.jsonl", n) for name, n in (("train", _SHOTS), ("test", count)))
        shots, asked = ([(r["question"], r["answer"]) for _, r in islice(read_jsonl(path), n)] for path, n in splits)
    worked = "\n\n".join(f"Question: {question}\nAnswer: {answer}" for question, answer in shots)
    return [f"{worked}\n\nQuestion: {question}\nAnswer:" for question, _ in asked]


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """With how many tokens both begin.

    >>> common([1, 2, 3], [1, 2, 4]), common([1, 2], [1, 2, 4])
    (2, 2)
    """
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def expected_hits(prompts: Sequence[Sequence[int]], page_size: int, following: int) -> list[tuple[int, int]]:
    """(tokens in pages found, tokens not read again) of each prompt of one call, from those before it alone.

    All whole pages that it begins with as one before it does are found. Of these it reads the last one again if the
    `following` tokens after it (M of a head of M modules; 0 without drafts) are not the same, or not there.

    >>> expected_hits([[1] * 9, [1] * 9, [1] * 8 + [2, 3]], 4, 1)
    [(0, 0), (8, 8), (8, 4)]
    """
    found = []
    for i, prompt in enumerate(prompts):
        most = max((common(prompt, before) for before in prompts[:i]), default=0)
        read = most - following if following else min(most, len(prompt) - 1)
        found.append((most // page_size * page_size, max(read, 0) // page_size * page_size))
    return found
