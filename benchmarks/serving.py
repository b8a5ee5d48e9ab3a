"""Requests through a model of specdec: all at once, as they arrive, and prompts that arrive beside rows that decode."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.synthetic import SAMPLED, engine_of
from benchmarks.workload import Arrival, Timeline, arrival_times, between_updates, until_first_token
from specdec import SamplingParams, SpeculativeModel

_STEADY_UPDATES = 8
_ROUNDS_AN_UPDATE = 20


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
        self.lines: dict[int, Timeline] = {}
        self._engine = engine

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._engine.has_work)

    def submit(self, request: Arrival, due: float) -> int:
        """Queue it; returns its id. due: the moment it is counted from."""
        request_id: int = self._engine.submit(request.token_ids, params_of(request))
        self.lines[request_id] = Timeline(due)
        return request_id

    def step(self) -> None:
        """Run a round. Raises the error of a request that failed."""
        updates = self._engine.step()
        now = time.perf_counter()
        for update in updates:
            if getattr(update, "error", None) is not None:
                raise update.error
            self.lines[update.request_id].add(now, len(update.token_ids))

    def renew(self, ids: Sequence[int]) -> list[Timeline]:
        """Timelines of these requests that begin now."""
        now = time.perf_counter()
        self.lines |= {i: Timeline(now) for i in ids}
        return [self.lines[i] for i in ids]

    def until(self, lines: Sequence[Timeline], updates: int) -> Iterator[None]:
        """Step until each of them has so many updates; yields before every round.

        Raises:
            ValueError: one of them has come to its end, or hardly gets anything.
        """
        for _ in range(_ROUNDS_AN_UPDATE * (updates + _STEADY_UPDATES)):
            if min(len(line.moments) for line in lines) >= updates:
                return
            yield
            self.step()
        raise ValueError(f"no {updates} updates of each row in {_ROUNDS_AN_UPDATE} times as many rounds")

    def abort(self) -> None:
        """End what is left."""
        self._engine.abort(list(self.lines))


def as_they_arrive(engine: Any, requests: Sequence[Arrival]) -> list[Timeline]:
    """Each request joins at its own moment."""
    started, rounds, waiting = time.perf_counter(), Rounds(engine), deque(requests)
    while waiting or rounds.busy:
        while waiting and waiting[0].at <= time.perf_counter() - started:
            request = waiting.popleft()
            rounds.submit(request, started + request.at)
        if rounds.busy:
            rounds.step()
        else:
            time.sleep(max(started + waiting[0].at - time.perf_counter(), 0))
    return list(rounds.lines.values())


def served(model: SpeculativeModel, requests: Sequence[Arrival]) -> list[Timeline]:
    """Run a workload: in one call where all requests are there at the start."""
    if any(request.at for request in requests):
        return as_they_arrive(engine_of(model), requests)
    return all_at_once(model, requests)


def tokens_to_outlast(updates: int, drafts: int) -> int:
    """New tokens with which no row comes to its end in `interference`."""
    return (2 * updates + 100) * (drafts + 1)


def interference(
    engine: Any, rows: Sequence[Arrival], arriving: Sequence[Arrival], updates: int, rate: float, seed: int
) -> dict[str, Any]:
    """The time between two updates of the same rows, alone and while prompts arrive.

    Args:
        arriving: prompts, used over and over; updates: of every row, alone and again with arrivals.
        rate: of the arrivals, per second; 0: one after the other has its first token.
    """
    rounds = Rounds(engine)
    now = time.perf_counter()
    steady = [rounds.submit(row, now) for row in rows]
    for _ in rounds.until([rounds.lines[i] for i in steady], _STEADY_UPDATES):
        pass
    alone = rounds.renew(steady)
    for _ in rounds.until(alone, updates):
        pass
    beside, prompts = rounds.renew(steady), Prompts(rounds, arriving, rate, seed)
    for _ in rounds.until(beside, updates):
        prompts.arrive()
    rounds.abort()
    return compared(between_updates(alone), between_updates(beside)) | prompts.numbers()


class Prompts:
    """Prompts that keep arriving: see `interference`."""

    def __init__(self, rounds: Rounds, requests: Sequence[Arrival], rate: float, seed: int) -> None:
        self._rounds, self._requests = rounds, requests
        self._lines: list[Timeline] = []
        self._started = time.perf_counter()
        self._due = arrival_times(1 << 16, rate, np.random.default_rng([seed, 4])) if rate else None

    def arrive(self) -> None:
        """Submit what is due."""
        while (due := self._next()) is not None:
            request = self._requests[len(self._lines) % len(self._requests)]
            self._lines.append(self._rounds.lines[self._rounds.submit(request, due)])

    def _next(self) -> float | None:
        now = time.perf_counter()
        if self._due is not None:
            due = self._started + float(self._due[len(self._lines)])
            return due if due <= now else None
        return now if not self._lines or self._lines[-1].moments else None

    def numbers(self) -> dict[str, Any]:
        """How many arrived, how fast, and their time to first token."""
        per_s = len(self._lines) / (time.perf_counter() - self._started)
        return {"arrived": len(self._lines), "arrived_per_s": per_s} | until_first_token(self._lines)


def compared(alone: dict[str, Any], beside: dict[str, Any]) -> dict[str, Any]:
    """Both, and the p99 beside arrivals over the median alone, by update and by token."""
    found: dict[str, Any] = {"alone": alone, "beside": beside}
    for unit in ("update", "token"):
        found[f"{unit}_p99_over_alone"] = beside[f"{unit}_ms_p99"] / alone[f"{unit}_ms_median"]
    return found
