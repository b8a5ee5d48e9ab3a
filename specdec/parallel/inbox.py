"""What a worker hears: messages of rank 0 in order. The process ends when rank 0 does, whatever it is doing."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

_LOOK = 1.0
"""Seconds between two looks at whose child this process is: rank 0's socket may live on in another child of its."""


class Inbox:
    """Messages are read on a thread of their own, so that rank 0 never waits for a full socket."""

    def __init__(self, connection: Connection, parent: int) -> None:
        """parent: process id of rank 0."""
        self._connection = connection
        self._speaking = threading.Lock()
        self._messages: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self.later: deque[tuple[int, Any]] = deque()
        threading.Thread(target=self._read, name="inbox", daemon=True).start()
        threading.Thread(target=_end_with, args=(parent,), name="parent", daemon=True).start()

    def get(self) -> tuple[int, Any]:
        """The number of a model and the next message to it; waits for it."""
        return self.later.popleft() if self.later else self.next()

    def next(self) -> tuple[int, Any]:
        """The next message that has come, whatever was left for later."""
        return self._messages.get()

    def say(self, message: Any) -> None:
        """A word back to rank 0, on any thread."""
        with self._speaking:
            self._connection.send(message)

    def _read(self) -> None:
        try:
            while True:
                self._messages.put(self._connection.recv())
        except (EOFError, OSError):
            os._exit(0)  # rank 0 is gone; the main thread may be waiting for it on the device


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK)
    os._exit(0)


class Ear:
    """What one model of a worker hears."""

    def __init__(self, inbox: Inbox, number: int) -> None:
        self._inbox = inbox
        self._number = number

    def get(self) -> Any:
        """The next message; waits for it.

        One to another model is left for later: on rank 0 the garbage collector may abort a request of that, or close
        it, in the midst of a round of this one.
        """
        while True:
            number, message = self._inbox.next()
            if number == self._number:
                return message
            self._inbox.later.append((number, message))
