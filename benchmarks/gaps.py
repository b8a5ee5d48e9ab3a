"""Device idle time between CUDA graph replays, by events: unlike a trace it costs the host next to nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

Span = tuple[torch.cuda.Event, torch.cuda.Event]


@contextmanager
def recorded_replays() -> Iterator[list[Span]]:
    """Collect an event before and one behind every replay made inside."""
    spans: list[Span] = []
    plain = torch.cuda.CUDAGraph.replay

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        plain(graph)
        stop.record()
        spans.append((start, stop))

    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign,assignment]
    try:
        yield spans
    finally:
        torch.cuda.CUDAGraph.replay = plain  # type: ignore[method-assign]


def replay_gaps(run: Callable[[], int]) -> dict[str, Any]:
    """Idle time of rounds that run from graphs only; `run` returns how many it made. Times in ms.

    Copies between two replays (a plan's work list, the round's own arrays, the read) count as idle.
    """
    with recorded_replays() as spans:
        rounds = run()
    torch.cuda.synchronize()
    idle = sum(max(0.0, a[1].elapsed_time(b[0])) for a, b in pairwise(spans))
    span = spans[0][0].elapsed_time(spans[-1][1])
    return {"rounds": rounds, "span_ms": span / rounds, "idle_ms": idle / rounds, "exposed_host_share": idle / span}
