"""Other processes of tests, forked from one server of this test process: importing transformers again takes 5 s.

`forked_ranks` stands in for `subprocess` in `specdec.extensions.parallel.processes`: the same command, environment,
socket and session, but no new interpreter. Tests of what only a new interpreter shows ask for `real_ranks`; where the
`long` tests run, too (`make test-all`), every process is a real one. `start_python` does the same for `python -c`, and
`run_python` for one that must import the packages of this repository itself: its server has imported only others'.
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
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import pytest

COMMAND = [sys.executable, "-P", "-m", "specdec.extensions.parallel.worker"]
OF_OTHERS = ("accelerate", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")
"""What every process imports that loads a model: packages of others."""
OURS = ("specdec.extensions.parallel.worker",)
"""What every rank imports, too."""
COMPILERS = ("torch", "triton.compiler.compiler", "triton.language")
"""What every process imports that compiles kernels: without the interpreter, which Triton's own functions would be made
for."""


SERVER_GONE = 77
"""Exit code of a process whose server has ended, and which ends with it: no signal killed it."""


class Forked:
    """What `specdec.extensions.parallel.processes` uses of a `subprocess.Popen`."""

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
                self._code = int(self._status.recv(64) or SERVER_GONE)
            return self._code

    def kill(self) -> None:
        """As `Popen.kill`."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Script(Forked):
    """What tests use of a `subprocess.Popen` of `python -c`, with text in its pipes."""

    def __init__(self, status: socket.socket, stdin: int, stdout: int | None) -> None:
        """stdin, stdout: our ends of the pipes; stdout None: it is no pipe."""
        super().__init__(status)
        self.stdin = os.fdopen(stdin, "w")
        self.stdout = None if stdout is None else os.fdopen(stdout)


def fork_script(
    code: str, *arguments: str, env: dict[str, str], stdout: int = subprocess.PIPE, stderr: int = 2
) -> Script:
    """As `Popen([sys.executable, "-c", code, *arguments], stdin=PIPE, text=True, ...)`."""
    source, ours_in = os.pipe()
    ours_out, sink = os.pipe() if stdout == subprocess.PIPE else (None, os.dup(stdout))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        message = pickle.dumps(("script", (code, arguments), env))
        socket.send_fds(server_of_ours(), [message], [source, sink, stderr, theirs.fileno()])
    os.close(source)
    os.close(sink)
    return Script(ours, ours_in, ours_out)


def real_script(code: str, *arguments: str, **options: Any) -> Any:
    """A new interpreter."""
    given = {"stdout": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, text=True, **given)


def fork_and_wait(
    code: str, *arguments: str, env: dict[str, str], line: socket.socket | None = None
) -> subprocess.CompletedProcess[str]:
    """As `run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, ...)`.

    What is imported before the fork read the environment of this process. line: to another server than `server`.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, open(os.devnull) as nothing:
        with theirs:
            files = [nothing.fileno(), out.fileno(), err.fileno(), theirs.fileno()]
            socket.send_fds(line or server(), [pickle.dumps(("script", (code, arguments), env))], files)
        with ours:
            returned = Forked(ours).wait()
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess([code, *arguments], returned, out.read(), err.read())


def run_and_wait(code: str, *arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The same in a new interpreter."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def fork(command: Sequence[str], *, env: dict[str, str], pass_fds: Sequence[int], **options: Any) -> Forked:
    """As `subprocess.Popen` of a rank's command."""
    assert list(command[:4]) == COMMAND, command
    devnull = subprocess.DEVNULL
    assert options == {"stdin": devnull, "stdout": devnull, "start_new_session": True}, options
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    (line,) = pass_fds
    with theirs:
        message = pickle.dumps(("rank", (command[6],), env))
        socket.send_fds(server_of_ours(), [message], [line, theirs.fileno()])
    return Forked(ours)


@functools.cache
def server() -> socket.socket:
    """The line to this process's server, which ends when the line does."""
    return start(OF_OTHERS, dict(os.environ))


