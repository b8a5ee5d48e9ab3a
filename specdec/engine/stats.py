"""What an engine has done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made.

    Attributes:
        rounds: launched verifications.
        host_to_device, device_to_host: copies. preemptions: requests that lost their row.
        prefix_query_tokens: prompt tokens of requests that looked into the prefix cache.
        prefix_hit_tokens: those of them in pages that were found. cached_tokens: those that were not read again: a
            request that drafts reads the last page that it found again, into a page of its own.
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
    """Counts. Any thread may read `stats`: a snapshot, made when it is asked for.

    Rounds are counted by the one thread that runs them. A snapshot taken meanwhile may have part of the last round's
    counts; none ever goes back.
    """

    def __init__(self, transfers: int = 0) -> None:
        """transfers: see `start_transfers`."""
        self._rounds = self._host_to_device = self._device_to_host = self._preemptions = 0
        self._transfers = transfers
        self._prefix = (0, 0, 0)

    @property
    def stats(self) -> EngineStats:
        """What was counted so far."""
        counts = self._rounds, self._host_to_device, self._device_to_host, self._preemptions
        return EngineStats(*counts, *self._prefix)

    def add_read(self) -> None:
        """A round's device-to-host read."""
        self._device_to_host += 1

    def add_preemptions(self, count: int) -> None:
        """Requests that lost their row."""
        self._preemptions += count

    def add_prefix(self, prompt: int, found: int, taken: int) -> None:
        """A request that looked into the prefix cache: tokens of its prompt, found ones, and those not read again."""
        prompts, hits, cached = self._prefix
        self._prefix = prompts + prompt, hits + found, cached + taken

    def start_transfers(self, transfers: int) -> None:
        """transfers: host-to-device copies that the executor has made so far, which do not count."""
        self._transfers = transfers

    def add_round(self, transfers: int) -> None:
        """A launched round. transfers: the executor's host-to-device copies so far, of all rounds."""
        self._rounds += 1
        self._host_to_device += transfers - self._transfers
        self._transfers = transfers
