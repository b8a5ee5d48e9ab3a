"""Requests that move into or out of a tensor-parallel model, whose ranks are processes.

Rank 0 decides what is done with them and in which order; the others follow. Every rank reads its own pages, and rank 0
waits for all of them.
"""

from __future__ import annotations

import secrets
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from attention.errors import OutOfPagesError
from attention.transport.region_tables import EngineTable, RankTable
from attention.transport.transports import Read, ReadPlan, Transport, synchronize
from specdec.errors import RanksLostError, SpecdecError, TransferError, TransferTimeoutError
from specdec.extensions.handoff.held import Due
from specdec.extensions.handoff.link import TRANSPORTS, Link, RankEnd, fingerprint, options_of_rank
from specdec.extensions.handoff.moved import Handoff, Leaving, MovedRequest, Pages
from specdec.extensions.handoff.moving import MovingRequests, moving_requests
from specdec.extensions.parallel.engine import FollowingEngine, LeadingEngine
from specdec.extensions.parallel.messages import CallMoving, CloseTransfer, Fetch, Fetched, Opened, OpenTransfer, Resume
from specdec.extensions.parallel.ranks import Ranks
from specdec.extensions.parallel.workers import WorkersChannel as Channel
from specdec.wrapped.fingerprint import fingerprint_of_target

_OPENING = 60.0
"""Seconds given to the other ranks to open a transport: registering memory may take a while."""
_WORDS = 2.0
"""Seconds after a deadline within which a rank reports the end of its read."""
_PAUSE = 0.01
"""Seconds between two polls of a late read."""


NOBODY = EngineTable("", "", {}, ())
"""The source of a handoff that only carries a request and its tensors to another rank."""


class LeadingRequests(MovingRequests):
    """`MovingRequests` of rank 0: every change is also sent to the other ranks."""

    def __init__(self, engine: LeadingEngine) -> None:
        super().__init__(engine)
        self._leading = engine
        self._channel: Channel = engine.ranks.channel  # type: ignore[assignment]
        self.held.confirm = partial(confirm, engine.ranks)

    def begin_round(self) -> None:
        """See `Guests.begin_round`; what is due was sent to the ranks before the step."""
        self.held.begin_round()

    def settle(self) -> None:
        """See `Guests.settle`. Raises RanksLostError: a rank is lost."""
        if self.held.active and (due := self.held.due()):
            self._settle_on_all(due)

    def submit_leaving(self, request: Leaving) -> int:
        """See `MovingRequests.submit_leaving`. Raises RanksLostError: a rank is lost."""
        self.check_leaving(request)
        with self._leading.all_ranks():
            told = replace(request, params=request.params.for_other_ranks)
            self._channel.send(CallMoving("submit_leaving", (told,)))
            return super().submit_leaving(request)

    def reserve(self, moved: MovedRequest) -> int:
        """See `MovingRequests.reserve`; if pages are missing, no message is sent to the other ranks.

        Raises:
            OutOfPagesError: too few pages are free. RanksLostError: a rank is lost.
        """
        self.check_moved(moved)
        missing: OutOfPagesError | None = None
        with self._leading.all_ranks():
            try:
                number = super().reserve(moved)
                self._channel.send(CallMoving("reserve", (moved,)))
            except OutOfPagesError as error:
                missing = error
        if missing is not None:
            raise missing
        return number

    def resume(self, moved: MovedRequest, arrival: tuple[int, Mapping[str, torch.Tensor]] | None = None) -> int:
        """See `MovingRequests.resume`. Its tensors are sent to the other ranks as bytes."""
        self.check_moved(moved)
        number, tensors = (None, {}) if arrival is None else arrival
        with self._leading.all_ranks():
            self._channel.send(Resume(Handoff(NOBODY, "", 0.0, moved, {}, tensors).to_bytes(), number))
            return super().resume(moved, arrival)

    def release(self, leases: Sequence[str]) -> None:
        """See `MovingRequests.release`. Once a rank is lost, pages are freed on this rank alone."""
        self._settle_on_all(Due(tuple(leases)))

    def drop(self, number: int, settled: Callable[[], bool]) -> None:
        """See `MovingRequests.drop`. Rank 0 decides when late reads are over, on whichever rank they are."""
        now = settled()
        if self._channel.workers.is_lost:
            super().drop(number, settled)
            return
        with self._leading.all_ranks():
            self._channel.send(CallMoving("drop_told", (number, now)))
            super().drop(number, lambda: now)
            self.held.watch(number, settled)

    def _settle_on_all(self, due: Due) -> None:
        pools = self._leading.scheduler.pools()
        if self._channel.workers.is_lost:
            self.held.settle(pools, due)
            return
        with self._leading.all_ranks():
            self._channel.send(CallMoving("settle_told", (due,)))
            self.held.settle(pools, due)


