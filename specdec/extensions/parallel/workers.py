"""The processes of ranks 1 … N-1, as rank 0 starts them, sends to them, watches them and ends them.

A process has one set of them, however many tensor-parallel models are open: torch has one default group. Calls go one
way, over a socket pair with each; back come messages that it has loaded, answers about moved requests, and errors.
A thread notices a process that ends: the next call raises RanksLostError, and what waits for it on the device is
aborted. They run `python -m specdec.extensions.parallel.worker`, import nothing of the user's program, have their own
session (Ctrl-C reaches rank 0 alone), and end when their socket does.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from attention.threads import after_fork, start_thread
from specdec.errors import InvalidInputError, ModelLoadError, RanksLostError
from specdec.extensions.parallel.collectives import Collectives, leave_group
from specdec.extensions.parallel.messages import Close, Key, RankChannel, Reply
from specdec.extensions.parallel.processes import Process, start

_GRACE = 2.0
"""Seconds for a process to end by itself."""
_PATIENCE = 3.0
"""Seconds in which a load that failed on another rank also fails on rank 0, if it fails there at all."""
_LAST_WORDS = 2.0
"""Seconds within which a failing process reports its error, once something failed here because of it."""
_AGAIN = "; the model cannot be used any more: load it again"
_open: Workers | None = None
starting = threading.RLock()
"""Held by a thread that starts them, until they have met."""


class Workers:
    """The processes of ranks 1 … N-1, shared by the models of this process.

    Attributes:
        size: N. folder: for the processes' files, removed at the end. processes: by rank.
        lock: held while all ranks do something: models take turns. changed: for what threads note that listen to them.
        load: which load this process is in; None outside of one.
        collectives: exchanges between them and this process, once they have met.
    """

    collectives: Collectives | None = None

    def __init__(self, size: int) -> None:
        """Start them; `wait_answers` with STARTED waits until they receive messages.

        Raises:
            ModelLoadError: the system starts no more processes.
        """
        self.size = size
        # Re-entrant: the garbage collector may abort a request of another model inside a call that holds it.
        self.lock = threading.RLock()
        self.folder = tempfile.mkdtemp(prefix="specdec-")  # of this user alone, mode 0700
        self.processes: list[Process] = []
        self.changed = threading.Condition()
        self.load: object = None
        self._broken: str | None = None
        self._closing = False
        self._numbers = set[int]()
        self._next = 0
        self._closed = deque[int]()
        self._unsent = deque[Any]()
        self._sending = False
        self._owner = os.getpid()
        try:
            for rank in range(1, size):
                self.processes.append(start(rank, self.folder))
        except BaseException as error:  # none of them stays, and no folder
            self._end_processes()
            if isinstance(error, OSError):
                raise ModelLoadError(f"a rank did not start: rank {len(self.processes) + 1}: {error}") from error
            raise
        for process in self.processes:
            start_thread(self._listen, process, name="rank")

    @contextmanager
    def loading(self) -> Iterator[None]:
        """While all ranks load: a process that fails is ended after a while, if rank 0 waits for it."""
        self.load = object()
        try:
            yield
        finally:
            with self.changed:
                self.load = None
                self.changed.notify_all()

    def new_link(self) -> WorkersChannel:
        """A link for one more model."""
        link = WorkersChannel(self, self._next)
        self._numbers.add(link.number)
        self._next += 1
        return link

    def send(self, message: Any) -> None:
        """Send to all of them. Raises RanksLostError when one is gone."""
        self.check()
        while self._closed:
            self._send((self._closed.popleft(), Close()))
        self._send(message)

    def _send(self, message: Any) -> None:
        """Send in turn: the garbage collector may call this in the middle of a message, to abort a request."""
        self._unsent.append(message)
        if self._sending:
            return
        self._sending = True
        try:
            while self._unsent:
                self._write(self._unsent.popleft())
        finally:
            self._sending = False

    def _write(self, message: Any) -> None:
        for process in self.processes:
            try:
                process.connection.send(message)
            except (OSError, ValueError) as error:
                raise self.give_up(self.found_loss() or f"the connection to {process} failed ({error})") from error

    def check(self) -> None:
        """Raises RanksLostError once a process is lost, or the ranks are not in step any more."""
        if self._broken is not None:
            raise RanksLostError(self._broken + _AGAIN)
        if os.getpid() != self._owner:
            raise RanksLostError(
                "this process is a fork of the one that loaded the model, whose ranks it does not have"
            )
        if self.is_lost:
            raise RanksLostError(f"{self.found_loss()}{_AGAIN}")

    @property
    def is_lost(self) -> bool:
        """Whether `check` raises."""
        return self._broken is not None or any(process.lost is not None for process in self.processes)

    def give_up(self, reason: str) -> RanksLostError:
        """End the processes; from now on `check` raises the returned RanksLostError, which has the first reason."""
        if self._broken is None:
            self._broken = reason
        self.end()
        return RanksLostError(self._broken + _AGAIN)

    def answers(self, key: Key) -> dict[int, Reply]:
        """The processes' answers with this key, by rank."""
        with self.changed:
            return {each.rank: each.answers[key] for each in self.processes if key in each.answers}

    def wait_answers(self, key: Key, deadline: float = math.inf) -> dict[int, Reply]:
        """The answers once all have come, or at the deadline (`time.monotonic` seconds).

        Raises:
            RanksLostError: a rank fails or is lost before.
        """
        with self.changed:
            while any(key not in each.answers for each in self.processes) and time.monotonic() < deadline:
                self.check()
                if any(each.failed is not None for each in self.processes):
                    raise RanksLostError(f"{self.found_failure()}{_AGAIN}")
                self.changed.wait(min(max(deadline - time.monotonic(), 0), 0.5))
            return self.answers(key)

    def forget_answers(self, key: Key) -> None:
        """Drop answers that were read."""
        with self.changed:
            for each in self.processes:
                each.answers.pop(key, None)

    def found_loss(self) -> str | None:
        """Why something just failed here: which rank is lost and how, if any; waits for its error."""
        found = self._origin(lambda process: process.lost is not None)
        return None if found is None else f"{found} is lost: {found.lost}"

    def same_failures(self, kind: str) -> bool:
        """Whether a load fails on every other rank, too, with an error of this class. Waits briefly."""
        processes = self.processes

        def another() -> bool:
            return any(each.lost is not None or (each.failed and each.failed.kind != kind) for each in processes)

        with self.changed:
            self.changed.wait_for(lambda: another() or all(each.failed for each in processes), _LAST_WORDS)
            if another() or not all(each.failed for each in processes):
                return False
            for process in processes:
                process.failed = None
            return True

    def found_failure(self) -> str | None:
        """Which rank reported that a load failed, and its error; waits briefly."""
        found = self._origin(lambda process: process.failed is not None or process.lost is not None)
        return None if found is None else f"{found}: {found.failed or found.lost}"

    def close_link(self, number: int) -> None:
        """Forget one model; without any the processes end. Idempotent.

        The garbage collector may call it in the middle of a message to another model: it is sent before the next one.
        """
        if number not in self._numbers:
            return
        self._numbers.discard(number)
        self._closed.append(number)
        if not self._numbers:
            self.end()

    def end(self) -> None:
        """End the processes, and leave the group. Idempotent; nothing in a forked copy of their parent."""
        global _open
        if os.getpid() != self._owner:
            return
        self._broken = self._broken or "the model is closed"
        self._end_processes()
        if _open is self:
            _open = None
            leave_group() if self.collectives is None else self.collectives.leave()

    def _origin(self, failed: Callable[[Process], bool]) -> Process | None:
        """A process for which `failed` is true and that did not fail because another was lost; waits briefly for it.
        Without one, a process that did."""

        def origins() -> list[Process]:
            return [each for each in self.processes if failed(each) and not each.follows]

        with self.changed:
            self.changed.wait_for(origins, _LAST_WORDS)
            return next(iter([*origins(), *filter(failed, self.processes)]), None)

    def _listen(self, process: Process) -> None:
        """Note the messages of one process until it ends. Runs on a thread."""
        with suppress(EOFError, OSError):
            while True:
                message = process.connection.recv()
                with self.changed:
                    if isinstance(message, Reply):
                        process.answers[message.key] = message
                    else:
                        process.failed = message
                        start_thread(self.end_waiting, process, self.load)
                    self.changed.notify_all()
        code = process.process.wait()
        with self.changed:
            if not self._closing:
                process.lost = process.ending(code)
            self.changed.notify_all()
        if process.lost is not None and self.collectives is not None:
            self.collectives.abort()  # calls that wait for the lost process fail

    def end_waiting(self, process: Process, load: object) -> None:
        """End a process whose load failed if rank 0 is, after a while, still in that load (see `load`) and waits."""
        with self.changed:
            if not self.changed.wait_for(lambda: load is None or self.load is not load, _PATIENCE):
                process.process.kill()

    def _end_processes(self) -> None:
        """End all processes by closing their sockets, and remove their folder. Idempotent."""
        self._closing = True
        for process in self.processes:
            with suppress(OSError):  # the other end may be closed already
                process.line.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _GRACE
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.process.wait(max(deadline - time.monotonic(), 0))
            if process.process.poll() is None:
                process.process.kill()
                process.process.wait()
            process.line.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class WorkersChannel(RankChannel):
    """A `RankChannel` from one model to the other ranks. Closed with the model, or when it is garbage."""

    def __init__(self, workers: Workers, number: int) -> None:
        """number: the model's number, the same on every rank."""
        self.workers = workers
        self.number = number
        self._close = weakref.finalize(self, workers.close_link, number)
        self._close.atexit = False  # `_end_at_exit` ends all processes then

    def send(self, message: Any) -> None:
        """Send to all. Raises RanksLostError when one is gone."""
        self.workers.send((self.number, message))

    def told(self, message: Any) -> Any:
        self.send(message)
        return message

    def check(self) -> None:
        self.workers.check()

    @property
    def is_lost(self) -> bool:
        return self.workers.is_lost

    def close(self) -> None:
        """Idempotent."""
        self._close()


