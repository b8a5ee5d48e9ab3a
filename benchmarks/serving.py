"""Requests through a model of specdec: all at once, or as they arrive."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from benchmarks.synthetic import SAMPLED
from benchmarks.workload import Arrival, Timeline
from specdec import SamplingParams, SpeculativeModel


def params_of(request: Arrival) -> SamplingParams:
    """Its parameters; it ends with its last token only."""
    sampling = SAMPLED if request.sampled else {}
    return SamplingParams(max_new_tokens=request.new_tokens, ignore_eos=True, **sampling)  # type: ignore[arg-type]


def all_at_once(model: SpeculativeModel, requests: Sequence[Arrival]) -> list[Timeline]:
    """One call with all requests."""
    started = time.perf_counter()
    lines = [Timeline(started) for _ in requests]
    for update in model.stream([r.token_ids for r in requests], [params_of(r) for r in requests]):
        lines[update.index].add(time.perf_counter(), len(update.token_ids))
    return lines


class Rounds:
    """An engine's rounds, and what they bring for which request."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.lines: dict[int, Timeline] = {}

    def submit(self, request: Arrival, due: float) -> Timeline:
        """Queue it; returns what it gets from now on. due: the moment it is counted from."""
        line = self.lines[self.engine.submit(request.token_ids, params_of(request))] = Timeline(due)
        return line

    def step(self) -> None:
        """Run a round. Raises the error of a request that failed."""
        updates = self.engine.step()
        now = time.perf_counter()
        for update in updates:
            if getattr(update, "error", None) is not None:
                raise update.error
            self.lines[update.request_id].add(now, len(update.token_ids))


def as_they_arrive(engine: Any, requests: Sequence[Arrival]) -> list[Timeline]:
    """Each request joins at its own moment."""
    started, rounds, waiting = time.perf_counter(), Rounds(engine), deque(requests)
    while waiting or engine.has_work:
        while waiting and waiting[0].at <= time.perf_counter() - started:
            request = waiting.popleft()
            rounds.submit(request, started + request.at)
        if engine.has_work:
            rounds.step()
        else:
            time.sleep(max(started + waiting[0].at - time.perf_counter(), 0))
    return list(rounds.lines.values())


def served(model: SpeculativeModel, requests: Sequence[Arrival]) -> list[Timeline]:
    """Run a workload: in one call where all requests are there at the start."""
    if any(request.at for request in requests):
        return as_they_arrive(model.engine, requests)
    return all_at_once(model, requests)
