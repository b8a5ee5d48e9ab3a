"""The process of another rank: starting it, listening to it, ending it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from specdec.extensions.parallel.messages import Done, Failed, Reply, Started

_GRACE = 2.0
"""Seconds for a process to end by itself."""
_PATIENCE = 3.0
"""Seconds in which a load that failed on another rank also fails on rank 0, if it fails there at all."""


@dataclass
class Process:
    """One process of another rank, and its messages; `lost`: why it is lost, or None.

    Attributes:
        line: the socket of `connection`. loaded: numbers of the models it has loaded.
        failed: its message about a load or a round that failed. answers: its answers to requests, by key.
    """

    rank: int
    process: subprocess.Popen[bytes]
    line: socket.socket
    connection: Connection
    started: bool = False
    loaded: set[int] = field(default_factory=set)
    failed: Failed | None = None
    lost: str | None = None
    answers: dict[tuple[str, int, int], Reply] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process.pid})"

    @property
    def follows(self) -> bool:
        """Whether it failed because another rank was lost."""
        return self.failed is not None and self.failed.follows


@dataclass
class Watched:
    """All processes, and what the threads that listen to them change.

    Attributes:
        loading: which load this process is in; None outside of one. abort: called when a process is lost.
    """

    processes: list[Process]
    changed: threading.Condition = field(default_factory=threading.Condition)
    closing: bool = False
    loading: object = None
    abort: Callable[[], None] | None = None

    def listen(self) -> None:
        """Listen to each of them on a thread."""
        for process in self.processes:
            threading.Thread(target=_listen, args=(process, self), name="rank", daemon=True).start()


def start(rank: int, folder: str) -> Process:
    """Start the process of a rank. folder: for files of all ranks."""
    ours, theirs = socket.socketpair()
    with theirs:
        variables = {
            **os.environ,
            # "" in sys.path is the current folder, which the option -P keeps out of the rank's path.
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "LOCAL_RANK": str(rank),
        }
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "specdec.extensions.parallel.worker",
                str(theirs.fileno()),
                str(os.getpid()),
                folder,
            ],
            env=variables,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # Only rank 0 prints; errors of a rank come as messages, and its stderr stays open.
            stdout=subprocess.DEVNULL,
            # So Ctrl-C in a terminal reaches rank 0 alone.
            start_new_session=True,
        )
    # A duplicate: the socket and the Connection each close their descriptor.
    return Process(rank, process, ours, Connection(os.dup(ours.fileno())))


def _listen(process: Process, watched: Watched) -> None:
    """Note the messages of one process until it ends."""
    while True:
        try:
            message = process.connection.recv()
        except (EOFError, OSError):
            break
        with watched.changed:
            process.started |= isinstance(message, Started)
            if isinstance(message, Done):
                process.loaded.add(message.number)
            if isinstance(message, Reply):
                process.answers[message.key] = message
            if isinstance(message, Failed):
                process.failed = message
                threading.Thread(target=end_waiting, args=(process, watched, watched.loading), daemon=True).start()
            watched.changed.notify_all()
    code = process.process.wait()
    with watched.changed:
        if not watched.closing:
            process.lost = _ending(code) if process.failed is None else str(process.failed)
        watched.changed.notify_all()
    if process.lost is not None and watched.abort is not None:
        watched.abort()


def end_waiting(process: Process, watched: Watched, loading: object) -> None:
    """End a process whose load failed if rank 0 is, after a while, still in that load (see `Watched`) and waits."""
    with watched.changed:
        if not watched.changed.wait_for(lambda: loading is None or watched.loading is not loading, _PATIENCE):
            process.process.kill()


def _ending(code: int) -> str:
    """How a process ended.

    >>> _ending(-9), _ending(3)
    ('it was killed by SIGKILL', 'it ended with exit code 3')
    """
    return f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"


def end(watched: Watched) -> None:
    """End all processes by closing their sockets. Idempotent."""
    watched.closing = True
    for process in watched.processes:
        with contextlib.suppress(OSError):  # the other end may be closed already
            process.line.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + _GRACE
    for process in watched.processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.process.wait(max(deadline - time.monotonic(), 0))
        if process.process.poll() is None:
            process.process.kill()
            process.process.wait()
        process.line.close()
