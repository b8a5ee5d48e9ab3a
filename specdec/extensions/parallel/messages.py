"""Messages from rank 0 to the other ranks, and the few that come back: plain dataclasses, pickled.

Each goes with the number of the model that it is for. The connection is a socket pair between a process and its own
child, so no other process can write to it: unpickling its messages is safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Join:
    """Join the group, by a file that all ranks know. device: "cpu" or "cuda"."""

    rank: int
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
    text_ids: Sequence[int]


@dataclass(frozen=True)
class CallEngine:
    """Call a method of the engine with these arguments, as rank 0 calls its own."""

    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Launching:
    """Rank 0 launches a round with this schedule digest, within a step."""

    digest: int


@dataclass(frozen=True)
class CallMoving:
    """Call a method of `FollowingRequests` with these arguments."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Resume:
    """Call `MovingRequests.resume`. data: a `Handoff` of request and tensors, as bytes. number: the reservation's."""

    data: bytes
    number: int | None


@dataclass(frozen=True)
class OpenTransfer:
    """Let others read this rank's pages by `open_transfer`, under the engine's name and secret. round: which opening of
    this model it is, for the answer `Opened`."""

    transport: str
    options: dict[str, Any]
    engine: str
    secret: bytes
    round: int


@dataclass(frozen=True)
class CloseTransfer:
    """Close the transport."""


@dataclass(frozen=True)
class Fetch:
    """Fill this rank's reserved pages of this number, concurrently with rounds; the answer is `Fetched`.

    deadline: `time.monotonic` seconds, which ranks of one machine share. data: a `Handoff` of source, lease and blocks,
    as bytes.
    """

    number: int
    deadline: float
    data: bytes


@dataclass(frozen=True)
class Close:
    """Close the model."""


@dataclass(frozen=True)
class Started:
    """To rank 0: the process runs, and everything could be imported."""


@dataclass(frozen=True)
class Done:
    """To rank 0: the model of this number is loaded."""

    number: int


Key = tuple[str, int, int]
"""Identifies the request that an answer is for: "Opened" or "Fetched", model, and its number."""


@dataclass(frozen=True)
class Reply:
    """To rank 0: the answer to a request, number `number` to a model. error: why it failed, "" where it did not."""

    model: int
    number: int

    @property
    def key(self) -> Key:
        """Identifies the request."""
        return (type(self).__name__, self.model, self.number)


@dataclass(frozen=True)
class Opened(Reply):
    """The answer to `OpenTransfer`; number: its round. table: this rank's table as JSON; "" if it failed."""

    table: str
    error: str = ""


@dataclass(frozen=True)
class Fetched(Reply):
    """The answer to `Fetch`, and a second one where pages were written to after it.

    error: why it failed, "" if every byte was read. late: whether the error is a `TransferTimeoutError`. settled:
    whether nothing can be written to the pages any more.
    """

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
