"""What the timer launches and how it counts, on a device whose clock is told."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from specdec.compiler.gemm_selection import GpuTimer


class Device:
    """A clock that launches move on, in ms, and the events that read it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.read: list[int] = []

    def event(self, enable_timing: bool) -> Event:
        return Event(self)

    def launch(self, *ms: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """A launch that takes so long at its first call, its second, …; and then as long as the last."""
        left = list(ms)

        def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            self.now += left.pop(0) if len(left) > 1 else left[0]
            self.read.append(weight.data_ptr())
            return x

        return run


class Event:
    """A moment of a device."""

    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0.0

    def record(self) -> None:
        self.at = self.device.now

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Has an L2 cache of 4 KiB."""
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=4096))
    return device


def weights(count: int, rows: int = 8) -> list[torch.Tensor]:
    return [torch.zeros(rows, 64, dtype=torch.bfloat16) for _ in range(count)]  # 1 KiB each of eight rows


def test_the_least_of_the_rounds_without_the_first_call(device: Device) -> None:
    steady, disturbed = device.launch(0.001, 0.02), device.launch(0.001, 5, 5, 0.03, 0.03, 5, 0.03)
    assert GpuTimer(weights(1), 24)([steady, disturbed], 2, 3) == pytest.approx([20, 30])


def test_one_that_fails_is_infinitely_slow(device: Device) -> None:
    def fail(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("planted")

    assert GpuTimer(weights(1), 24)([fail, device.launch(0.02)], 2, 3) == pytest.approx([float("inf"), 20])


def test_running_out_of_memory_is_no_slow_launch(device: Device) -> None:
    def fail(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("planted")

    with pytest.raises(torch.OutOfMemoryError):
        GpuTimer(weights(1), 24)([fail], 2, 3)


@pytest.mark.parametrize(("given", "rows", "used"), [(1, 8, 12), (20, 8, 12), (1, 1, 32), (2, 200, 1)])
def test_weights_take_turns_through_thrice_the_cache(device: Device, given: int, rows: int, used: int) -> None:
    """Copies stand in for those that are missing, up to 32 in all."""
    own = weights(given, rows)
    GpuTimer(own, 24)([device.launch(1.0)], 63, 1)
    assert len(set(device.read)) == used
    assert device.read[used:] == device.read[: len(device.read) - used]
    assert len({w.data_ptr() for w in own} & set(device.read)) == min(given, used)
