"""Transport between processes, on one host or several, by plain TCP: simple and slow, and needs no package.

The engine that holds pages answers on a thread of its own. A request is one line of JSON, {"lease", "segments":
[[region, offset, length], …], "blocks": {group: [page, …]}}; the answer a line {"bytes": n} or {"error": text}, then
the segments' bytes in order. {"done": lease} ends a lease. Only blocks of the given lease are sent; anybody who knows
a lease (128 random bits) may read them. Nothing is encrypted, so it listens on 127.0.0.1 by default.
"""

from __future__ import annotations

import json
import socket
import socketserver
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from attention.errors import InvalidInputError, TransferError, TransferTimeoutError
from attention.threads import start_thread
from attention.transport.region_tables import Bounds, CopyRange, JsonObject
from attention.transport.transports import Granting, ReadPlan, put, synchronize

_LONGEST_LINE = 2**24
_LAST_PORT = 2**16 - 1
_IDLE = 60.0
"""Seconds of silence after which the server closes a connection."""


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True  # a restarted engine may bind its port while old connections are in TIME_WAIT
    daemon_threads = True  # a peer that hangs must not keep this process alive
    transport: SocketTransport


class _Handler(socketserver.StreamRequestHandler):
    timeout = _IDLE
    server: _Server

    def handle(self) -> None:
        try:
            if line := self.rfile.readline(_LONGEST_LINE):
                for piece in self.server.transport.answer(json.loads(line)):
                    self.wfile.write(piece)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError):
            return  # a peer that is gone, or is none: its connection ends


class SocketTransport(Granting):
    """A `Transport` over TCP."""

    name = "sockets"

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """host: address to listen on, which peers can reach. port: 0 for any free port.

        Raises:
            InvalidInputError: values of another type, or outside their range.
        """
        if not isinstance(host, str):
            raise InvalidInputError(f"host={host!r}: allowed is a name or address of this host, a string")
        if type(port) is not int or not 0 <= port <= _LAST_PORT:
            raise InvalidInputError(
                f"port={port!r}: allowed is a whole number from 0 (any that is free) to {_LAST_PORT}"
            )
        super().__init__()
        self._place = (host, port)
        self._server: _Server | None = None

    def start(self, engine: str, bounds: Bounds, device: str) -> JsonObject:
        """See `Transport.start`. Raises TransferError: it cannot listen there."""
        self._bounds = bounds
        try:
            server = _Server(self._place, _Handler)
        except OSError as error:
            raise TransferError(f"cannot listen on {self._place[0]}:{self._place[1]}: {error}") from error
        server.transport = self
        # 0.1 s: the server's loop looks for a shutdown this often, so `close` waits no longer than that.
        start_thread(server.serve_forever, 0.1, name="specdec transfer")
        self._server = server
        host, port = server.server_address[:2]
        return {"host": host, "port": port}

    def answer(self, question: JsonObject) -> list[bytes]:
        """The answer to one request of a peer, as pieces of bytes."""
        if "done" in question:
            with self._lock:
                if (lease := str(question["done"])) in self._granted:
                    self._finished.append(lease)
            return []
        with self._lock:  # revoking the lease waits: its pages stay until they are copied
            if error := self._refused(question):
                return [json.dumps({"error": error}).encode() + b"\n"]
            own = (self.piece(question["blocks"], *segment) for segment in question["segments"])
            pieces = [piece.cpu().numpy().tobytes() for piece in own]
        return [json.dumps({"bytes": sum(map(len, pieces))}).encode() + b"\n", *pieces]

    def _refused(self, question: JsonObject) -> str:
        if error := self.refused(str(question["lease"]), question["blocks"]):
            return error
        for place, offset, length in question["segments"]:
            region = self._bounds[place].region if 0 <= place < len(self._bounds) else None
            if region is None or offset < 0 or length < 1 or offset + length > region.block_bytes:
                return f"a segment was asked for that is in no region: {place}, {offset}, {length}"
        if sum(length for _, _, length in question["segments"]) > sum(b.region.block_bytes for b in self._bounds):
            return "more was asked for than there is: every byte can be asked for once"
        return ""

    def read(self, plan: ReadPlan) -> SocketRead:
        return SocketRead(plan, self._bounds)

    def finish(self, plan: ReadPlan) -> None:
        for rank in plan.source.ranks:
            try:
                with _connected(rank.address, time.monotonic() + 1.0) as peer:
                    peer.sendall(json.dumps({"done": plan.lease}).encode() + b"\n")
            except (OSError, TransferError, KeyError, ValueError, TypeError, OverflowError):
                continue  # the source is gone, and with it its pages

    def close(self) -> None:
        server = self._server
        self._server = None
        if server is not None:
            server.shutdown()
            server.server_close()
        super().close()