@functools.cache
def server_of_compilers() -> socket.socket:
    """The line to a server whose processes compile kernels for a GPU that is not there."""
    return start(COMPILERS, {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"})


def start(names: Sequence[str], env: dict[str, str]) -> socket.socket:
    """The line to a new server, which has imported `names`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    root = Path(__file__).resolve().parents[1]
    with theirs:
        subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.rank_server", str(theirs.fileno()), *names],
            env={**env, "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)])},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    return ours


@functools.cache
def server_of_ours() -> socket.socket:
    """The line to a server that has imported this repository's packages as well; `server` forks it."""
    line, its_line = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    status, its_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its_line, its_status, status:
        message = pickle.dumps(("server", (OURS,), dict(os.environ)))
        socket.send_fds(server(), [message], [its_line.fileno(), its_status.fileno()])
        Forked(status)
    return line


def serve(control: socket.socket, names: Sequence[str]) -> None:
    """Fork a process for each message, and say how each ended, until the line is cut."""
    for name in names:
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
        message, fds, _, _ = socket.recv_fds(control, 1 << 20, 4)
        if not message:
            return  # the processes end, too: each looks whose child it is
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (control, awake, wake, *running.values()):
                other.close()
            os.close(fds.pop())
            become(fds, *pickle.loads(message))
        running[pid] = socket.socket(fileno=fds.pop())
        for given in fds:
            os.close(given)
        running[pid].send(str(pid).encode())


def say_ended(running: dict[int, socket.socket]) -> None:
    """Say the exit code of each process that has ended, negative for a signal, and forget it."""
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with running.pop(pid) as said, contextlib.suppress(OSError):
                said.send(str(os.waitstatus_to_exitcode(status)).encode())


def become(fds: list[int], main: str, arguments: Sequence[Any], variables: dict[str, str]) -> NoReturn:
    """That process, from here on, as a new interpreter with this environment would be."""
    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    paths = list(filter(None, variables.get("PYTHONPATH", "").split(os.pathsep)))
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
    MAINS[main](fds, *arguments)
    sys.exit(0)


def further_server(fds: list[int], names: Sequence[str]) -> None:
    """A server that has imported `names`, too."""
    serve(socket.socket(fileno=fds[0]), names)


def rank(fds: list[int], folder: str) -> None:
    """`python -m specdec.extensions.parallel.worker`."""
    sys.modules["specdec.extensions.parallel.worker"].main(fds[0], os.getppid(), folder)


def script(fds: list[int], code: str, arguments: Sequence[str]) -> None:
    """`python -c`."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115 (open to the end)
    sys.argv[:] = ["-c", *arguments]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


MAINS: dict[str, Callable[..., None]] = {"rank": rank, "script": script, "server": further_server}


@pytest.fixture(scope="session")
def forked_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ranks come from the server, unless `long` tests run, too."""
    if not forks(request):
        yield
        return
    from specdec.extensions.parallel import processes

    with patch.object(processes, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": fork})):
        yield


def forks(request: pytest.FixtureRequest) -> bool:
    """Whether processes are forked: not where `long` tests run, too."""
    return "not long" in request.config.getoption("markexpr")


@pytest.fixture(scope="session")
def start_python(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """(code, *arguments, env=, stdout=, stderr=) -> a process with stdin, stdout, pid, poll, wait and kill."""
    return fork_script if forks(request) else real_script


@pytest.fixture(scope="session")
def run_python(request: pytest.FixtureRequest) -> Callable[..., subprocess.CompletedProcess[str]]:
    """(code, *arguments, env=) -> a process that has ended, with its output as text; it imported `specdec` itself."""
    return fork_and_wait if forks(request) else run_and_wait


@pytest.fixture
def real_ranks(forked_ranks: None) -> Iterator[None]:
    """New interpreters again."""
    from specdec.extensions.parallel import processes

    with patch.object(processes, "subprocess", subprocess):
        yield


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
