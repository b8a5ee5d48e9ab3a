"""The interface of transports, which copy pages of one engine into another's, and the one within a process."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from attention.errors import TransferError, TransferTimeoutError
from attention.transport.region_tables import Bounds, CopyRange, EngineTable, JsonObject, RankTable, Segments

Blocks = Mapping[str, Sequence[int]]
"""Page numbers by cache group, in the order of a request's tokens."""


@dataclass(frozen=True)
class ReadPlan:
    """The reads of one rank for one request: `segments` (see `region_tables.plan`) of the engine `source` into `local`.

    remote_blocks, local_blocks: by group, equally many each; block i is read into block i. lease: of the request there.
    """

    source: EngineTable
    lease: str
    local: RankTable
    segments: Segments
    remote_blocks: Blocks
    local_blocks: Blocks

    def of_rank(self, rank: int) -> Segments:
        """The segments that one rank of the source serves."""
        return tuple(segment for segment in self.segments if segment.rank == rank)

    @property
    def num_bytes(self) -> int:
        """Number of bytes to read."""
        regions = self.local.regions
        return sum(s.length * len(self.local_blocks[regions[s.local].group]) for s in self.segments)


class Read(Protocol):
    """A read that is under way."""

    def wait(self, deadline: float) -> None:
        """Wait until every byte has arrived. deadline: a time on the `time.monotonic` clock, in seconds.

        Raises:
            TransferTimeoutError: the deadline passed first; see `settled`.
            TransferError: the bytes will never be there.
        """

    @property
    def settled(self) -> bool:
        """Whether nothing can write to the local blocks any more. Only then may they be reused."""


class Transport(Protocol):
    """An engine's way to read from others and to be read. Any thread may call it."""

    name: str

    def start(self, engine: str, bounds: Bounds, device: str) -> JsonObject:
        """Make this rank's regions readable. Returns its address, for `RankTable`."""

    def grant(self, lease: str, blocks: Blocks) -> None:
        """Allow readers that know the lease to read these blocks."""

    def revoke(self, lease: str) -> None:
        """Forbid reading again, as far as the transport can. Idempotent."""

    def read(self, plan: ReadPlan) -> Read:
        """Start a read. Raises TransferError: the source cannot be reached."""

    def finish(self, plan: ReadPlan) -> None:
        """Notify the source that the read is done and its pages are free. Errors are ignored because leases expire."""

    def finished(self) -> list[str]:
        """Leases whose readers have finished since the last call."""

    def close(self) -> None:
        """Stop serving and reading. Idempotent."""


# Weak: an engine that is garbage without having been closed is not open.
_open: weakref.WeakValueDictionary[str, LocalTransport] = weakref.WeakValueDictionary()


class Granting:
    """The common part of `Transport`s that copy pages themselves: regions, blocks of leases, and finished leases."""

    def __init__(self) -> None:
        self._bounds: Bounds = ()
        self._granted: dict[str, dict[str, frozenset[int]]] = {}
        self._finished: deque[str] = deque()
        self._lock = threading.Lock()

    def grant(self, lease: str, blocks: Blocks) -> None:
        with self._lock:
            self._granted[lease] = {group: frozenset(own) for group, own in blocks.items()}

    def revoke(self, lease: str) -> None:
        """See `Transport.revoke`. Waits for a copy, or an answer, that is under way."""
        with self._lock:
            self._granted.pop(lease, None)

    def finished(self) -> list[str]:
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def refused(self, lease: str, blocks: Blocks) -> str:
        """Why a reader may not have these blocks, "" if it may. The lock is held until they are copied."""
        granted = self._granted.get(lease)
        if granted is None:
            return f"lease {lease} is over: its pages are no longer held"
        for group, own in blocks.items():
            allowed = granted.get(group, frozenset())
            if len(own) > len(allowed) or not allowed.issuperset(own):
                return f"blocks of group {group} were asked for that are not of lease {lease}"
        return ""

    def piece(self, blocks: Blocks, place: int, offset: int, length: int) -> Tensor:
        """[n, length] uint8, bytes of some blocks of the region at this place."""
        bound = self._bounds[place]
        numbers = blocks[bound.region.group]
        index = torch.tensor(list(numbers), dtype=torch.int64, device=bound.bytes.device)
        return _wide(bound.bytes[:, offset : offset + length]).index_select(0, index).view(torch.uint8)

    def close(self) -> None:
        with self._lock:
            self._bounds = ()
            self._granted = {}


