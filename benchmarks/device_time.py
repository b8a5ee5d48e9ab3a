"""Median times of launches on a device that is idle before them, and what the device reaches at best."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

REPEATS = 9
"""Of every time that is told; the first two of the host's are left out besides."""


@dataclass(frozen=True)
class Place:
    """Where and in which dtype is measured."""

    device: torch.device
    dtype: torch.dtype

    @property
    def on_gpu(self) -> bool:
        """Whether time is the GPU's."""
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Until the device is idle."""
        if self.on_gpu:
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Rates:
    """What the device reaches: bytes a second of a copy (read and written), operations a second of a matmul."""

    copy: float
    matmul: float


def host_us(call: Callable[[], object], place: Place) -> float:
    """Median host microseconds of a call; the device is idle before it."""
    times = []
    for _ in range(REPEATS + 2):
        place.wait()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times[2:]) * 1e6


def device_us(launch: Callable[[], object], place: Place, graph: bool = True) -> float:
    """Median microseconds of the device for what `launch` launches; of the host where there is no GPU.

    Args:
        graph: it is captured in a CUDA graph first, whose replay is timed.
    """
    launch()
    launch()
    place.wait()
    if not place.on_gpu:
        return host_us(launch, place)
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            launch()
        launch = captured.replay
        launch()
    times = []
    for _ in range(REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return median(times)


def measured_rates(place: Place) -> Rates:
    """Copy of 2 GiB and matmul of 8192³ on a GPU; a small one of each elsewhere."""
    size, width = (2 << 30, 8192) if place.on_gpu else (1 << 22, 256)
    a, b = (torch.zeros(size, dtype=torch.uint8, device=place.device) for _ in range(2))
    x, y = (torch.randn(width, width, device=place.device).to(place.dtype) for _ in range(2))
    copied = device_us(lambda: b.copy_(a), place, graph=False)
    multiplied = device_us(lambda: torch.mm(x, y), place, graph=False)
    return Rates(2e6 * size / copied, 2e6 * width**3 / multiplied)