@dataclass(frozen=True)
class SocketRead:
    """A `Read` over TCP: only the caller of `wait` writes to the local blocks."""

    plan: ReadPlan
    bounds: Bounds
    settled: ClassVar[bool] = True

    def wait(self, deadline: float) -> None:
        """See `Read.wait`.

        Raises:
            TransferError: the peer is gone, refuses, or sends an invalid answer.
            TransferTimeoutError: it sends no more bytes before the deadline.
        """
        for rank in self.plan.source.ranks:
            segments = self.plan.of_rank(rank.rank)
            if not segments:
                continue
            place = f"{rank.address.get('host')}:{rank.address.get('port')}"
            peer_name = f"{place} (engine {self.plan.source.engine})"
            try:
                with _connected(rank.address, deadline) as peer:
                    self._read_rank(peer, segments, deadline)
            except TimeoutError as error:
                raise TransferTimeoutError(
                    f"{peer_name} sent no more bytes before the deadline: it hangs, or the network does"
                ) from error
            except OSError as error:
                raise TransferError(f"{peer_name} is gone: {error}") from error
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                raise TransferError(f"{peer_name} answers what is no answer: {error}") from error
        synchronize(self.bounds)

    def _read_rank(self, peer: socket.socket, segments: Sequence[CopyRange], deadline: float) -> None:
        plan = self.plan
        bounds = self.bounds
        segments = [s for s in segments if plan.local_blocks[bounds[s.local].region.group]]  # a group may have none
        question = {
            "lease": plan.lease,
            "segments": [[s.remote, s.remote_offset, s.length] for s in segments],
            "blocks": dict(plan.remote_blocks),
        }
        peer.sendall(json.dumps(question).encode() + b"\n")
        found = bytearray()
        while not found.endswith(b"\n"):
            found += _exactly(peer, 1, deadline)
            if len(found) > _LONGEST_LINE:
                raise ConnectionResetError("the answer has no end")
        answer = json.loads(bytes(found))
        if "error" in answer:
            raise TransferError(f"engine {plan.source.engine}: {answer['error']}")
        for segment in segments:
            bound = bounds[segment.local]
            numbers = plan.local_blocks[bound.region.group]
            piece = torch.frombuffer(_exactly(peer, segment.length * len(numbers), deadline), dtype=torch.uint8)
            put(bound.bytes, numbers, segment, piece.view(len(numbers), segment.length))


def _connected(address: JsonObject, deadline: float) -> socket.socket:
    """A connection to a rank. Raises TransferError: nothing listens at its address."""
    place = str(address["host"]), int(address["port"])
    try:
        return socket.create_connection(place, timeout=max(deadline - time.monotonic(), 1e-3))
    except TimeoutError:
        raise
    except OSError as error:
        raise TransferError(f"nobody listens on {place[0]}:{place[1]}: {error}") from error


def _exactly(peer: socket.socket, count: int, deadline: float) -> bytearray:
    found = bytearray(count)
    done = 0
    view = memoryview(found)
    while done < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        peer.settimeout(left)
        more = peer.recv_into(view[done:])
        if not more:
            raise ConnectionResetError(f"the connection ended after {done} of {count} bytes")
        done += more
    return found
