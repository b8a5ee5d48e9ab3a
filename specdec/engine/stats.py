"""EngineStats: counters of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made.

    Attributes:
        rounds: launched verifications.
        host_to_device, device_to_host: copies. preemptions: requests that lost their row.
        prefix_query_tokens: prompt tokens of requests that looked into the prefix cache.
        prefix_hit_tokens: the part of them in pages that were found. cached_tokens: the part that was not computed
            again: a request that drafts recomputes its last found page, in a page of its own.
    """

    rounds: int = 0
    host_to_device: int = 0
    device_to_host: int = 0
    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    cached_tokens: int = 0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of prompt tokens that were found in the prefix cache; NaN where none was looked for."""
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else float("nan")


class Counters:
    """Mutable counters behind `EngineStats`, with its names. Any thread may read `stats`, a snapshot.

    transfers: host-to-device copies of the executor, over its life, when the last round was counted.

    Only the thread that runs a round counts. A snapshot taken meanwhile may have part of that round's counts; no count
    ever decreases.
    """

    def __init__(self, transfers: int = 0) -> None:
        """transfers: copies that the executor has made before, which are not counted."""
        self.rounds = self.host_to_device = self.device_to_host = self.preemptions = 0
        self.transfers = transfers
        self._prefix = (0, 0, 0)

    @property
    def stats(self) -> EngineStats:
        """A snapshot of the counters."""
        counts = self.rounds, self.host_to_device, self.device_to_host, self.preemptions
        return EngineStats(*counts, *self._prefix)

    def add_prefix(self, prompt: int, found: int, taken: int) -> None:
        """A request that searched the prefix cache: tokens of its prompt, found tokens, tokens not computed again."""
        prompts, hits, cached = self._prefix
        self._prefix = prompts + prompt, hits + found, cached + taken
