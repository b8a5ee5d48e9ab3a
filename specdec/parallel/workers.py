"""The processes of ranks 1 … N-1, on the side of rank 0: started, told what to do, watched, and ended with it.

Calls go one way, over a socket pair with each process; nobody answers them. What comes back are a process's first words
(it is loaded) and its last ones. A process that ends unasked is noticed by a thread that reads its socket: the next call
raises RanksLostError, and what waits for the process on the device is aborted.

The processes run `python -m specdec.worker`: nothing of the user's program is imported there. They have a session of
their own, so Ctrl-C in a terminal is rank 0's alone, and they end when their socket does, however rank 0 ended.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from specdec.errors import RanksLostError
from specdec.parallel.messages import Close, Failed, Loaded, Started

_LAST_WORDS = 2.0
"""Seconds in which a process that fails says why, once something failed here because of it."""
_GRACE = 2.0
"""Seconds for a process to end by itself at `close`."""
_AGAIN = "; the model cannot be used any more: load it again"


@dataclass
class Worker:
    """One process: what it said, and why it is lost, or None."""

    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection
    started: bool = False
    loaded: bool = False
    failed: Failed | None = None
    lost: str | None = None


@dataclass
class _Shared:
    """What the reading threads change. They hold no reference to `Workers`, which can become garbage."""

    workers: list[Worker]
    changed: threading.Condition = field(default_factory=threading.Condition)
    closing: bool = False
    abort: Callable[[], None] | None = None


class Workers:
    """The processes of ranks 1 … N-1."""

    def __init__(self, size: int) -> None:
        """Start them; `wait_started` waits until they can be told to load."""
        self.folder = tempfile.mkdtemp(prefix="specdec-")  # of this user alone, mode 0700
        self._broken: str | None = None
        self._shared = _Shared([_start(rank, size) for rank in range(1, size)])
        self._end = weakref.finalize(self, _end, self._shared, self.folder, os.getpid())
        self._end.atexit = False
        _registered.add(self)
        for worker in self._shared.workers:
            threading.Thread(target=_listen, args=(worker, self._shared), name="rank", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """Of the processes, by rank."""
        return [worker.process.pid for worker in self._shared.workers]

    def wait_started(self) -> None:
        """Raises RanksLostError when one ends instead."""
        self._wait(lambda worker: worker.started)

    def wait_loaded(self) -> None:
        """Raises RanksLostError when one fails instead."""
        self._wait(lambda worker: worker.loaded)

    def on_loss(self, abort: Callable[[], None]) -> None:
        """Call `abort`, on another thread, when a process is lost."""
        self._shared.abort = abort

    def send(self, message: Any) -> None:
        """Tell all. Raises RanksLostError when one is gone."""
        self.check()
        for worker in self._shared.workers:
            self.send_to(worker.rank, message)

    def send_to(self, rank: int, message: Any) -> None:
        """Tell one. Raises RanksLostError when it is gone."""
        try:
            self._shared.workers[rank - 1].connection.send(message)
        except (OSError, ValueError) as error:
            raise self.error(f"its connection failed: {error}") from error

    def check(self) -> None:
        """Raises RanksLostError once a process is lost, or the ranks do not stand at the same place any more."""
        if self._broken is not None:
            raise RanksLostError(self._broken)
        for worker in self._shared.workers:
            if worker.lost is not None:
                raise RanksLostError(f"{_words(worker)}{_AGAIN}")

    def give_up(self, reason: str) -> None:
        """End the processes: from now on `check` raises RanksLostError with this reason. The first one stays."""
        if self._broken is None:
            self._broken = f"{reason}{_AGAIN}"
        self._end()

    def error(self, instead: str) -> RanksLostError:
        """Why something just failed here: the last words of a rank, which come shortly, or `instead`."""
        found = self.found_loss()
        return RanksLostError(f"{instead if found is None else found}{_AGAIN}")

    def found_loss(self) -> str | None:
        """Which rank failed and how, if one did; waits for its last words."""
        deadline = time.monotonic() + _LAST_WORDS
        with self._shared.changed:
            while (left := deadline - time.monotonic()) > 0:
                lost = [worker for worker in self._shared.workers if worker.lost is not None]
                if lost:
                    return _words(lost[0])
                self._shared.changed.wait(left)
        return None

    def close(self) -> None:
        """End them. Idempotent."""
        if self._broken is None:
            self._broken = "the model is closed"
        self._end()

    def _wait(self, ready: Callable[[Worker], bool]) -> None:
        with self._shared.changed:
            while not all(map(ready, self._shared.workers)):
                self.check()
                self._shared.changed.wait(0.5)


_registered: weakref.WeakSet[Workers] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for workers in list(_registered):
        workers.close()


def _start(rank: int, size: int) -> Worker:
    ours, theirs = socket.socketpair()
    with theirs:
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "LOCAL_RANK": str(rank),
        }
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "specdec.worker", str(theirs.fileno()), str(os.getpid())],
            env=variables,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    return Worker(rank, process, Connection(ours.detach()))


def _listen(worker: Worker, shared: _Shared) -> None:
    """Read what one process says until it ends."""
    while True:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            break
        with shared.changed:
            worker.started |= isinstance(message, Started)
            worker.loaded |= isinstance(message, Loaded)
            if isinstance(message, Failed):
                worker.failed = message
            shared.changed.notify_all()
    code = worker.process.wait()
    with shared.changed:
        if not shared.closing:
            worker.lost = f"{worker.failed.kind}: {worker.failed.text}" if worker.failed else _ending(code)
        shared.changed.notify_all()
    if worker.lost is not None and shared.abort is not None:
        shared.abort()


def _words(worker: Worker) -> str:
    return f"rank {worker.rank} (process {worker.process.pid}) is lost: {worker.lost}"


def _ending(code: int) -> str:
    """How a process ended.

    >>> _ending(-9), _ending(3)
    ('it was killed by SIGKILL', 'it ended with exit code 3')
    """
    return f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"


def _end(shared: _Shared, folder: str, owner: int) -> None:
    """End all processes of this one; in a forked copy of it they are not its own."""
    if os.getpid() != owner:
        return
    shared.closing = True
    for worker in shared.workers:
        with contextlib.suppress(OSError, ValueError):
            worker.connection.send(Close())
    deadline = time.monotonic() + _GRACE
    for worker in shared.workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(max(deadline - time.monotonic(), 0))
        if worker.process.poll() is None:
            worker.process.kill()
            worker.process.wait()
    shutil.rmtree(folder, ignore_errors=True)


class HeldInterrupt:
    """A with-block that Ctrl-C does not strike: it is raised at the end. All ranks must come to the same place.

    A second Ctrl-C strikes at once. On other threads than the main one, which no Ctrl-C strikes, it does nothing.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._here = threading.current_thread() is threading.main_thread()
        self._held = False

    def __enter__(self) -> HeldInterrupt:
        if self._here:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: Any) -> None:
        if self._held:
            raise KeyboardInterrupt
        self._held = True

    def __exit__(self, *error: object) -> None:
        if not self._here:
            return
        signal.signal(signal.SIGINT, signal.SIG_DFL if self._before is None else self._before)
        if self._held:
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def ended_on_error(workers: Workers) -> Iterator[None]:
    """End the processes when the block raises."""
    try:
        yield
    except BaseException:
        workers.close()
        raise
