"""What an engine has done so far."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made.

    Attributes:
        rounds: launched verifications.
        host_to_device, device_to_host: copies. preemptions: requests that lost their row.
    """

    rounds: int = 0
    host_to_device: int = 0
    device_to_host: int = 0
    preemptions: int = 0


class Counters:
    """Counts. `stats` is replaced, never changed: any thread may read it."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self._transfers = 0

    def add(self, **increments: int) -> None:
        """Add to counters by name."""
        self.stats = replace(self.stats, **{k: getattr(self.stats, k) + n for k, n in increments.items()})

    def start_transfers(self, transfers: int) -> None:
        """transfers: host-to-device copies that the executor has made so far, which do not count."""
        self._transfers = transfers

    def add_round(self, transfers: int) -> None:
        """A launched round. transfers: the executor's host-to-device copies so far, of all rounds."""
        made, self._transfers = transfers - self._transfers, transfers
        self.add(rounds=1, host_to_device=made)
