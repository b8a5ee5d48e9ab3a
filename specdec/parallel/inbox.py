"""What a worker hears: messages of rank 0 in order. The process ends when rank 0 does, whatever it is doing."""

from __future__ import annotations

import os
import shutil
import threading
import time
import traceback
from collections import deque
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from specdec.parallel.collectives import RankGoneError
from specdec.parallel.messages import Failed

_LOOK = 1.0
"""Seconds between two looks at whose child this process is: rank 0's socket may live on in another child of its."""


class Inbox:
    """Messages are read on a thread of their own, so that rank 0 never waits for a full socket."""

    def __init__(self, connection: Connection, parent: int, folder: str) -> None:
        """parent: process id of rank 0. folder: for files of all ranks; removed at the end, in case rank 0 cannot."""
        self._connection, self._folder = connection, folder
        self._speaking = threading.Lock()
        self._messages: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self.later: deque[tuple[int, Any]] = deque()
        threading.Thread(target=self._read, name="inbox", daemon=True).start()
        threading.Thread(target=self._end_with, args=(parent,), name="parent", daemon=True).start()

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

    def end_badly(self, error: BaseException) -> None:
        """Say why, and end this process, on any thread: others may wait for ranks that are at another place."""
        try:
            self.say(failed(error))
        finally:  # rank 0 may be gone
            os._exit(1)

    def _read(self) -> None:
        try:
            while True:
                self._messages.put(self._connection.recv())
        except (EOFError, OSError):
            self._end()  # rank 0 is gone; the main thread may be waiting for it on the device
        except BaseException as error:  # a message that cannot be read here, such as an object of the user's program
            self.end_badly(error)

    def _end_with(self, parent: int) -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK)
        self._end()

    def _end(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)


def failed(error: BaseException) -> Failed:
    """An error in words."""
    text = str(error) or "".join(traceback.format_exception_only(error)).strip()
    return Failed(type(error).__name__, text, _follows(error))


def _follows(error: BaseException | None) -> bool:
    """Whether an error came from another rank that was gone: from a `RankGoneError`, whatever it was made into."""
    while error is not None and not isinstance(error, RankGoneError):
        error = error.__cause__ or error.__context__
    return error is not None


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