class LocalTransport(Granting):
    """A `Transport` between engines of this process."""

    name = "local"
    _engine = ""

    def start(self, engine: str, bounds: Bounds, device: str) -> JsonObject:
        self._engine = engine
        self._bounds = bounds
        _open[engine] = self
        return {}

    def read(self, plan: ReadPlan) -> LocalRead:
        """See `Transport.read`. Raises TransferError: the engine is not open in this process."""
        source = _open.get(plan.source.engine)
        if source is None:
            raise TransferError(
                f"engine {plan.source.engine} is not open in this process; between processes both models need the "
                'same transport: open_transfer("sockets") or open_transfer("nixl")'
            )
        return LocalRead(source, self._bounds, plan)

    def copy(self, bounds: Bounds, plan: ReadPlan) -> None:
        """Copy a plan's blocks from this engine into the reader's regions `bounds`.

        Raises:
            TransferError: the pages are no longer held, or blocks of another lease are requested.
        """
        with self._lock:
            if error := self.refused(plan.lease, plan.remote_blocks):
                raise TransferError(f"engine {self._engine}: {error}")
            for segment in plan.segments:
                here = bounds[segment.local]
                piece = self.piece(plan.remote_blocks, segment.remote, segment.remote_offset, segment.length)
                put(here.bytes, plan.local_blocks[here.region.group], segment, piece)
            synchronize(bounds)
            synchronize(self._bounds)

    def finish(self, plan: ReadPlan) -> None:
        source = _open.get(plan.source.engine)
        if source is not None:
            source.note(plan.lease)

    def note(self, lease: str) -> None:
        """Note that a reader has finished."""
        self._finished.append(lease)

    def close(self) -> None:
        _open.pop(self._engine, None)
        super().close()


@dataclass(frozen=True)
class LocalRead:
    """A `Read` within the process: `wait` makes the copy."""

    source: LocalTransport
    bounds: Bounds
    plan: ReadPlan
    settled: ClassVar[bool] = True

    def wait(self, deadline: float) -> None:
        """See `Read.wait`. Raises TransferTimeoutError: the deadline was over before it began."""
        if time.monotonic() >= deadline:
            raise TransferTimeoutError("the deadline of a read was over before it began")
        self.source.copy(self.bounds, self.plan)


def put(blocks: Tensor, numbers: Sequence[int], segment: CopyRange, piece: Tensor) -> None:
    """Write [n, length] bytes to their place in some blocks of a local region."""
    index = torch.tensor(numbers, dtype=torch.int64, device=blocks.device)
    start = segment.local_offset
    place = _wide(blocks[:, start : start + segment.length])
    place.index_copy_(0, index, piece.to(blocks.device).view(place.dtype))


def _wide(blocks: Tensor) -> Tensor:
    """A view of bytes as int64 where alignment allows, which torch copies several times faster; else the bytes."""
    lies = (blocks.data_ptr(), blocks.storage_offset(), blocks.stride(0), blocks.shape[1])
    return blocks.view(torch.int64) if not any(n % 8 for n in lies) else blocks


def synchronize(bounds: Bounds) -> None:
    """Synchronise the GPU of a rank's regions, where they are on one, before other streams read the copied data."""
    if bounds and bounds[0].bytes.is_cuda:
        torch.cuda.synchronize(bounds[0].bytes.device)
