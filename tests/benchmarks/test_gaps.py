"""Idle time of rounds from the times of their graphs; the events are a GPU's."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.gaps import idle


def test_a_launch_that_the_device_waits_for_is_idle_time() -> None:
    gaps = np.array([0.001, 0.2, 0.001, 0.2, 0.001])  # the first graph of a round follows the read, the other it
    found = idle(gaps, np.array([3.0, 1.0] * 3), np.array([0.3, 0.1] * 3), 2)
    assert found["round_ms"] == pytest.approx(4.201)
    assert found["idle_ms"] == pytest.approx(0.2 + 0.3 + 0.001)
    assert found["exposed_host_share"] == pytest.approx(0.501 / 4.201)
    assert found["launch_us"] == pytest.approx([300, 100]) and found["graph_ms"] == [3.0, 1.0]


def test_one_slow_round_shows_as_the_worst_and_not_in_the_share() -> None:
    found = idle(np.array([0.1, 900.0, 0.1, 0.1]), np.full(5, 9.9), np.zeros(5), 1)
    assert found["exposed_host_share"] == pytest.approx(0.01)
    assert found["worst_ms"] == pytest.approx(909.9)