class FollowingRequests(MovingRequests):
    """`MovingRequests` of the other ranks, which do what rank 0 does."""

    def __init__(self, engine: FollowingEngine) -> None:
        super().__init__(engine)
        self._following = engine
        self.held.confirm = partial(confirm, engine.ranks)
        engine.also_follows = self.follow

    def settle(self) -> None:
        """See `Guests.settle`: rank 0 decides what is due."""

    def follow(self, message: Any) -> bool:
        """Do what rank 0 did, by its message. False where the message is about something else."""
        if isinstance(message, CallMoving):
            getattr(self, message.method)(*message.arguments)
        elif isinstance(message, Resume):
            self._resume(message)
        else:
            return False
        return True

    def drop_told(self, number: int, settled: bool) -> None:
        """`drop`. settled: whether the pages are free at once; else a later message of rank 0 frees them."""
        self.drop(number, lambda: settled)

    def settle_told(self, due: Due) -> None:
        """Free the pages of leases and late reads."""
        self.held.settle(self._following.scheduler.pools(), due)
        self.held.finished()  # empties the list: peers report to all ranks, but only rank 0 acts on the reports

    def _resume(self, message: Resume) -> None:
        handoff = Handoff.from_bytes(message.data)
        moved = handoff.moved
        assert moved is not None
        arrival = None if message.number is None else (message.number, handoff.tensors)
        self.resume(replace(moved, params=moved.params.for_other_ranks), arrival)


def confirm(ranks: Ranks, granted: Mapping[str, Pages]) -> None:
    """Wait until every rank has written the pages of departing requests and made them readable.

    Raises:
        RanksLostError: a rank is lost, or has granted other pages.
    """
    # The empty tensor only names the device to wait for.
    synchronize([torch.empty(0, device=ranks.device)])
    # The least of x and of -x are equal up to sign only if all ranks have the same x: one exchange compares all.
    digest = zlib.crc32(repr(sorted(granted.items())).encode())
    least, most = ranks.collectives.least([digest, -digest])
    if least != -most:
        raise RanksLostError(f"the ranks disagree about the pages of requests that leave (here: {granted})")


class RanksLink(Link):
    """A `Link` of a model with several ranks, on rank 0."""

    def _others(self, transport: str | Transport, options: Mapping[str, Any]) -> tuple[RankTable, ...]:
        assert isinstance(transport, str)
        try:
            others = open_on_other_ranks(self._model, transport, dict(options), self._engine_name)
        except BaseException:
            self._end.transport.close()
            raise
        found = self._model.group.run(fingerprint_of_target, self._model.engine)
        self._weights = fingerprint(self._model, *found)
        return others

    def _begun(self, own: ReadPlan, handoff: Handoff, number: int, deadline: float) -> Read:
        return RanksRead(self._model, handoff, number, deadline, partial(self._end.read, own))


