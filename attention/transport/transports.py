"""What every transport of pages offers, and the one between engines of one process."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from attention.errors import TransferError, TransferTimeoutError
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


_open: weakref.WeakValueDictionary[str, LocalTransport] = weakref.WeakValueDictionary()


class LocalTransport:
    """A `Transport` between engines of this process."""

    name = "local"

    def __init__(self) -> None:
        self._bounds: tuple[Bound, ...] = ()
        self._granted: dict[str, Blocks] = {}
        self._finished: deque[str] = deque()
        self._engine = ""
        self._lock = threading.Lock()

    def start(self, engine: str, bounds: Sequence[Bound], device: str) -> Mapping[str, Any]:
        self._engine, self._bounds = engine, tuple(bounds)
        _open[engine] = self
        return {}

    def grant(self, lease: str, blocks: Blocks) -> None:
        with self._lock:
            self._granted[lease] = blocks

    def revoke(self, lease: str) -> None:
        """See `Transport.revoke`. Waits for a copy that is under way."""
        with self._lock:
            self._granted.pop(lease, None)

    def read(self, plan: ReadPlan) -> LocalRead:
        """See `Transport.read`. Raises TransferError: the engine is not open in this process."""
        source = _open.get(plan.source.engine)
        if source is None:
            raise TransferError(
                f"engine {plan.source.engine} is not open in this process; between processes both models need the "
                'same transport: open_transfer("sockets") or open_transfer("nixl")'
            )
        return LocalRead(source, self._bounds, plan)

    def copy(self, bounds: Sequence[Bound], plan: ReadPlan) -> None:
        """Copy what a plan reads from here into the regions `bounds` of the reader.

        Raises:
            TransferError: the pages are no longer held, or blocks of another lease are asked for.
        """
        with self._lock:
            if plan.lease not in self._granted:
                raise TransferError(f"engine {self._engine} no longer holds the pages of lease {plan.lease}")
            granted = self._granted[plan.lease]
            if any(set(own) - set(granted.get(group, ())) for group, own in plan.remote_blocks.items()):
                raise TransferError(f"blocks were asked for that are not of lease {plan.lease}")
            for segment in plan.segments:
                there, here = self._bounds[segment.remote], bounds[segment.local]
                group = here.region.group
                piece = taken(there.bytes, plan.remote_blocks[group], segment.remote_offset, segment.length)
                put(here.bytes, plan.local_blocks[group], segment, piece)
            synchronize([b.bytes for b in (*bounds[:1], *self._bounds[:1])])

    def finish(self, plan: ReadPlan) -> None:
        source = _open.get(plan.source.engine)
        if source is not None:
            source.note(plan.lease)

    def note(self, lease: str) -> None:
        """A reader is done."""
        self._finished.append(lease)

    def finished(self) -> list[str]:
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def close(self) -> None:
        _open.pop(self._engine, None)
        with self._lock:
            self._bounds, self._granted = (), {}


class LocalRead:
    """A copy; it is made when it is waited for."""

    settled = True

    def __init__(self, source: LocalTransport, bounds: Sequence[Bound], plan: ReadPlan) -> None:
        self._source, self._bounds, self._plan = source, bounds, plan

    def wait(self, deadline: float) -> None:
        """See `Read.wait`. Raises TransferTimeoutError: the deadline was over before it began."""
        if time.monotonic() >= deadline:
            raise TransferTimeoutError("the deadline of a read was over before it began")
        self._source.copy(self._bounds, self._plan)


def taken(blocks: torch.Tensor, numbers: Sequence[int], offset: int, length: int) -> torch.Tensor:
    """[n, length] bytes of some blocks of a region, uint8."""
    index = torch.tensor(list(numbers), dtype=torch.int64, device=blocks.device)
    return _wide(blocks[:, offset : offset + length]).index_select(0, index).view(torch.uint8)


def put(blocks: torch.Tensor, numbers: Sequence[int], segment: Segment, piece: torch.Tensor) -> None:
    """Write [n, length] bytes to their place in some blocks of a local region."""
    index = torch.tensor(list(numbers), dtype=torch.int64, device=blocks.device)
    start = segment.local_offset
    place = _wide(blocks[:, start : start + segment.length])
    place.index_copy_(0, index, piece.to(blocks.device).view(place.dtype))


def _wide(blocks: torch.Tensor) -> torch.Tensor:
    """A view of bytes by the eight where they lie so, which torch copies several times faster; else as they are."""
    lies = (blocks.data_ptr(), blocks.storage_offset(), blocks.stride(0), blocks.shape[1])
    return blocks.view(torch.int64) if not any(n % 8 for n in lies) else blocks


def synchronize(tensors: Sequence[torch.Tensor]) -> None:
    """Wait for what was launched on the tensors' GPUs: other streams read next what was written here."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)
