"""Idle time of rounds from the times of their graphs; the events are a GPU's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.gaps import idle, replay_gaps


def test_a_launch_that_the_device_waits_for_is_idle_time() -> None:
    gaps = np.array([0.001, 0.2, 0.001, 0.2, 0.001])  # the first graph of a round follows the read, the other it
    found = idle(gaps, np.array([[3.0, 1.0]] * 3), np.array([[0.3, 0.0]] * 3))
    assert found["round_ms"] == pytest.approx(4.201)
    assert found["idle_ms"] == pytest.approx(0.2 + 0.3 + 0.001)
    assert found["exposed_host_share"] == pytest.approx(0.501 / 4.201)


def test_one_slow_round_shows_as_the_worst_and_not_in_the_share() -> None:
    found = idle(np.array([0.1, 900.0, 0.1, 0.1]), np.full((5, 1), 9.9), np.zeros((5, 1)))
    assert found["exposed_host_share"] == pytest.approx(0.01)
    assert found["worst_ms"] == pytest.approx(909.9)


class Event:
    """Stands for an event; `elapsed_time` goes by a clock that the test sets."""

    clock = 0.0
    passed = True

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = Event.clock

    def query(self) -> bool:
        return Event.passed

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


class Graph:
    """Takes 2 ms of the device."""

    def replay(self) -> None:
        Event.clock += 2.0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.parametrize("passed", [True, False])
def test_replays_are_recorded(device: None, monkeypatch: pytest.MonkeyPatch, passed: bool) -> None:
    monkeypatch.setattr(Event, "passed", passed)
    graphs = [Graph(), Graph()]

    def run() -> int:
        for _ in range(3):
            for graph in graphs:
                Event.clock += 0.5
                torch.cuda.CUDAGraph.replay(graph)  # type: ignore[arg-type]
        return 3

    found = replay_gaps(run)
    assert found["rounds"] == 3 and found["round_ms"] == pytest.approx(5.0) and found["graph_ms"] == [2.0, 2.0]
    assert (found["idle_ms"] > 1.0) == passed  # the launches, where the device stood in front of them
    assert torch.cuda.CUDAGraph.replay is Graph.replay


def test_unequal_rounds_are_refused(device: None) -> None:
    graphs = [Graph(), Graph()]

    def run() -> int:
        for graph in (graphs[0], graphs[1], graphs[1], graphs[0]):
            graph.replay()
        return 2

    with pytest.raises(ValueError, match="4 replays are not 2 equal rounds"):
        replay_gaps(run)