def open_on_other_ranks(model: Any, transport: str, options: dict[str, Any], engine: str) -> tuple[RankTable, ...]:
    """Make the other ranks open a transport; returns their tables. Called on rank 0 between two rounds.

    Raises:
        TransferError: a rank cannot open it; the message names the rank. RanksLostError: a rank is lost.
    """
    channel: Channel = model.ranks.channel
    secret, round_ = secrets.token_bytes(32), secrets.randbits(62)
    model.engine.guests.held.secret = secret
    model.engine.tell(OpenTransfer(transport, options, engine, secret, round_))
    key = ("Opened", channel.number, round_)
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
    """A `Read` on all ranks of this engine; done when all of them are."""

    def __init__(self, model: Any, handoff: Handoff, number: int, deadline: float, start: Callable[[], Read]) -> None:
        """Start the read on the other ranks. start: starts this rank's read, when `wait` is called."""
        self._channel: Channel = model.ranks.channel
        self._size: int = model.ranks.size
        self._key = ("Fetched", self._channel.number, number)
        self._done = False
        self._start = start
        self._own: Read | None = None
        told = Handoff(handoff.source, handoff.lease, handoff.expires, None, handoff.blocks, {})
        with model._shared.between_rounds():
            model.engine.tell(Fetch(number, deadline, told.to_bytes()))

    def wait(self, deadline: float) -> None:
        """See `Read.wait`.

        Raises:
            TransferError, TransferTimeoutError: this rank's, or another's, which the message names.
            RanksLostError: a rank of this engine is lost.
        """
        self.wait_here(deadline)
        answers = self._channel.workers.wait_answers(self._key, deadline + _WORDS)
        for rank in range(1, self._size):
            answer = answers.get(rank)
            if not isinstance(answer, Fetched):
                raise TransferTimeoutError(f"rank {rank} of this model did not say before the deadline what it read")
            if answer.error:
                kind = TransferTimeoutError if answer.late else TransferError
                raise kind(f"rank {rank} of this model: {answer.error}")
        self._channel.workers.forget_answers(self._key)

    def wait_here(self, deadline: float) -> None:
        """`wait`, but only for this rank."""
        self._own = self._start()
        self._own.wait(deadline)

    @property
    def settled(self) -> bool:
        if self._done or (self._own is not None and not self._own.settled):
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
    """The transfers of one model on a rank other than 0."""

    def __init__(self, model: Any, number: int, say: Callable[[Any], None], fail: Callable[[BaseException], None]):
        """number: the model's. say: sends a message to rank 0. fail: ends the process with an error."""
        self._model, self._number = model, number
        self._say, self._fail = say, fail
        self._end: RankEnd | None = None

    def follow(self, message: OpenTransfer | CloseTransfer | Fetch) -> None:
        """Do what rank 0 did, by its message."""
        if isinstance(message, Fetch):
            # Read now: rank 0 may drop the reservation before the thread has started.
            pages = self._model.engine.guests.held.pages_of(message.number)
            threading.Thread(target=self._fetch, args=(message, pages), name="specdec fetch", daemon=True).start()
            return
        self.close()
        if isinstance(message, OpenTransfer):
            self._open(message)

    def close(self) -> None:
        """Idempotent."""
        end, self._end = self._end, None
        if end is not None:
            end.transport.close()

    def _open(self, message: OpenTransfer) -> None:
        try:
            own = options_of_rank(message.options, self._model.ranks.rank)
            held = moving_requests(self._model.engine, FollowingRequests).held
            self._end = RankEnd(self._model, held, TRANSPORTS[message.transport](**own), message.engine)
        except SpecdecError as error:
            self._say(Opened(self._number, message.round, "", f"{type(error).__name__}: {error}"))
            return
        held.secret = message.secret
        table = EngineTable(message.engine, message.transport, {}, (self._end.table,)).to_json()
        self._say(Opened(self._number, message.round, table))

    def _fetch(self, message: Fetch, pages: Pages) -> None:
        """Runs on a separate thread, concurrently with rounds."""
        try:
            self._read(message, pages)
        except BaseException as error:  # else the thread would end silently, and rank 0 wait for its answer
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
