"""Idle time of rounds from their times and what their graphs need; the events are a GPU's."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.gaps import idle


def test_one_slow_round_shows_as_the_worst_and_not_in_the_share() -> None:
    found = idle(np.array([10.0, 10.0, 900.0, 10.0]), [6.0, 3.0])
    assert found["exposed_host_share"] == pytest.approx(0.1)
    assert found["worst_ms"] == 900 and found["device_ms"] == [6.0, 3.0]


def test_graphs_that_overlap_leave_nothing_idle() -> None:
    assert idle(np.array([5.0]), [3.0, 2.5])["exposed_host_share"] == 0
