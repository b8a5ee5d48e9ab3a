"""What CUPTI saw of some rounds: device time, idle time outside graph replays, synchronisations, copies, kernels."""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SYNCHRONISE = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def traced(run: Callable[[], int]) -> dict[str, Any]:
    """Trace `run`, which returns how many rounds it made; numbers are a round's, times in ms."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        rounds = run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return summary([e for e in events if e.get("ph") == "X"], rounds)


def summary(events: list[dict[str, Any]], rounds: int) -> dict[str, Any]:
    """Sum up the complete events of a trace."""
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    names = Counter(e["name"] for e in calls)
    copies = Counter(e["name"] for e in device if e["cat"] == "gpu_memcpy")
    launches = _launches(device)
    busy = _union(launches)
    span = max(e for _, e in launches) - min(s for s, _ in launches)
    graphs = {e["args"]["correlation"] for e in calls if e["name"].startswith("cudaGraphLaunch")}
    replay = [_interval(group) for key, group in _by_launch(device).items() if key in graphs]
    kernels: Counter[str] = Counter()
    for event in device:
        kernels[event["name"][:90]] += event["dur"]
    return {
        "rounds": rounds,
        "span_ms": span / rounds / 1e3,
        "idle_outside_launches_ms": (span - busy) / rounds / 1e3,
        "exposed_host_share": (span - busy) / span,
        "graph_replays": len(replay) / rounds,
        "graph_ms": sum(e - s for s, e in replay) / rounds / 1e3,
        "synchronisations": {n: c / rounds for n, c in names.items() if n in SYNCHRONISE},
        "copies": {n: c / rounds for n, c in copies.items()},
        "kernels_ms": {n: d / rounds / 1e3 for n, d in kernels.most_common(25)},
    }


def _by_launch(device: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    groups: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in device:
        groups[event["args"].get("correlation", id(event))].append(event)
    return groups


def _interval(events: list[dict[str, Any]]) -> tuple[float, float]:
    return min(e["ts"] for e in events), max(e["ts"] + e["dur"] for e in events)


def _launches(device: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """One interval a launch: a graph replay counts as a whole, from its first kernel to the end of its last."""
    return [_interval(group) for group in _by_launch(device).values()]


def _union(intervals: list[tuple[float, float]]) -> float:
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
