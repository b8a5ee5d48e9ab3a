"""Messages from rank 0 to the other ranks, and the few that come back: plain dataclasses, pickled.

Each goes with the number of the model that it is for. The connection is a socket pair between a process and its own
child, so no other process can write to it: unpickling its messages is safe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from specdec.values import IdSequence


@dataclass(frozen=True)
class Join:
    """Join the group, by a file that all ranks know. device: "cpu" or "cuda"."""

    size: int
    device: str
    rendezvous: str


@dataclass(frozen=True)
class Load:
    """Load a model. target, draft, options: see `SpeculativeModel.from_pretrained`.

    text_ids: token ids of the head's self-test.
    """

    target: str
    draft: str | None
    options: Any
    text_ids: IdSequence


@dataclass(frozen=True)
class CallMethod:
    """Call a method of one of the model's objects with these arguments.

    of: its engine, the engine's moving requests (`FollowingRequests`), or its `FollowedTransfers`.
    """

    of: Literal["engine", "guests", "transfers"]
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Launching:
    """Rank 0 launches a round with this schedule digest, within a step."""

    digest: int


@dataclass(frozen=True)
class Close:
    """Close the model."""


Key = tuple[Literal["started", "loaded", "opened", "fetched"], int, int]
"""What was done, the number of the model, and that of the call where a model has several."""
STARTED: Key = ("started", 0, 0)
"""The process runs, and everything could be imported."""


@dataclass(frozen=True)
class Reply:
    """To rank 0: something was done, or failed. A later one with the same key replaces it.

    table: of "opened", this rank's `RankTable`. error: why it failed, "" where it did not. late: whether that is a
    `TransferTimeoutError`. settled: whether nothing can be written to the pages of "fetched" any more.
    """

    key: Key
    table: Any = None
    error: str = ""
    late: bool = False
    settled: bool = True


@dataclass(frozen=True)
class Failed:
    """To rank 0: a load failed, or the process ends with this error, of class `kind`.

    follows: whether it came from another rank that was lost before.
    """

    kind: str
    text: str
    follows: bool = False

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class RankChannel:
    """The connection of one model between rank 0 and the other ranks; these never lose it, since they end first."""

    @property
    def is_lost(self) -> bool:
        """On rank 0: whether `check` raises."""
        return False

    def told(self, message: Any) -> Any:
        """On rank 0: send this message to all others. On another rank: receive the next one. Returns rank 0's message.

        Raises:
            RanksLostError: a rank is lost.
        """
        raise NotImplementedError

    def check(self) -> None:
        """On rank 0: raises RanksLostError once a rank is lost."""

    def close(self) -> None:
        """On rank 0: let the other ranks close the model. Idempotent."""
