"""What every transport offers: the side that holds pages, and the side that reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from attention.transport.region_tables import Bound, EngineTable, RankTable, Segment

Blocks = Mapping[str, Sequence[int]]
"""Page numbers by cache group, in the order of a request's tokens."""


@dataclass(frozen=True)
class ReadPlan:
    """One read of one rank.

    Attributes:
        source: the engine that holds the pages. lease: of the request there.
        local: the reading rank. segments: see `attention.transport.region_tables.plan`.
        remote_blocks, local_blocks: equally many of each group; block i is read into block i.
    """

    source: EngineTable
    lease: str
    local: RankTable
    segments: tuple[Segment, ...]
    remote_blocks: Blocks
    local_blocks: Blocks

    def of_rank(self, rank: int) -> tuple[Segment, ...]:
        """The segments that one rank of the source serves."""
        return tuple(segment for segment in self.segments if segment.rank == rank)

    @property
    def num_bytes(self) -> int:
        """Bytes that are read."""
        regions = self.local.regions
        return sum(s.length * len(self.local_blocks[regions[s.local].group]) for s in self.segments)


class Read(Protocol):
    """A read that was started."""

    def wait(self, deadline: float) -> None:
        """Until every byte is there.

        Args:
            deadline: `time.monotonic` seconds.

        Raises:
            TransferTimeoutError: they are not by then; see `settled`.
            TransferError: they will never be.
        """

    @property
    def settled(self) -> bool:
        """Whether nothing can be written to the local blocks any more. They may be used again only then."""


class Transport(Protocol):
    """One engine's way to others. Any thread may call it."""

    name: str

    def start(self, engine: str, bounds: Sequence[Bound], device: str) -> Mapping[str, Any]:
        """Make this rank's regions readable; its address, for `RankTable`."""

    def grant(self, lease: str, blocks: Blocks) -> None:
        """Let whoever knows the lease read these blocks."""

    def revoke(self, lease: str) -> None:
        """No longer, as far as the transport can prevent it. Idempotent."""

    def read(self, plan: ReadPlan) -> Read:
        """Start a read. Raises TransferError: the source cannot be reached."""

    def finish(self, plan: ReadPlan) -> None:
        """Tell the source that the read is done and its pages may be used again; an error is nobody's: leases end."""

    def finished(self) -> list[str]:
        """Leases of reads from here that are done, each once."""

    def close(self) -> None:
        """Stop serving and reading. Idempotent."""
