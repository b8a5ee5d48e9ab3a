"""What CUPTI saw of some rounds: kernels with their device time, copies, synchronisations, graph replays."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
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
    calls = Counter(e["name"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver"))
    copies = Counter(e["name"] for e in device if e["cat"] == "gpu_memcpy")
    kernels: Counter[str] = Counter()
    for event in device:
        kernels[event["name"][:90]] += event["dur"]
    return {
        "rounds": rounds,
        "graph_replays": sum(c for n, c in calls.items() if n.startswith("cudaGraphLaunch")) / rounds,
        "synchronisations": {n: c / rounds for n, c in calls.items() if n in SYNCHRONISE},
        "copies": {n: c / rounds for n, c in copies.items()},
        "kernels_ms": {n: d / rounds / 1e3 for n, d in kernels.most_common(25)},
    }
