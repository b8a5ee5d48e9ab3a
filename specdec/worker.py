"""A rank other than 0: `python -m specdec.worker`, started by `specdec.parallel.workers`; it does what rank 0 says."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from specdec.engine.ranked import FollowingEngine
from specdec.model import SpeculativeModel
from specdec.parallel.group import join_group
from specdec.parallel.inbox import Inbox
from specdec.parallel.messages import Close, Failed, Load, Loaded, Started


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


def main(descriptor: int, parent: int) -> None:
    """Load a share and run rounds until rank 0 ends, or something fails, which rank 0 is told.

    Args:
        descriptor: of the socket to rank 0. parent: its process id.
    """
    inbox = Inbox(Connection(descriptor), parent)
    try:
        warnings.simplefilter("ignore")  # rank 0 gives the same ones
        transformers_logging.set_verbosity_error()
        inbox.say(Started())
        message = inbox.get()
        if isinstance(message, Load):
            follow(load(message, inbox), inbox)
    except BaseException as error:
        said = str(error) or "".join(traceback.format_exception_only(error)).strip()
        inbox.say(Failed(type(error).__name__, said))
        if not isinstance(error, Exception):
            raise
        os._exit(1)  # other threads may wait for ranks that are at another place
    os._exit(0)


def load(message: Load, inbox: Inbox) -> SpeculativeModel:
    """Join the group and load this rank's share."""
    options = message.options
    on_cuda = torch.cuda.is_available() and str(options.device) != "cpu"
    device = torch.device("cuda", message.rank) if on_cuda else torch.device("cpu")
    ranks = join_group(message.rank, message.size, device, message.rendezvous, inbox)
    build = partial(SpeculativeModel._loaded, message.target, message.draft, options=options)
    with ranks.together():
        model: SpeculativeModel = build(SilentTokenizer(message.text_ids), ranks)
    inbox.say(Loaded())
    return model


def follow(model: SpeculativeModel, inbox: Inbox) -> None:
    """Do what rank 0 does until it says that it is enough."""
    engine: Any = model.engine
    assert isinstance(engine, FollowingEngine)
    while not isinstance(message := inbox.get(), Close):
        with engine.ranks.together():
            engine.follow(message)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
