"""Device idle time of rounds from CUDA graphs, by events: unlike a trace they cost the host next to nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

_SLEEP_CYCLES = 8_000_000
"""Some milliseconds: longer than the host needs to launch a graph."""


@dataclass(frozen=True)
class Replay:
    """One replay: the graph, an event behind it, and how long its launch took the host."""

    graph: torch.cuda.CUDAGraph
    stop: torch.cuda.Event
    host_us: float


@contextmanager
def recorded_replays() -> Iterator[list[Replay]]:
    """Collect every replay made inside."""
    found: list[Replay] = []
    plain = torch.cuda.CUDAGraph.replay

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        stop = torch.cuda.Event(enable_timing=True)
        before = time.perf_counter()
        plain(graph)
        host_us = (time.perf_counter() - before) * 1e6
        stop.record()
        found.append(Replay(graph, stop, host_us))

    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign,assignment]
    try:
        yield found
    finally:
        torch.cuda.CUDAGraph.replay = plain  # type: ignore[method-assign]


def device_ms(graph: torch.cuda.CUDAGraph) -> float:
    """What the device needs for a graph, with the inputs that lie there: launched while the device is asleep."""
    times = []
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_SLEEP_CYCLES)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return float(np.median(times))


def replay_gaps(run: Callable[[], int]) -> dict[str, Any]:
    """Idle time of rounds that run from graphs only; `run` returns how many it made. Medians of the rounds, in ms.

    Idle is a round's time, from the end of its last graph to that of the next round's, less what its graphs need when
    nothing is waited for. So a launch that the device waits for is idle time, and so are copies between two replays (a
    plan's work list, the round's own arrays, the read). Measuring replays the graphs once more: nothing that they wrote
    may be used after it.

    Raises:
        ValueError: some rounds replayed other graphs than the first.
    """
    with recorded_replays() as found:
        rounds = run()
    torch.cuda.synchronize()
    graphs = [replay.graph for replay in found[: len(found) // rounds]]
    if [replay.graph for replay in found] != graphs * rounds:
        raise ValueError(f"{len(found)} replays are not {rounds} equal rounds")
    spans = span_ms([replay.stop for replay in found[len(graphs) - 1 :: len(graphs)]])
    busy = [device_ms(graph) for graph in graphs]
    host_us = np.array([replay.host_us for replay in found]).reshape(rounds, len(graphs))
    return {"rounds": rounds, "replay_host_us": np.median(host_us, 0).tolist(), **idle(spans, busy)}


def span_ms(ends: list[torch.cuda.Event]) -> np.ndarray:
    """Time between one event and the next."""
    return np.array([a.elapsed_time(b) for a, b in pairwise(ends)])


def idle(spans: np.ndarray, busy: list[float]) -> dict[str, Any]:
    """Shares of rounds of `spans` ms whose graphs need `busy` ms each.

    >>> idle(np.array([10.0, 10.0, 30.0]), [6.0, 3.5])["exposed_host_share"]
    0.05
    """
    span = float(np.median(spans))
    gap = max(0.0, span - sum(busy))
    found = {"span_ms": span, "worst_ms": float(spans.max()), "device_ms": busy, "idle_ms": gap}
    return found | {"exposed_host_share": gap / span}
