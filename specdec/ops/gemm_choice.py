"""Which cuBLASLt algorithm a matmul of one shape runs by: shapes, timings and the choices of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

_ALIGNED = 16
"""Bytes: rows and addresses that the chosen algorithms may read and write at once."""


class ProductShape(NamedTuple):
    """x [tokens, width] · weightᵀ [width, rows] in one dtype, all of them without gaps.

    >>> str(ProductShape(torch.bfloat16, 6144, 4096, 96))
    'bfloat16 6144x4096 96'
    """

    dtype: torch.dtype
    rows: int
    width: int
    tokens: int

    def __str__(self) -> str:
        """The name of the shape in a file of choices."""
        return f"{str(self.dtype).removeprefix('torch.')} {self.rows}x{self.width} {self.tokens}"

    @property
    def is_aligned(self) -> bool:
        """Whether every row of weight, input and output begins at a multiple of 16 bytes."""
        size = self.dtype.itemsize
        return self.rows * size % _ALIGNED == 0 == self.width * size % _ALIGNED


def aligned(*tensors: torch.Tensor) -> bool:
    """Whether each lies in memory without gaps, from a multiple of 16 bytes on."""
    return all(x.is_contiguous() and x.data_ptr() % _ALIGNED == 0 for x in tensors)


Launch = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""x [T, I], weight [O, I] -> x · weightᵀ [T, O], queued on the current stream."""

FINALISTS = 4
NEAR = 1.08
"""Algorithms that are slower than the best by more in a brief timing are no finalists. More or slower finalists changed
none of 192 choices on an H200 (docs/log/starts.md)."""
_SPAN_US, _MOST_CALLS = 400, 4
"""A long timing is this many microseconds of calls, but at most this many calls: more calls of a long matmul add
nothing."""
LEAST_GAIN = 0.02
"""A choice that gains less than this share of the time is noise: the library's own stays."""


@dataclass(frozen=True)
class Algorithm:
    """One of cuBLASLt's algorithms: a description, valid for one version of the library, and its workspace in bytes."""

    data: bytes
    workspace: int


@dataclass(frozen=True)
class TimedAlgorithm:
    """The result of timing one shape: the algorithm, None if none beats the usual call, and µs of both."""

    algorithm: Algorithm | None
    us: float
    usual_us: float


Timer = Callable[[Sequence[Launch], int, int], list[float]]
"""(launches of one shape, calls, rounds) -> µs of a call of each: the least of `rounds` means; inf where one fails."""


def fastest(
    algorithms: Sequence[Algorithm], launcher: Callable[[Algorithm], Launch], usual: Launch, timer: Timer
) -> TimedAlgorithm:
    """All algorithms are timed briefly, the best of them at length and in turn with the usual call."""
    launches = [launcher(each) for each in algorithms]
    brief = timer(launches, 2, 2)
    least = min(brief, default=float("inf"))
    best = sorted((us, i) for i, us in enumerate(brief) if us <= NEAR * least and us < float("inf"))[:FINALISTS]
    calls = min(max(round(_SPAN_US / max(least, 1)), 1), _MOST_CALLS)
    usual_us, *final = timer([usual, *(launches[i] for _, i in best)], calls, 6)
    us, winner = min(((us, i) for us, (_, i) in zip(final, best, strict=True)), default=(float("inf"), -1))
    if usual_us == float("inf") or us > (1 - LEAST_GAIN) * usual_us:
        return TimedAlgorithm(None, usual_us, usual_us)
    return TimedAlgorithm(algorithms[winner], us, usual_us)


_launches: dict[tuple[torch.device, ProductShape], Launch] = {}


def use(device: torch.device, shape: ProductShape, launch: Launch) -> None:
    """From now on, matmuls of this shape on this device run by `launch`."""
    _launches[device, shape] = launch


def forget() -> None:
    """Back to the usual calls, but for graphs that were captured."""
    _launches.clear()


def chosen_launch(x: torch.Tensor, weight: torch.Tensor) -> Launch | None:
    """The algorithm chosen for x [T, I] · weightᵀ [I, O], or None."""
    if not _launches:
        return None
    rows, width = weight.shape
    shape = ProductShape(x.dtype, rows, width, len(x))
    launch = _launches.get((x.device, shape))
    return launch if launch is not None and aligned(x, weight) else None
