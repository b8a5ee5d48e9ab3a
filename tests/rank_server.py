"""Processes of other ranks, forked from one server of this test process: importing transformers again takes 5 s.

`forked_ranks` stands in for `subprocess` in `specdec.parallel.processes`: the same command, environment, socket and
session, but no new interpreter. Tests of what only a new interpreter shows ask for `real_ranks`; where the `long` tests
run, too (`make test-all`), every process is a real one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import pytest

from specdec.parallel import processes

COMMAND = [sys.executable, "-P", "-m", "specdec.worker"]
IMPORTED = ("accelerate", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")
"""What every rank imports when it loads a model, besides `specdec.worker`."""


class Forked:
    """What `specdec.parallel.processes` uses of a `subprocess.Popen`."""

    def __init__(self, status: socket.socket) -> None:
        """status: says the process id, and when the process has ended, how."""
        self._status, self._lock = status, threading.Lock()
        self._code: int | None = None
        self.pid = int(status.recv(64))

    def wait(self, timeout: float | None = None) -> int:
        """As `Popen.wait`."""
        if timeout is None:
            select.select([self._status], [], [])
        elif self._code is None and not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(COMMAND, timeout)
        code = self.poll()
        assert code is not None
        return code

    def poll(self) -> int | None:
        """As `Popen.poll`."""
        with self._lock:  # once the code is there the other end is closed: select finds the socket ready for ever
            if self._code is None and select.select([self._status], [], [], 0)[0]:
                self._code = int(self._status.recv(64) or -signal.SIGKILL)
            return self._code

    def kill(self) -> None:
        """As `Popen.kill`."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def fork(command: Sequence[str], *, env: dict[str, str], pass_fds: Sequence[int], **options: Any) -> Forked:
    """As `subprocess.Popen` of a rank's command."""
    assert list(command[:4]) == COMMAND, command
    devnull = subprocess.DEVNULL
    assert options == {"stdin": devnull, "stdout": devnull, "start_new_session": True}, options
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    (line,) = pass_fds
    with theirs:
        socket.send_fds(server(), [pickle.dumps((command[6], env))], [line, theirs.fileno()])
    return Forked(ours)


@functools.cache
def server() -> socket.socket:
    """The line to this process's server, which ends when the line does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    root = Path(__file__).resolve().parents[1]
    with theirs:
        subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.rank_server", str(theirs.fileno())],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)])},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    return ours


def serve(control: socket.socket) -> None:
    """Fork a process for each message, and say how each ended, until the line is cut."""
    for name in ("specdec.worker", *IMPORTED):
        importlib.import_module(name)
    assert threading.active_count() == 1
    awake, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    running: dict[int, socket.socket] = {}
    while True:
        if awake in select.select([control, awake], [], [])[0]:
            awake.recv(4096)
            say_ended(running)
            continue
        message, fds, _, _ = socket.recv_fds(control, 1 << 20, 2)
        if not message:
            return  # the processes end, too: each looks whose child it is
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (control, awake, wake, *running.values()):
                other.close()
            os.close(fds[1])
            become(fds[0], *pickle.loads(message))
        os.close(fds[0])
        running[pid] = socket.socket(fileno=fds[1])
        running[pid].send(str(pid).encode())


def say_ended(running: dict[int, socket.socket]) -> None:
    """Say the exit code of each process that has ended, negative for a signal, and forget it."""
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with running.pop(pid) as said, contextlib.suppress(OSError):
                said.send(str(os.waitstatus_to_exitcode(status)).encode())


def become(line: int, folder: str, variables: dict[str, str]) -> NoReturn:
    """The rank's process, from here on, as a new interpreter with this environment would be."""
    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    paths = variables["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
    sys.modules["specdec.worker"].main(line, os.getppid(), folder)
    sys.exit(0)


@pytest.fixture(scope="session")
def forked_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ranks come from the server, unless `long` tests run, too."""
    if "not long" not in request.config.getoption("markexpr"):
        yield
        return
    with patch.object(processes, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": fork})):
        yield


@pytest.fixture
def real_ranks(forked_ranks: None) -> Iterator[None]:
    """New interpreters again."""
    with patch.object(processes, "subprocess", subprocess):
        yield


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
