"""Transport over NIXL (extra `[transfer]`): one-sided READs of a source's pages, by RDMA, NVLink, shared memory or TCP.

NIXL leaves the following to its caller, each observed in 1.5.1:

- A READ has no timeout: with a peer that hangs its state stays "PROC". So every read here has a deadline.
- A released read may go on writing for any time. So a late read is *not* released: its state is polled, and its blocks
  are not used before it is done or has certainly failed (`settled`).
- A dead peer is an error in 0.1-0.3 s, with part of the data written: blocks are garbage unless the read is done.
- A source that frees memory during a TCP read crashes. So pages are held until the reader reports that it is done, or
  its lease is over by more than the reader's clock may differ.
- The agent's own exchange (listener, serialised descriptors) has no authentication, and unpickles. Neither is used:
  agents are added from the region table, which is JSON.
"""

from __future__ import annotations

import base64
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attention.errors import InvalidInputError, TransferError, TransferTimeoutError, named_error
from attention.transport.region_tables import Bounds, Descriptors, JsonObject, RankTable, Segments
from attention.transport.transports import Blocks, ReadPlan, synchronize

_PROMPTLY = 2e-4
"""Seconds between two polls of a read, at first; later a tenth of the time since it began."""

_late_for_good: list[NixlRead] = []
"""Reads that had not ended when their engine was closed; they keep the memory alive that they may still write to."""


@dataclass(frozen=True)
class _Peer:
    """A rank of a source that was added: its agent's name, and the prepared lists of both sides in one order."""

    agent: str
    segments: Segments
    local: Descriptors
    remote: Descriptors
    local_list: Any
    remote_list: Any


def nixl_module() -> Any:
    """NIXL's Python interface. Raises InvalidInputError where it is not installed."""
    try:
        import nixl._api as api
    except ImportError as error:
        raise InvalidInputError(
            f"NIXL is not installed ({error}): pip install 'specdec-hf[transfer]', or use the transport \"sockets\""
        ) from error
    return api


_Errors = tuple[type[Exception], ...]


