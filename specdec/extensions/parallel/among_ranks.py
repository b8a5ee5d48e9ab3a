"""Requests that move into or out of a tensor-parallel model, whose ranks are processes.

Rank 0 decides what is done with them and in which order; the others follow. Every rank reads its own pages, and rank 0
waits for all of them.
"""

from __future__ import annotations

import secrets
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from attention.errors import OutOfPagesError, named_error
from attention.threads import start_thread
from attention.transport.region_tables import EngineTable, RankTable
from attention.transport.transports import Read, ReadPlan, Transport
from specdec.errors import RanksLostError, SpecdecError, TransferError, TransferTimeoutError
from specdec.extensions.handoff.held import Due, Settled
from specdec.extensions.handoff.link import TRANSPORTS, Link, RankEnd, fingerprint, options_of_rank
from specdec.extensions.handoff.moved import Handoff, Leaving, MovedRequest, Pages
from specdec.extensions.handoff.moving import MovingRequests, moving_requests
from specdec.extensions.parallel.engine import FollowingEngine, LeadingEngine
from specdec.extensions.parallel.messages import Key, Reply
from specdec.extensions.parallel.ranks import Ranks
from specdec.extensions.parallel.workers import WorkersChannel as Channel
from specdec.values import Options
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
    """`MovingRequests` of rank 0: every change is also sent to the other ranks. Calls raise RanksLostError."""

    def __init__(self, engine: LeadingEngine) -> None:
        super().__init__(engine)
        self._leading = engine
        self.held.confirm = partial(confirm, engine.ranks)

    def begin_round(self) -> None:
        """See `Guests.begin_round`; what is due was sent to the ranks before the step."""
        self.held.begin_round()

    def settle(self) -> None:
        if self.held.active and (due := self.held.due()):
            self._settle_on_all(due)

    def submit_leaving(self, request: Leaving) -> int:
        self.check_leaving(request)
        with self._leading.all_ranks():
            self._leading.tell("guests", "submit_leaving", replace(request, params=request.params.for_other_ranks))
            return super().submit_leaving(request)

    def reserve(self, moved: MovedRequest) -> int | OutOfPagesError:
        """See `MovingRequests.reserve`; if pages are missing, no message is sent to the other ranks."""
        with self._leading.all_ranks():
            found = super().reserve(moved)
            if isinstance(found, int):
                self._leading.tell("guests", "reserve", moved)
        return found

    def resume(self, handoff: Handoff, number: int | None) -> int:
        """See `MovingRequests.resume`. Other ranks get the request and its tensors alone."""
        moved = handoff.moved
        assert moved is not None
        own = replace(moved, params=moved.params.for_other_ranks)
        with self._leading.all_ranks():
            self._leading.tell("guests", "resume", replace(handoff, source=NOBODY, moved=own, blocks={}), number)
            return super().resume(handoff, number)

    def release(self, leases: Sequence[str]) -> None:
        """See `MovingRequests.release`. Once a rank is lost, pages are freed on this rank alone."""
        self._settle_on_all(Due(tuple(leases)))

    def drop(self, number: int, settled: Settled) -> None:
        """See `MovingRequests.drop`. Rank 0 decides when late reads are over, on whichever rank they are."""
        now = settled()
        with self._unless_lost("drop_told", number, now):
            super().drop(number, lambda: now)
            self.held.watch(number, settled)

    def _settle_on_all(self, due: Due) -> None:
        with self._unless_lost("settle_told", due):
            self.held.settle(due)

    @contextmanager
    def _unless_lost(self, method: str, *arguments: Any) -> Iterator[None]:
        """A block that follows a call of the other ranks; once a rank is lost it runs on this rank alone."""
        if self._leading.ranks.channel.is_lost:
            yield
            return
        with self._leading.all_ranks():
            self._leading.tell("guests", method, *arguments)
            yield


class FollowingRequests(MovingRequests):
    """`MovingRequests` of the other ranks, which do what rank 0 does."""

    def __init__(self, engine: FollowingEngine) -> None:
        super().__init__(engine)
        self.held.confirm = partial(confirm, engine.ranks)

    def settle(self) -> None:
        """See `Guests.settle`: rank 0 decides what is due."""

    def drop_told(self, number: int, settled: bool) -> None:
        """`drop`. settled: whether the pages are free at once; else a later message of rank 0 frees them."""
        self.drop(number, lambda: settled)

    def settle_told(self, due: Due) -> None:
        """Free the pages of leases and late reads."""
        self.held.settle(due)
        self.held.finished()  # empties the list: peers report to all ranks, but only rank 0 acts on the reports


def confirm(ranks: Ranks, granted: Mapping[str, Pages]) -> None:
    """Wait until every rank has written the pages of departing requests and made them readable.

    Raises:
        RanksLostError: a rank is lost, or has granted other pages.
    """
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
    # The least of x and of -x are equal up to sign only if all ranks have the same x: one exchange compares all.
    digest = zlib.crc32(repr(sorted(granted.items())).encode())
    least, most = ranks.collectives.least([digest, -digest])
    if least != -most:
        raise RanksLostError(f"the ranks disagree about the pages of requests that leave (here: {granted})")


