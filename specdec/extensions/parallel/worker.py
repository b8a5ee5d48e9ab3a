"""A rank other than 0: `python -m specdec.extensions.parallel.worker`, which does what rank 0 does.

The process is started by `specdec.extensions.parallel.workers`. It receives messages of rank 0 in order, and ends when
rank 0 does, whatever it is doing.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from attention.threads import start_thread
from specdec.errors import InvariantError, RanksLostError
from specdec.extensions.parallel.among_ranks import FollowedTransfers
from specdec.extensions.parallel.collectives import RankGoneError
from specdec.extensions.parallel.engine import FollowingEngine
from specdec.extensions.parallel.messages import STARTED, CallMethod, Close, Failed, Join, Load, RankChannel, Reply
from specdec.extensions.parallel.ranks import Ranks
from specdec.extensions.parallel.symmetric import join_group
from specdec.interrupts import causes
from specdec.model import SpeculativeModel
from specdec.values import IdSequence

_LOOK = 1.0
"""Seconds between two checks of the parent process: rank 0's socket may stay open in another child of rank 0."""


class Inbox:
    """Reads messages on a separate thread, so that rank 0 never waits for a full socket."""

    def __init__(self, connection: Connection, parent: int, folder: str) -> None:
        """parent: process id of rank 0. folder: for files of all ranks; removed at the end, in case rank 0 cannot."""
        self._connection = connection
        self._folder = folder
        self._speaking = threading.Lock()
        self._messages = SimpleQueue[tuple[int, Any]]()
        self.later = deque[tuple[int, Any]]()
        start_thread(self._read, name="inbox")
        start_thread(self._end_with, parent, name="parent")

    def get(self) -> tuple[int, Any]:
        """A model's number and the next message to it; waits for it."""
        return self.later.popleft() if self.later else self.next()

    def next(self) -> tuple[int, Any]:
        """The next message that arrives, ignoring those left for later."""
        return self._messages.get()

    def say(self, message: Any) -> None:
        """Send a message to rank 0, from any thread."""
        with self._speaking:
            self._connection.send(message)

    def end_badly(self, error: BaseException) -> None:
        """Report an error and end this process, from any thread: others may wait for ranks at another place."""
        try:
            self.say(failed(error))
        finally:  # rank 0 may be gone
            # sys.exit would end only this thread.
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
    """An error as a message."""
    text = str(error) or "".join(traceback.format_exception_only(error)).strip()
    follows = any(isinstance(each, RankGoneError) for each in causes(error))  # whatever that was turned into
    return Failed(type(error).__name__, text, follows)


@dataclass(frozen=True)
class Orders(RankChannel):
    """Rank 0's messages to one model of this process."""

    inbox: Inbox
    number: int

    def told(self, message: Any) -> Any:
        """The next message of rank 0; waits for it.

        Messages to other models are left for later: on rank 0 the garbage collector may abort a request of another
        model, or close the model, in the middle of a round of this one.
        """
        while (found := self.inbox.next())[0] != self.number:
            self.inbox.later.append(found)
        return found[1]


@dataclass(frozen=True)
class SilentTokenizer:
    """A tokenizer without texts, which rank 0 has: each token is "", and any text has the ids that rank 0 sent."""

    ids: IdSequence

    def __call__(self, text: str) -> dict[str, list[int]]:
        """Any text -> the ids of the head's self-test."""
        return {"input_ids": list(self.ids)}

    def decode(self, token_ids: IdSequence, *, skip_special_tokens: bool = True) -> str:
        """Any ids -> an empty text."""
        return ""


class Follower:
    """The models of this rank, by number."""

    def __init__(self, inbox: Inbox, join: Join) -> None:
        """Join the group."""
        self._inbox = inbox
        self._rank = int(os.environ["LOCAL_RANK"])  # see `processes.start`
        self._size = join.size
        self._device = torch.device("cuda", self._rank) if join.device == "cuda" else torch.device(join.device)
        self._collectives = join_group(self._rank, join.size, self._device, join.rendezvous)
        self._models: dict[int, SpeculativeModel] = {}
        self._transfers: dict[int, FollowedTransfers] = {}

    def run(self) -> None:
        """Do what rank 0 does, until it closes the socket, see `Inbox`."""
        while True:
            number, message = self._inbox.get()
            if isinstance(message, Load):
                self._load(number, message)
            elif isinstance(message, Close):
                if number in self._models:  # else its load failed
                    self._transfers.pop(number).close()
                    self._models.pop(number).close()
            else:
                if not isinstance(message, CallMethod):
                    raise RanksLostError(
                        f"the ranks disagree: rank 0 launched a round that is not launched here ({message})"
                    )
                engine: Any = self._models[number].engine
                of = {"engine": engine, "guests": engine.guests, "transfers": self._transfers[number]}[message.of]
                with engine.ranks.together():
                    getattr(of, message.method)(*message.arguments)

    def _load(self, number: int, message: Load) -> None:
        """Load this rank's share. A failure is reported to rank 0, which decides what follows.

        Raises:
            Exception: another rank is gone: this process ends, too, for others may be waiting for it.
        """
        orders = Orders(self._inbox, number)
        ranks = Ranks(self._rank, self._size, self._device, self._collectives, orders, FollowingEngine)
        options = replace(message.options, tokenizer=SilentTokenizer(message.text_ids), device=self._device)
        try:
            with ranks.together():
                model = SpeculativeModel.in_group(message.target, message.draft, options, ranks)
        except Exception as error:
            said = failed(error)
            if said.follows:
                raise
            self._inbox.say(said)
            return
        self._models[number] = model
        self._transfers[number] = FollowedTransfers(model, self._inbox.say, self._inbox.end_badly)
        self._inbox.say(Reply(("loaded", number, 0)))


def main(descriptor: int, parent: int, folder: str) -> None:
    """Load shares and run rounds until rank 0 ends, or something fails, which is reported to rank 0.

    Args:
        descriptor: file descriptor of the socket to rank 0. parent: its process id. folder: for files of all ranks.
    """
    inbox = Inbox(Connection(descriptor), parent, folder)
    try:
        warnings.simplefilter("ignore")  # rank 0 gives the same ones
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        inbox.say(Reply(STARTED))
        _, join = inbox.get()
        if not isinstance(join, Join):
            raise InvariantError(f"rank 0 began with {type(join).__name__}")
        Follower(inbox, join).run()
    except BaseException as error:
        inbox.end_badly(error)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
