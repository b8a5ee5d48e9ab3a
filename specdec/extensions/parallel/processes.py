"""The process of another rank: starting it, and the messages that it has sent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from specdec.extensions.parallel.messages import Failed, Key, Reply


@dataclass
class Process:
    """One process of another rank, and its messages; `lost`: why it is lost, or None.

    Attributes:
        line: the socket of `connection`. failed: its message about a load or a round that failed.
        answers: what it has done, by key.
    """

    rank: int
    process: subprocess.Popen[bytes]
    line: socket.socket
    connection: Connection
    failed: Failed | None = None
    lost: str | None = None
    answers: dict[Key, Reply] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process.pid})"

    @property
    def follows(self) -> bool:
        """Whether it failed because another rank was lost."""
        return self.failed is not None and self.failed.follows

    def ending(self, code: int) -> str:
        """How it ended: by its last message, or by its exit code."""
        if self.failed is not None:
            return str(self.failed)
        return f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"


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