class NixlTransport:
    """A `Transport` over one NIXL agent.

    lock: held while the agent is called. errors: those that NIXL raises.
    """

    name = "nixl"

    def __init__(self, backends: Sequence[str] = ("UCX",)) -> None:
        """Raises InvalidInputError where NIXL is not installed, or backends are no list of names."""
        if isinstance(backends, str) or not all(isinstance(each, str) for each in backends):
            raise InvalidInputError(f'backends={backends!r}: allowed is a list of names, as ["UCX"]')
        self._api = nixl_module()
        self._backends = list(backends)
        self._agent: Any = None
        self._memory = "DRAM"
        self._registered: Any = None
        self._bounds: Bounds = ()
        self._peers: dict[tuple[str, int], _Peer] = {}
        self._late: list[NixlRead] = []
        self.lock = threading.RLock()
        # All exceptions of NIXL's bindings module, because they have no common base class.
        bindings = sys.modules[self._api.nixl_agent.__module__].nixlBind
        self.errors = tuple(v for v in vars(bindings).values() if isinstance(v, type) and issubclass(v, Exception))

    def start(self, engine: str, bounds: Bounds, device: str) -> JsonObject:
        """See `Transport.start`. Raises TransferError: no agent can be made, or it cannot register the memory."""
        self._bounds = bounds
        self._memory = "DRAM" if device == "cpu" else "VRAM"
        number = int(device.partition(":")[2] or 0)
        errors: _Errors = (*self.errors, RuntimeError)
        try:
            self._agent = self._api.nixl_agent(engine, self._api.nixl_agent_config(backends=self._backends))
            regions = [bound.region for bound in bounds]  # each without the gap after its last block
            whole = [(r.base, (r.num_blocks - 1) * r.block_stride + r.block_bytes, number, "") for r in regions]
            self._registered = self._agent.register_memory(whole, self._memory) if whole else None
            metadata = self._agent.get_agent_metadata()
        except errors as error:
            raise TransferError(f"NIXL cannot serve this engine over {self._backends}: {error}") from error
        return {"agent": engine, "metadata": base64.b64encode(metadata).decode()}

    def grant(self, lease: str, blocks: Blocks) -> None:
        """See `Transport.grant`: all memory is registered, so a reader with the table can read all of it."""

    def revoke(self, lease: str) -> None:
        """See `Transport.revoke`: NIXL cannot revoke; the reader's deadline ends before the lease does."""

    def read(self, plan: ReadPlan) -> NixlRead:
        with self.lock:
            self._late = [read for read in self._late if not read.settled]
            handles = []
            failed: Exception | None = None
            # The three builtins: a malformed table of the peer (no "metadata", invalid base64, other types).
            errors: _Errors = (*self.errors, KeyError, ValueError, TypeError)
            try:
                for rank in plan.source.ranks:
                    if segments := plan.of_rank(rank.rank):
                        peer = self._peer(plan, rank, segments)
                        ours = peer.local.index(plan.local_blocks)
                        theirs = peer.remote.index(plan.remote_blocks)
                        lists = (peer.local_list, ours, peer.remote_list, theirs)
                        handles.append(self._agent.make_prepped_xfer("READ", *lists))
                        self._agent.transfer(handles[-1])
            except errors as error:
                self.failed(plan.source.engine)
                failed = error  # other ranks may be writing already: raised once none is
            return NixlRead(self, self._agent, handles, plan, self._bounds, failed)

    def _peer(self, plan: ReadPlan, rank: RankTable, segments: Segments) -> _Peer:
        key = (plan.source.engine, rank.rank)
        known = self._peers.get(key)
        if known is not None:
            if known.segments == segments:
                return known
            self.failed(plan.source.engine)
        agent = self._agent.add_remote_agent(base64.b64decode(rank.address["metadata"]))
        agent = agent.decode() if isinstance(agent, bytes) else agent
        local = Descriptors(segments, plan.local, True)
        remote = Descriptors(segments, rank, False)
        theirs = "DRAM" if rank.device == "cpu" else "VRAM"
        local_list = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", local.rows(), self._memory)
        remote_list = self._agent.prep_xfer_dlist(agent, remote.rows(), theirs)
        self._peers[key] = _Peer(agent, segments, local, remote, local_list, remote_list)
        return self._peers[key]

    def late(self, read: NixlRead) -> None:
        """Keep a read that missed its deadline: dropping its handle would release it."""
        with self.lock:
            self._late.append(read)

    def failed(self, engine: str) -> None:
        """Remove the agents of a source that is gone; the same engine never comes back."""
        with self.lock:
            for key in [key for key in self._peers if key[0] == engine]:
                peer = self._peers.pop(key)
                try:
                    self._agent.remove_remote_agent(peer.agent)
                except self.errors:
                    continue  # it is gone already

    def finish(self, plan: ReadPlan) -> None:
        with self.lock:
            for rank in plan.source.ranks:
                peer = self._peers.get((plan.source.engine, rank.rank))
                try:
                    if peer is not None:
                        self._agent.send_notif(peer.agent, plan.lease.encode())
                except self.errors:
                    continue  # the source is gone, and with it its pages

    def finished(self) -> list[str]:
        with self.lock:
            if self._agent is None:
                return []
            notes = self._agent.get_new_notifs()
        return [note.decode(errors="replace") for own in notes.values() for note in own]

    def close(self) -> None:
        """See `Transport.close`. A late read keeps the agent, and the memory it may write to, for good."""
        with self.lock:
            agent = self._agent
            self._agent = None
            if agent is None:
                return
            late = [read for read in self._late if not read.settled]
            _late_for_good.extend(late)
            self._peers.clear()
            if self._registered is not None and not late:
                agent.deregister_memory(self._registered)
            self._registered = None
            self._bounds = ()


@dataclass(eq=False)
class NixlRead:
    """A `Read`: one READ of each rank of the source, those of `handles` not ended. error: why it failed."""

    transport: NixlTransport
    agent: Any
    handles: list[Any]
    plan: ReadPlan
    bounds: Bounds
    error: Exception | None

    def wait(self, deadline: float) -> None:
        """See `Read.wait`.

        Raises:
            TransferError: the peer is gone.
            TransferTimeoutError: its bytes have not come before the deadline.
        """
        started = time.monotonic()
        while not self.settled:
            now = time.monotonic()
            if now >= deadline:
                self.transport.late(self)
                raise TransferTimeoutError(
                    f"engine {self.plan.source.engine} sent {self.plan.num_bytes:,} bytes not before the deadline "
                    f"({now - started:.1f} s after the read began): it hangs, or the network does"
                )
            time.sleep(min(max(_PROMPTLY, (now - started) / 10), deadline - now))
        if self.error is not None:
            raise TransferError(f"engine {self.plan.source.engine} is gone: {named_error(self.error)}") from self.error
        synchronize(self.bounds)

    @property
    def settled(self) -> bool:
        with self.transport.lock:
            self.handles = [handle for handle in self.handles if not self._ended(handle)]
            return not self.handles

    def _ended(self, handle: Any) -> bool:
        try:
            state = self.agent.check_xfer_state(handle)
        except self.transport.errors as error:
            self.error = error
            self.transport.failed(self.plan.source.engine)
            return True
        if state == "ERR":
            self.error = TransferError("NIXL says ERR")
            self.transport.failed(self.plan.source.engine)
        if state in ("DONE", "ERR"):
            handle.release()
            return True
        return False