def open_workers(size: int) -> tuple[Workers, bool]:
    """The processes of this process's models, started unless they run; and whether they were started now.

    Raises:
        InvalidInputError: models with another number of ranks are open. ModelLoadError: see `Workers`.
    """
    global _open
    if _open is not None and are_open() and _open.is_lost:
        _open.end()
    if _open is not None and are_open():
        if _open.size == size:
            return _open, False
        raise InvalidInputError(
            f"tensor_parallel_size={size}: models with tensor_parallel_size={_open.size} are open in this process; "
            "close them first, or give the same size"
        )
    _open = Workers(size)
    return _open, True


def are_open() -> bool:
    """Whether this process has started ranks that run."""
    return _open is not None and _open._owner == os.getpid()


def is_fork() -> bool:
    """Whether this process is a fork of a process that has started ranks."""
    return _open is not None and _open._owner != os.getpid()


@after_fork
def _keep_group() -> None:
    """In a fork: keep the group alive at exit, because ending it would wait for threads that were not forked.

    Locks that those threads may have held are replaced, so that calls raise that the ranks are missing here.
    """
    if is_fork():
        assert _open is not None
        _open.lock = threading.RLock()
        _open.changed = threading.Condition()
        for group in dist.distributed_c10d._world.pg_map:
            # A reference that is never released: the group's destructor must not run, even at the interpreter's end.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


@atexit.register
def _end_at_exit() -> None:
    if _open is not None:
        _open.end()
