"""Requests that arrive at a server, what came back when, and the numbers that this makes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Arrival:
    """One request: its moment (seconds from the start), prompt, number of new tokens, and whether it is sampled."""

    at: float
    token_ids: list[int]
    new_tokens: int
    sampled: bool


@dataclass(frozen=True)
class Load:
    """A workload.

    Attributes:
        requests: how many. prompt, output: shortest and longest, uniform, both included.
        sampled_share: of the requests, in random places. rate: requests per second, Poisson; 0: all at once.
        shared_prefix: so many tokens come before every prompt, the same in all.
    """

    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    sampled_share: float = 0.0
    rate: float = 0.0
    seed: int = 0
    shared_prefix: int = 0

    def arrivals(self, vocab: int, run: int = 0) -> list[Arrival]:
        """The requests in the order of their arrival; another rate or share leaves their lengths as they are, and
        another run changes the tokens of the prompts alone, which a prefix cache may hold."""
        shapes, moments, kinds, common = (np.random.default_rng([self.seed, i]) for i in range(4))
        prefix, tokens = (
            common.integers(0, vocab, self.shared_prefix).tolist(),
            np.random.default_rng([self.seed, 4, run]),
        )
        prompts = shapes.integers(self.prompt[0], self.prompt[1] + 1, self.requests)
        outputs = shapes.integers(self.output[0], self.output[1] + 1, self.requests)
        sampled = kinds.permutation(self.requests) < round(self.sampled_share * self.requests)
        times = arrival_times(self.requests, self.rate, moments)
        return [
            Arrival(float(at), prefix + tokens.integers(0, vocab, length).tolist(), int(new), bool(drawn))
            for at, length, new, drawn in zip(times, prompts, outputs, sampled, strict=True)
        ]


def arrival_times(count: int, rate: float, rng: np.random.Generator) -> np.ndarray:
    """[count] seconds, the first 0: a Poisson process of `rate` a second, or all 0 where the rate is 0."""
    if not rate:
        return np.zeros(count)
    waits = rng.exponential(1 / rate, count)
    return np.cumsum(waits) - waits[0]


@dataclass
class Timeline:
    """What came back for one request. Moments in seconds of one clock.

    Attributes:
        arrived: when it was due. moments, counts: of every update that brought tokens, and how many.
    """

    arrived: float
    moments: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def add(self, moment: float, tokens: int) -> None:
        """Note an update; one without tokens is none."""
        if tokens:
            self.moments.append(moment)
            self.counts.append(tokens)


def milliseconds(name: str, seconds: np.ndarray) -> dict[str, float | None]:
    """{name}_ms_median and {name}_ms_p99; None where there is nothing."""
    if not len(seconds):
        return {f"{name}_ms_median": None, f"{name}_ms_p99": None}
    median, high = np.quantile(seconds, [0.5, 0.99]) * 1e3
    return {f"{name}_ms_median": float(median), f"{name}_ms_p99": float(high)}


def waits(timelines: Sequence[Timeline]) -> tuple[np.ndarray, np.ndarray]:
    """Between two updates of a request, all requests pooled: seconds [N], and the same per token [sum of tokens].

    An update of n tokens after t seconds counts as one wait of t, and as n tokens that took t / n each.
    """
    gaps = np.array([after - before for line in timelines for before, after in pairwise(line.moments)])
    counts = np.array([count for line in timelines for count in line.counts[1:]], np.int64)
    return gaps, np.repeat(gaps / np.maximum(counts, 1), counts)


def between_updates(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Time between two updates of a request and the same per token, and the tokens an update brings."""
    by_update, by_token = waits(timelines)
    found: dict[str, Any] = milliseconds("update", by_update) | milliseconds("token", by_token)
    return found | {"updates": len(by_update), "tokens_an_update": len(by_token) / max(len(by_update), 1)}


def until_first_token(timelines: Sequence[Timeline]) -> dict[str, float | None]:
    """Time to first token, from the moment a request was due."""
    return milliseconds("first_token", np.array([line.moments[0] - line.arrived for line in timelines if line.moments]))
