"""A rank other than 0: `python -m specdec.worker`, started by `specdec.parallel.workers`; it does what rank 0 says."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from specdec.errors import InvariantError
from specdec.handoff.among_ranks import FollowedTransfers
from specdec.model import SpeculativeModel
from specdec.parallel.group import join_group
from specdec.parallel.inbox import Ear, Inbox, failed
from specdec.parallel.messages import Close, CloseTransfer, Done, Fetch, Join, Load, OpenTransfer, Started
from specdec.parallel.ranks import Ranks


class SilentTokenizer:
    """Texts are rank 0's: every token is an empty text, and the only text to read has the ids that rank 0 sent."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = list(ids)

    def __call__(self, text: str) -> dict[str, list[int]]:
        """Any text -> the ids of the head's self-test."""
        return {"input_ids": self._ids}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Any ids -> an empty text."""
        return ""


class Follower:
    """The models of this rank, by number."""

    def __init__(self, inbox: Inbox, join: Join) -> None:
        """Join the group."""
        self._inbox = inbox
        self._rank, self._size = join.rank, join.size
        self._device = torch.device(join.device, join.rank) if join.device == "cuda" else torch.device(join.device)
        self._collectives = join_group(join.rank, join.size, self._device, join.rendezvous)
        self._models: dict[int, SpeculativeModel] = {}
        self._transfers: dict[int, FollowedTransfers] = {}

    def run(self) -> None:
        """Do what rank 0 does. It ends when rank 0 cuts the line, see `Inbox`."""
        while True:
            number, message = self._inbox.get()
            if isinstance(message, Load):
                self._load(number, message)
            elif isinstance(message, Close):
                if number in self._models:  # else its load failed
                    self._transfers.pop(number).close()
                    self._models.pop(number).close()
            elif isinstance(message, (OpenTransfer, CloseTransfer, Fetch)):
                self._transfers[number].follow(message)
            else:
                engine: Any = self._models[number].engine
                with engine.ranks.together():
                    engine.follow(message)

    def _load(self, number: int, message: Load) -> None:
        """Load this rank's share. What fails is told; what is next, rank 0 decides.

        Raises:
            Exception: another rank is gone: this process ends, too, for others may be waiting for it.
        """
        ranks = Ranks(self._rank, self._size, self._device, self._collectives, Ear(self._inbox, number))
        options = replace(message.options, tokenizer=SilentTokenizer(message.text_ids))
        try:
            with ranks.together():
                model = SpeculativeModel._share(message.target, message.draft, options, ranks)
        except Exception as error:
            said = failed(error)
            if said.follows:
                raise
            self._inbox.say(said)
            return
        self._models[number] = model
        self._transfers[number] = FollowedTransfers(model, number, self._inbox.say, self._inbox.end_badly)
        self._inbox.say(Done(number))


def main(descriptor: int, parent: int, folder: str) -> None:
    """Load shares and run rounds until rank 0 ends, or something fails, which rank 0 is told.

    Args:
        descriptor: of the socket to rank 0. parent: its process id. folder: of all ranks' files.
    """
    inbox = Inbox(Connection(descriptor), parent, folder)
    try:
        warnings.simplefilter("ignore")  # rank 0 gives the same ones
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        inbox.say(Started())
        _, join = inbox.get()
        if not isinstance(join, Join):
            raise InvariantError(f"rank 0 began with {type(join).__name__}")
        Follower(inbox, join).run()
    except BaseException as error:
        inbox.end_badly(error)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
