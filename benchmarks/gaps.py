"""Device idle time between CUDA graph replays, by events: unlike a trace it costs the host next to nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch

Span = tuple[torch.cuda.Event, torch.cuda.Event]


@contextmanager
def recorded_replays() -> Iterator[tuple[list[Span], list[float]]]:
    """Collect an event before and one behind every replay made inside, and the host microseconds of each."""
    spans: list[Span] = []
    host_us: list[float] = []
    plain = torch.cuda.CUDAGraph.replay

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        before = time.perf_counter()
        plain(graph)
        host_us.append((time.perf_counter() - before) * 1e6)
        stop.record()
        spans.append((start, stop))

    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign,assignment]
    try:
        yield spans, host_us
    finally:
        torch.cuda.CUDAGraph.replay = plain  # type: ignore[method-assign]


def replay_gaps(run: Callable[[], int]) -> dict[str, Any]:
    """Idle time of rounds that run from graphs only; `run` returns how many it made. Medians of the rounds, in ms.

    Copies between two replays (a plan's work list, the round's own arrays, the read) count as idle. One round in which
    the host was held up (a garbage collection takes as long as some rounds) says nothing about the others; the share
    over all of them is given beside.
    """
    with recorded_replays() as (spans, host_us):
        rounds = run()
    torch.cuda.synchronize()
    replays = len(spans) // rounds
    starts = [start for start, _ in spans]
    gaps = np.array([max(0.0, a[1].elapsed_time(b[0])) for a, b in pairwise(spans)])[: replays * (rounds - 1)]
    idle = gaps.reshape(rounds - 1, replays).sum(1)
    span = np.array([a.elapsed_time(b) for a, b in pairwise(starts[::replays][:rounds])])
    return {
        "rounds": rounds,
        "span_ms": float(np.median(span)),
        "idle_ms": float(np.median(idle)),
        "exposed_host_share": float(np.median(idle / span)),
        "share_of_all": float(idle.sum() / span.sum()),
        "replay_host_us": [float(np.median(host_us[i::replays])) for i in range(replays)],
    }
