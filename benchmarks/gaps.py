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


@dataclass(frozen=True)
class Replay:
    """One replay of a graph: events around it.

    waited_ms: how long the launch took the host, if the device stood in front of it at its end; else 0.
    """

    graph: torch.cuda.CUDAGraph
    start: torch.cuda.Event
    stop: torch.cuda.Event
    launch_ms: float
    waited_ms: float


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
        waited = start.query()  # all that was queued before the launch is done
        stop.record()
        found.append(Replay(graph, start, stop, launch_ms, launch_ms if waited else 0.0))

    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign,assignment]
    try:
        yield found
    finally:
        torch.cuda.CUDAGraph.replay = plain  # type: ignore[method-assign]


def replay_gaps(run: Callable[[], int]) -> dict[str, Any]:
    """Idle time of rounds that run from graphs only; `run` returns how many it made. See `idle`.

    Raises:
        ValueError: some rounds replayed other graphs than the first.
    """
    with recorded_replays() as found:
        rounds = run()
    torch.cuda.synchronize()
    graphs = [replay.graph for replay in found[: len(found) // rounds]]
    if [replay.graph for replay in found] != graphs * rounds:
        raise ValueError(f"{len(found)} replays are not {rounds} equal rounds")
    gaps = np.array([a.stop.elapsed_time(b.start) for a, b in pairwise(found)])
    busy, launches, waited = (
        np.array(times).reshape(rounds, len(graphs))
        for times in (
            [replay.start.elapsed_time(replay.stop) for replay in found],
            [replay.launch_ms for replay in found],
            [replay.waited_ms for replay in found],
        )
    )
    medians = {"launch_us": (np.median(launches, 0) * 1e3).tolist(), "graph_ms": np.median(busy, 0).tolist()}
    return {"rounds": rounds, **idle(gaps, busy, waited), **medians}


def idle(gaps: np.ndarray, busy: np.ndarray, waited: np.ndarray) -> dict[str, Any]:
    """The idle share of rounds: medians of the rounds, times in ms.

    A round lasts from the end of its predecessor's last graph to the end of its own. Idle is what lies between two
    graphs, copies included (a plan, the round's own arrays, the read), and the launches that the device
    waited for: to the events these are part of the graph. A launch that the device came to wait for half-way counts
    as a whole, so the share is never too small.

    Args:
        gaps: [n·g - 1] from the end of a replay to the start of the next. busy, waited: [n rounds, g graphs].

    >>> found = idle(np.array([0.5, 0.0, 0.5, 0.0, 0.5]), np.full((3, 2), 4.5), np.array([[0.1, 0.0]] * 3))
    >>> round(found["round_ms"], 3), round(found["exposed_host_share"], 3)
    (9.5, 0.063)
    """
    rounds, graphs = busy.shape
    between = gaps[graphs - 1 :].reshape(rounds - 1, graphs)  # the first round has no predecessor
    lengths = (between + busy[1:]).sum(1)
    idle_ms = (between + waited[1:]).sum(1)
    return {
        "round_ms": float(np.median(lengths)),
        "worst_ms": float(lengths.max()),
        "idle_ms": float(np.median(idle_ms)),
        "exposed_host_share": float(np.median(idle_ms / lengths)),
    }
