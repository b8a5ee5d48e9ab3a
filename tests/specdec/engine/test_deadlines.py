"""Requests with a time limit: found when it is over, whatever ended or waited before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from specdec.engine.ends import Deadlines
from specdec.requests.sampling import SamplingParams


def request(number: int, submitted: float, max_time: float | None) -> Any:
    return SimpleNamespace(
        id=number,
        params=SamplingParams(max_time=max_time),
        times=SimpleNamespace(submitted=submitted),
        leaves=False,
        progress=number,
        end_early=lambda reason, now, progress: (number, progress) if reason == "timeout" else (number, reason),
    )


def test_those_that_ended_are_forgotten_and_others_are_found_in_their_order() -> None:
    deadlines = Deadlines()
    every = [request(i, float(i % 3), 5.0) for i in range(9)]
    for one in (*every, request(9, 0.0, None), request(10, 0.0, float("inf"))):
        deadlines.add(one)
    for one in every[:4]:
        deadlines.discard(one.id)
    deadlines.discard(10)
    assert deadlines.moments == [(5.0, 6), (6.0, 4), (6.0, 7), (7.0, 5), (7.0, 8)]
    alive: Any = {one.id: one for one in every[4:]}
    assert deadlines.updates(4.9, alive, []) == []
    assert deadlines.updates(6.0, alive, []) == [(6, 6), (4, 4), (7, 7)]
    assert deadlines.updates(6.0, alive, []) == [(6, 6), (4, 4), (7, 7)]  # until they are gone


def test_the_wait_before_the_queue_counts() -> None:
    deadlines, own = Deadlines(), request(0, 10.0, 2.0)
    deadlines.add(own)
    own.times.submitted -= 1.5
    deadlines.add(own)
    assert deadlines.moments == [(10.5, 0)]
    deadlines.discard(0)
    assert not deadlines.moments


def test_cancelled_ones_end_at_once_and_are_forgotten() -> None:
    deadlines, every = Deadlines(), [request(i, 0.0, 5.0 if i else None) for i in range(3)]
    for one in every:
        deadlines.add(one)
    deadlines.cancel([0, 2, 7])
    alive: Any = {one.id: one for one in every}
    assert deadlines.updates(1.0, alive, []) == [(0, "cancelled"), (2, "cancelled")]
    assert deadlines.updates(9.0, alive, []) == [(1, 1), (2, "cancelled"), (0, "cancelled")]
    for one in every:
        deadlines.discard(one.id)
    assert not (deadlines.moments or deadlines.cancelled) and deadlines.updates(9.0, {}, []) == []
