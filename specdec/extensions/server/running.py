"""Server: a service on a socket, with its log, until a signal lets it end."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from specdec.errors import InvalidInputError
from specdec.extensions.server.app import Service
from specdec.extensions.server.request_log import LOG, JsonLines

_LOGGERS = (LOG.name, "uvicorn", "py.warnings")
_TO_SEND = 2
"""Seconds after draining for clients that read slowly."""
_TO_END = 30
"""Seconds after the limit of draining, when the process ends, whatever a thread is busy with."""


def bound(host: str, port: int) -> socket.socket:
    """A socket that is bound, and refuses connections until a server listens.

    Raises:
        InvalidInputError: there is no such address here, or another process has the port.
    """
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        found = socket.socket(family, kind)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        raise InvalidInputError(f"cannot listen at {host}:{port}: {error}; give another --host or --port") from None
    return found


def start_log(form: str, level: str) -> None:
    """Write the log of the server to stderr. form: "plain" or "json", an object a line. level: the least, such as
    "info"."""
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLines() if form == "json" else plain)
    logging.captureWarnings(True)
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper() if name != "uvicorn" or level == "debug" else "WARNING")  # it tells each step


class Server(uvicorn.Server):
    """At the first signal running requests end, within a limit, and new ones get 503; the second one ends at once."""

    def __init__(self, service: Service, app: ASGIApp, socket: socket.socket, proxies: Sequence[str] = ()) -> None:
        """app: of the service. socket: one that is `bound`. proxies: addresses whose X-Forwarded-For header names a
        request's client."""
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            proxy_headers=bool(proxies),
            forwarded_allow_ips=list(proxies),
        )
        super().__init__(config)
        self.service = service
        self.limit = service.settings.drain_seconds
        self.socket = socket
        self.drain_task: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets or [self.socket])
        LOG.info("serving %s at http://%s:%s/v1", self.service.settings.name, *self.socket.getsockname()[:2])

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal. Meanwhile a full garbage collection, which would stop the event loop for 0.3 s, passes
        over what is there: torch, above all; and rounds, which let go of the interpreter at every operator, get it back
        from a thread that reads a long prompt within 1 ms."""
        interval = sys.getswitchinterval()
        gc.freeze()
        sys.setswitchinterval(1e-3)
        super().run(sockets)
        sys.setswitchinterval(interval)
        gc.unfreeze()  # extensions report leaked objects otherwise

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On a signal, in the event loop's thread."""
        if self.drain_task is not None:
            self.should_exit = self.force_exit = True
            return
        if threading.current_thread() is threading.main_thread():  # elsewhere the process is another's
            signal.alarm(math.ceil(self.limit) + _TO_END)
        self.drain_task = asyncio.get_running_loop().create_task(self.drain())

    async def drain(self) -> None:
        """Let running requests end, then stop."""
        self.service.draining = True
        end = time.monotonic() + self.limit
        LOG.info("draining: running requests have %g s", self.limit)
        cancelled = await self.service.model.aclose(self.limit)
        LOG.info("drained: %d completions were cancelled", cancelled)
        self.config.timeout_graceful_shutdown = math.ceil(max(end - time.monotonic(), 0)) + _TO_SEND
        self.should_exit = True