class RanksLink(Link):
    """A `Link` of a model with several ranks, on rank 0."""

    def _others(self, transport: str | Transport, options: Options) -> tuple[RankTable, ...]:
        """See `Link._others`; called on rank 0 between two rounds.

        Raises:
            TransferError: a rank cannot open it; the message names the rank. RanksLostError: a rank is lost.
        """
        assert isinstance(transport, str)
        model = self._model
        channel: Channel = model.ranks.channel
        secret = secrets.token_bytes(32)
        key: Key = ("opened", channel.number, secrets.randbits(62))
        model.engine.guests.held.secret = secret
        tables = []
        try:
            with model.engine.all_ranks():
                model.engine.tell("transfers", "open", key, transport, options, self._engine_name, secret)
            answers = channel.workers.wait_answers(key, time.monotonic() + _OPENING)
            channel.workers.forget_answers(key)
            for rank in range(1, model.ranks.size):
                answer = answers.get(rank) or Reply(key, error=f"no answer in {_OPENING:.0f} s")
                if answer.error:
                    with model.engine.all_ranks():
                        model.engine.tell("transfers", "close")
                    raise TransferError(
                        f"rank {rank} of this model cannot open the transport {transport!r}: {answer.error}"
                    )
                tables.append(answer.table)
        except BaseException:
            self._end.transport.close()
            raise
        self._weights = fingerprint(model, *model.group.run(fingerprint_of_target, model.engine))
        return tuple(tables)

    def _begun(self, own: ReadPlan, handoff: Handoff, number: int, deadline: float) -> Read:
        return RanksRead(self._model, handoff, number, deadline, partial(self._end.read, own))


class RanksRead:
    """A `Read` on all ranks of this engine; done when all of them are."""

    def __init__(self, model: Any, handoff: Handoff, number: int, deadline: float, start: Callable[[], Read]) -> None:
        """Start the read on the other ranks. start: starts this rank's read, when `wait` is called."""
        self._channel: Channel = model.ranks.channel
        self._size: int = model.ranks.size
        self._key: Key = ("fetched", self._channel.number, number)
        self._done = False
        self._start = start
        self._own: Read | None = None
        told = replace(handoff, moved=None, tensors={})
        with model._shared.between_rounds(), model.engine.all_ranks():
            model.engine.tell("transfers", "fetch", self._key, deadline, told)

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
            if answer is None:
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
        self._done = len(answers) == self._size - 1 and all(answer.settled for answer in answers.values())
        if self._done:
            self._channel.workers.forget_answers(self._key)
        return self._done


@dataclass
class FollowedTransfers:
    """The transfers of one model on a rank other than 0.

    Attributes:
        say: sends a message to rank 0. fail: ends the process with an error. end: this rank's of an open transport.
    """

    model: Any
    say: Callable[[Reply], None]
    fail: Callable[[BaseException], None]
    end: RankEnd | None = None

    def open(self, key: Key, transport: str, options: Options, engine: str, secret: bytes) -> None:
        """Let others read this rank's pages, under the engine's name and secret; the answer has this rank's table."""
        self.close()
        try:
            own = options_of_rank(options, self.model.ranks.rank)
            held = moving_requests(self.model.engine, FollowingRequests).held
            self.end = RankEnd(self.model, held, TRANSPORTS[transport](**own), engine)
        except SpecdecError as error:
            self.say(Reply(key, error=named_error(error)))
            return
        held.secret = secret
        self.say(Reply(key, self.end.table))

    def close(self) -> None:
        """Idempotent."""
        end = self.end
        self.end = None
        if end is not None:
            end.transport.close()

    def fetch(self, key: Key, deadline: float, handoff: Handoff) -> None:
        """Fill reserved pages, concurrently with rounds; the answer says when that is done.

        deadline: `time.monotonic` seconds, which ranks of one machine share. handoff: source, lease and blocks.
        """
        # Read now: rank 0 may drop the reservation before the thread has started.
        pages = self.model.engine.guests.held.pages_of(key[2])
        start_thread(self._fetch, key, deadline, handoff, pages, name="specdec fetch")

    def _fetch(self, key: Key, deadline: float, handoff: Handoff, pages: Pages) -> None:
        """Runs on a separate thread, concurrently with rounds."""
        try:
            self._read(key, deadline, handoff, pages)
        except BaseException as error:  # else the thread would end silently, and rank 0 wait for its answer
            self.fail(error)

    def _read(self, key: Key, deadline: float, handoff: Handoff, pages: Pages) -> None:
        read = None
        end = self.end
        try:
            if end is None:
                raise TransferError("the transport is closed")
            read = end.read(end.read_plan(handoff, pages))
            read.wait(deadline)
        except SpecdecError as error:
            text = str(error) if isinstance(error, TransferError) else named_error(error)
            settled = read is None or read.settled
            answer = Reply(key, error=text, late=isinstance(error, TransferTimeoutError), settled=settled)
            self.say(answer)
            if read is not None and not settled:
                while not read.settled:
                    time.sleep(_PAUSE)
                self.say(replace(answer, settled=True))
            return
        self.say(Reply(key))
