"""One rank's end of a transport: its regions, which others read, and the reads that fill its pages."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from typing import Any

from attention.cache.handoff import Bound, RankTable, bind, plan
from attention.transport.nixl_agent import NixlTransport
from attention.transport.sockets import SocketTransport
from attention.transport.transports import LocalTransport, Read, ReadPlan, Transport, synchronize
from specdec.errors import HandoffMismatchError, InvalidInputError, TransferError
from specdec.parallel.ranks import Ranks
from specdec.requests.handoff import Handoff
from specdec.requests.moved import Pages
from specdec.values import short

TRANSPORTS: dict[str, Callable[..., Transport]] = {
    "local": LocalTransport,
    "sockets": SocketTransport,
    "nixl": NixlTransport,
}
_METHODS = ("start", "grant", "revoke", "read", "finish", "finished", "close")


def made(transport: str | Transport, options: Mapping[str, Any]) -> Transport:
    """A transport that is not open: of a name and its options, or the one that was given.

    Raises:
        InvalidInputError: no transport, options that are not its, or values that these cannot have.
    """
    if isinstance(transport, str):
        known = list(inspect.signature(TRANSPORTS[transport]).parameters)
        if unknown := [name for name in options if name not in known]:
            allowed = ", ".join(known) or "none"
            raise InvalidInputError(
                f"{', '.join(unknown)}: no option of transport {transport!r}; allowed are: {allowed}"
            )
        return TRANSPORTS[transport](**options)
    if isinstance(transport, type) or not all(callable(getattr(transport, name, None)) for name in _METHODS):
        raise InvalidInputError(
            f"transport={short(transport)}: allowed are {', '.join(TRANSPORTS)}, and objects with the methods of "
            "`attention.transport.transports.Transport`"
        )
    if options:
        raise InvalidInputError(f"{', '.join(options)}: options belong to a transport's name; give them to the object")
    return transport


class RankEnd:
    """A model's end of a transport on this rank.

    Attributes:
        transport: open. table: what other engines need to know of this rank.
        groups: the cache groups, in the order of an engine's pools.
    """

    def __init__(self, model: Any, transport: Transport, engine: str) -> None:
        """Make the pages of a `SpeculativeModel` readable.

        Args:
            engine: its name, which no other engine has; the same on all of its ranks.

        Raises:
            InvalidInputError: the layers' heads are not divided alike. TransferError: it cannot be opened.
        """
        ranks: Ranks | None = model.ranks
        number = 0 if ranks is None else ranks.rank
        device, part = str(model.device), 0 if ranks is None else _part(ranks)
        bounds: list[Bound] = []
        for runner in model.runners:
            is_head = model.head is not None and runner is model.runners[-1]  # which every rank has all of
            bounds += bind(runner.group.name, runner.group, runner.layers, own_part=0 if is_head else part)
        address = transport.start(engine if number == 0 else f"{engine}-rank-{number}", bounds, device)
        self.transport, self._bounds = transport, tuple(bounds)
        self.groups = [runner.group.name for runner in model.runners]
        self.table = RankTable(number, device, tuple(bound.region for bound in bounds), address)
        self._moving = model.engine.moving
        self._moving.finished, self._moving.revoke, self._moving.grant = (
            transport.finished,
            transport.revoke,
            self._grant,
        )

    def _grant(self, lease: str, pages: Pages) -> None:
        self.transport.grant(lease, dict(zip(self.groups, pages, strict=True)))

    def read_plan(self, handoff: Handoff, pages: Pages) -> ReadPlan:
        """What this rank reads into reserved pages.

        Raises:
            HandoffMismatchError: it cannot move here, see `plan`; or it has more pages there, or fewer.
        """
        here = dict(zip(self.groups, pages, strict=True))
        for group, own in here.items():
            if len(own) != len(handoff.blocks[group]):
                raise HandoffMismatchError(
                    f"cache group {group}: {len(handoff.blocks[group])} pages there and {len(own)} here for a "
                    "request of the same length"
                )
        segments = plan(self.table, handoff.source.ranks)
        return ReadPlan(handoff.source, handoff.lease, self.table, segments, handoff.blocks, here)

    def read(self, own: ReadPlan) -> Read:
        """Start a read. Raises TransferError: the source cannot be reached."""
        synchronize([bound.bytes for bound in self._bounds[:1]])  # rounds in vain write to pages that were free
        return _InTime(self.transport.read(own))

    def close(self) -> None:
        """Stop serving and reading. Idempotent."""
        self.transport.close()


class _InTime:
    """A read that failed unless it was done before its deadline: after that the source may use its pages again."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def wait(self, deadline: float) -> None:
        """See `Read.wait`. Raises TransferError: the deadline passed meanwhile."""
        self._read.wait(deadline)
        if time.monotonic() > deadline:
            raise TransferError("the lease of the request ended while its pages were read")

    @property
    def settled(self) -> bool:
        """See `Read.settled`."""
        return self._read.settled


def _part(ranks: Ranks) -> int:
    """Which part of a layer's KV heads this rank holds."""
    kinds = ranks.part.kv_copies if ranks.part is not None else frozenset({ranks.size})
    if len(kinds) > 1:
        raise InvalidInputError(
            f"of this model's layers some have their key-value heads divided among {ranks.size} ranks otherwise than "
            "others; its requests cannot move: load it with tensor_parallel_size=1"
        )
    return ranks.rank // next(iter(kinds), ranks.size)


def options_of_rank(options: dict[str, Any], rank: int) -> dict[str, Any]:
    """Of a transport: rank r listens on the r-th port after the one that was asked for."""
    port = options.get("port")
    return {**options, "port": port + rank} if isinstance(port, int) and port else options
