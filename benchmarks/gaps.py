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

_WAITED_MS = 0.005
"""A start event longer than this after the stop event before it was waited for: the device had nothing to do."""


@dataclass(frozen=True)
class Replay:
    """One replay: events around it, and how long its launch took the host."""

    start: torch.cuda.Event
    stop: torch.cuda.Event
    launch_ms: float


@contextmanager
def recorded_replays() -> Iterator[list[Replay]]:
    """Collect every replay made inside."""
    found: list[Replay] = []
    plain = torch.cuda.CUDAGraph.replay

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        before = time.perf_counter()
        plain(graph)
        launch_ms = (time.perf_counter() - before) * 1e3
        stop.record()
        found.append(Replay(start, stop, launch_ms))

    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign,assignment]
    try:
        yield found
    finally:
        torch.cuda.CUDAGraph.replay = plain  # type: ignore[method-assign]


def replay_gaps(run: Callable[[], int]) -> dict[str, Any]:
    """Idle time of rounds that run from graphs only; `run` returns how many it made. See `idle`.

    Raises:
        ValueError: the replays are not equally many a round.
    """
    with recorded_replays() as found:
        rounds = run()
    torch.cuda.synchronize()
    if len(found) % rounds:
        raise ValueError(f"{len(found)} replays are not {rounds} equal rounds")
    gaps = np.array([a.stop.elapsed_time(b.start) for a, b in pairwise(found)])
    busy = np.array([replay.start.elapsed_time(replay.stop) for replay in found])
    launches = np.array([replay.launch_ms for replay in found])
    return {"rounds": rounds, **idle(gaps, busy, launches, len(found) // rounds)}


def idle(gaps: np.ndarray, busy: np.ndarray, launches: np.ndarray, graphs: int) -> dict[str, Any]:
    """The idle share of rounds of so many graphs: medians of the rounds, times in ms.

    A round lasts from the end of its predecessor's last graph to the end of its own. Idle is what lies between two
    graphs, copies included (a plan's work list, the round's own arrays, the read). Where the device waited there it
    also waited for the launch, which the events count as the graph's own time: the whole launch is taken as idle.

    Args:
        gaps: [n-1] from the end of a replay to the start of the next. busy, launches: [n], in order.

    >>> found = idle(np.array([0.5, 0.0, 0.5, 0.0, 0.5]), np.full(6, 4.5), np.full(6, 0.1), 2)
    >>> round(found["round_ms"], 3), round(found["exposed_host_share"], 3)
    (9.5, 0.063)
    """
    first = graphs  # the first round has no predecessor
    waited = gaps[first - 1 :] + np.where(gaps[first - 1 :] > _WAITED_MS, launches[first:], 0)
    lengths = (gaps[first - 1 :] + busy[first:]).reshape(-1, graphs).sum(1)
    idle_ms = waited.reshape(-1, graphs).sum(1)
    return {
        "round_ms": float(np.median(lengths)),
        "worst_ms": float(lengths.max()),
        "idle_ms": float(np.median(idle_ms)),
        "exposed_host_share": float(np.median(idle_ms / lengths)),
        "launch_us": (np.median(launches.reshape(-1, graphs), 0) * 1e3).tolist(),
        "graph_ms": np.median(busy.reshape(-1, graphs), 0).tolist(),
    }
