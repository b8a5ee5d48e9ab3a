"""Transfers of a tensor-parallel model: every rank reads its own pages, and rank 0 waits for all of them."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from attention.cache.handoff import EngineTable, RankTable
from attention.transport.transports import Read
from specdec.errors import SpecdecError, TransferError, TransferTimeoutError
from specdec.parallel.messages import CloseTransfer, Fetch, Fetched, Opened, OpenTransfer
from specdec.parallel.workers import Link as Channel
from specdec.requests.handoff import Handoff
from specdec.requests.moved import Pages
from specdec.transfer.end import TRANSPORTS, RankEnd, options_of_rank

_OPENING = 60.0
"""Seconds in which the other ranks have opened a transport: registering memory may take a while."""
_WORDS = 2.0
"""Seconds after a deadline in which a rank says what became of its read."""
_PAUSE = 0.01
"""Seconds between two questions whether a late read is over."""


def open_on_other_ranks(model: Any, transport: str, options: dict[str, Any], engine: str) -> tuple[RankTable, ...]:
    """Let the other ranks open a transport; their tables. Called between two rounds on rank 0.

    Raises:
        TransferError: one of them cannot, which is named. RanksLostError: one is lost.
    """
    channel: Channel = model.ranks.channel
    secret, round_ = secrets.token_bytes(32), secrets.randbits(62)
    model.engine.moving.secret = secret
    model.engine.tell(OpenTransfer(transport, options, engine, secret, round_))
    key = ("opened", channel.number, round_)
    answers = channel.workers.wait_answers(key, time.monotonic() + _OPENING)
    channel.workers.forget_answers(key)
    tables: list[RankTable] = []
    for rank in range(1, model.ranks.size):
        answer = answers.get(rank)
        if not isinstance(answer, Opened) or answer.error:
            model.engine.tell(CloseTransfer())
            reason = answer.error if isinstance(answer, Opened) else f"no answer in {_OPENING:.0f} s"
            raise TransferError(f"rank {rank} of this model cannot open the transport {transport!r}: {reason}")
        tables += EngineTable.from_json(answer.table).ranks
    return tuple(tables)


class RanksRead:
    """A read of all ranks of this engine: done when all of them are."""

    def __init__(self, model: Any, handoff: Handoff, number: int, deadline: float) -> None:
        """Let the other ranks begin. `own` is to be set to the read of this rank."""
        self._channel: Channel = model.ranks.channel
        self._size: int = model.ranks.size
        self._key = ("fetched", self._channel.number, number)
        self._done = False
        self.own: Read | None = None
        told = Handoff(handoff.source, handoff.lease, handoff.expires, None, handoff.blocks, {})
        with model._shared.between_rounds():
            model.engine.tell(Fetch(number, deadline, told.to_bytes()))

    def wait(self, deadline: float) -> None:
        """See `Read.wait`.

        Raises:
            TransferError, TransferTimeoutError: of this rank, or of another, which is named.
            RanksLostError: a rank of this engine is lost.
        """
        assert self.own is not None
        self.own.wait(deadline)
        answers = self._channel.workers.wait_answers(self._key, deadline + _WORDS)
        for rank in range(1, self._size):
            answer = answers.get(rank)
            if not isinstance(answer, Fetched):
                raise TransferTimeoutError(f"rank {rank} of this model did not say before the deadline what it read")
            if answer.error:
                kind = TransferTimeoutError if answer.late else TransferError
                raise kind(f"rank {rank} of this model: {answer.error}")
        self._channel.workers.forget_answers(self._key)

    @property
    def settled(self) -> bool:
        """See `Read.settled`."""
        if self._done or (self.own is not None and not self.own.settled):
            return self._done
        if self._channel.workers.is_lost:
            return True
        answers = self._channel.workers.answers(self._key)
        over = [isinstance(answer, Fetched) and answer.settled for answer in answers.values()]
        self._done = len(over) == self._size - 1 and all(over)
        if self._done:
            self._channel.workers.forget_answers(self._key)
        return self._done


class FollowedTransfers:
    """A following rank's part in the transfers of one model."""

    def __init__(self, model: Any, number: int, say: Callable[[Any], None], fail: Callable[[BaseException], None]):
        """number: of the model. say: to rank 0. fail: ends the process, with these last words."""
        self._model, self._number = model, number
        self._say, self._fail = say, fail
        self._end: RankEnd | None = None

    def follow(self, message: OpenTransfer | CloseTransfer | Fetch) -> None:
        """Do what rank 0 says."""
        if isinstance(message, Fetch):
            # now: rank 0 may drop the reservation before the thread has begun
            pages = self._model.engine.moving.pages_of(message.number)
            threading.Thread(target=self._fetch, args=(message, pages), name="specdec fetch", daemon=True).start()
            return
        self.close()
        if isinstance(message, OpenTransfer):
            self._open(message)

    def close(self) -> None:
        """Idempotent."""
        end, self._end = self._end, None
        if end is not None:
            end.close()

    def _open(self, message: OpenTransfer) -> None:
        try:
            own = options_of_rank(message.options, self._model.ranks.rank)
            self._end = RankEnd(self._model, TRANSPORTS[message.transport](**own), message.engine)
        except SpecdecError as error:
            self._say(Opened(self._number, message.round, "", f"{type(error).__name__}: {error}"))
            return
        self._model.engine.moving.secret = message.secret
        table = EngineTable(message.engine, message.transport, {}, (self._end.table,)).to_json()
        self._say(Opened(self._number, message.round, table))

    def _fetch(self, message: Fetch, pages: Pages) -> None:
        """Beside the rounds, on a thread of its own."""
        try:
            self._read(message, pages)
        except BaseException as error:
            self._fail(error)

    def _read(self, message: Fetch, pages: Pages) -> None:
        key, read, end = (self._number, message.number), None, self._end
        try:
            if end is None:
                raise TransferError("the transport is closed")
            handoff = Handoff.from_bytes(message.data)
            read = end.read(end.read_plan(handoff, pages))
            read.wait(message.deadline)
        except SpecdecError as error:
            late, settled = isinstance(error, TransferTimeoutError), read is None or read.settled
            text = str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}"
            self._say(Fetched(*key, text, late, settled))
            while read is not None and not settled:
                time.sleep(_PAUSE)
                if settled := read.settled:
                    self._say(Fetched(*key, text, late, True))
            return
        self._say(Fetched(*key))
