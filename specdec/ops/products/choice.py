"""The fastest algorithm of one matmul, from timings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Launch = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""x [T, I], weight [O, I] -> x · weightᵀ [T, O], queued on the current stream."""

FINALISTS = 4
NEAR = 1.08
"""What a first look finds slower than the best by more is no finalist. More finalists, or slower ones, changed none of
192 choices on an H200 (docs/log.md)."""
_SPAN_US, _MOST_CALLS = 400, 4
"""At length is so many microseconds of calls, and not more calls: of long matmuls one tells as much as four."""
LEAST_GAIN = 0.02
"""A choice that gains less than this share of the time is noise: the library's own stays."""


@dataclass(frozen=True)
class Algorithm:
    """One of cuBLASLt's algorithms: a description, valid for one version of the library, and its workspace in bytes."""

    data: bytes
    workspace: int


@dataclass(frozen=True)
class Choice:
    """What timing one shape gave: the algorithm, None where none beats the usual call, and µs of both."""

    algorithm: Algorithm | None
    us: float
    usual_us: float


class Timer(Protocol):
    """Times launches of one shape against each other."""

    def __call__(self, launches: Sequence[Launch], calls: int, rounds: int) -> list[float]:
        """µs of one call of each launch: the least of `rounds` means over `calls`; inf for one that fails."""
        ...


def fastest(
    algorithms: Sequence[Algorithm], launcher: Callable[[Algorithm], Launch], usual: Launch, timer: Timer
) -> Choice:
    """All algorithms are timed briefly, the best of them at length and in turn with the usual call."""
    launches = [launcher(each) for each in algorithms]
    brief = timer(launches, 2, 2)
    least = min(brief, default=float("inf"))
    best = sorted((us, i) for i, us in enumerate(brief) if us <= NEAR * least and us < float("inf"))[:FINALISTS]
    calls = min(max(round(_SPAN_US / max(least, 1)), 1), _MOST_CALLS)
    usual_us, *final = timer([usual, *(launches[i] for _, i in best)], calls, 6)
    us, winner = min(((us, i) for us, (_, i) in zip(final, best, strict=True)), default=(float("inf"), -1))
    if usual_us == float("inf") or us > (1 - LEAST_GAIN) * usual_us:
        return Choice(None, usual_us, usual_us)
    return Choice(algorithms[winner], us, usual_us)
