"""SharedEngine: lets callers on several threads use one engine, without an engine thread.

A call without updates to read runs a round itself, for all callers, unless another thread is in one; then it sleeps
until that round brings it an update or ends. So requests of all threads share the batch, a single thread pays only for
an uncontended lock, and a stream that is not read delays no other: its updates stay in its own inbox.

Interrupts (KeyboardInterrupt) strike the main thread between any two calls. So state that must not be lost is guarded
by CPython's own lock in a with-statement, is set by one assignment, or may be set twice.

CPython's lock is not fair: the thread that has just ended a round would take it again before waiting threads wake up.
So threads queue in a line, and each is woken by the one before it.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from threading import get_ident

import torch

from attention.hf.gate import use_own_threads
from attention.threads import after_fork
from specdec.engine.engine import Engine
from specdec.engine.scheduler import Usage
from specdec.engine.stats import EngineStats
from specdec.errors import ClosedModelError, DrainingError, SpecdecError
from specdec.requests.request import Call, Update
from specdec.requests.submission import Check, Submits
from specdec.torch_state import at_home

Placed = tuple[int, Update]
"""The index of a request in its call, and its update."""
CLOSED = (
    "this SpeculativeModel is closed; wrap its hf_model again with SpeculativeModel.from_pretrained(hf_model, …), or "
    "load one that was divided among ranks by its name"
)
CLOSED_MEANWHILE = "the SpeculativeModel was closed while this request was running; read what is wanted before close()"
DRAINING = "the model ends what it has and takes no new requests (drain, aclose); ask again later, or another one"
READ_ELSEWHERE = (
    "another thread was waiting for this stream when the process was forked, and it is not in this process; ask again"
)
NO_DEVICE = (
    "this process is a fork of the one that loaded the model onto a GPU, which no fork can use; load the model in a "
    "process that is a program of its own (multiprocessing: 'spawn')"
)

_LONGEST_SLEEP = 0.5
"""Seconds after which a sleeping call checks by itself: an interrupted thread may not have woken it."""
_SHORT_SLEEP = 1e-3
"""Seconds that `help` sleeps while another thread runs a round."""
_LONGEST_TURN = 0.2
"""Seconds after which the first thread in the line is dropped if no thread has the engine: it was interrupted."""

# Weak, and one handler for all: a handler registered with os.register_at_fork can never be removed.
_engines: weakref.WeakSet[SharedEngine] = weakref.WeakSet()


class SharedEngine:
    """An `Engine` shared by several threads. All access holds `_lock`; `_holder` is the thread that has it.

    `_line`: threads that wait for the engine or have it, in order of arrival, each with the queue that wakes it.
    `_in_round`: a thread runs a round. `forked`: this process is a fork of the one that made it. `num_drains`: threads
    that wait until all requests have ended; meanwhile new ones are refused.
    """

    def __init__(self, engine: Engine, device: torch.device) -> None:
        """Rounds of all threads run on `device`, on its current stream."""
        self._open_engine: Engine | None = engine
        self._last_stats = engine.stats
        self._device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._line: dict[int, SimpleQueue[None]] = {}
        self._in_round = False
        self._calls: dict[int, Call] = {}
        self._sleeping: dict[Call, None] = {}
        self._leading: Call | None = None
        self._refused = self.forked = self._without_device = False
        self.num_drains = 0
        self._abandoned = deque[int]()
        self._delivered: list[Update] = engine.reported
        _engines.add(self)

    @property
    def stats(self) -> EngineStats:
        """The engine's counters; after `close` as they were then."""
        return self._last_stats if self._open_engine is None else self._open_engine.stats

    @property
    def _engine(self) -> Engine:
        """The open engine. Raises ClosedModelError after `close`."""
        if self._open_engine is None:
            raise ClosedModelError(CLOSED)
        return self._open_engine

    def close(self) -> None:
        """End all requests and drop the engine. Idempotent.

        Waits for a round on another thread. Updates reported before can still be read; then calls and streams with
        unfinished requests raise ClosedModelError.

        Raises:
            SpecdecError: called from inside a round.
        """
        me = self._outside()
        try:
            self._line_up(me)
            with self._lock:
                self._holder = me
                try:
                    if self._open_engine is not None:
                        self._deliver(self._open_engine)
                        self._last_stats, self._delivered = self._open_engine.stats, []
                        self._calls.clear()
                        self._open_engine = None
                finally:
                    self._holder = None
        finally:
            self._step_out(me)
            for call in list(self._sleeping):
                call.inbox.put(None)
            self._pass_on()

    def check_open(self) -> None:
        """Raises ClosedModelError after `close`."""
        if self._open_engine is None:
            raise ClosedModelError(CLOSED)

    def usage(self) -> Usage:
        """Rows and pages in use: see `Engine.usage`. Raises SpecdecError inside a round."""
        with self.between_rounds():
            return self._engine.usage()

    def submit(
        self,
        requests: Sequence[Submits],
        check: Check = None,
        call: Call | None = None,
        part: Call | None = None,
    ) -> Call:
        """Queue the requests of a new or an open call.

        check: checks the model during the next round; if it raises ModelChangedError, `next` does too. part: of an
            open call, the new requests alone: receives the refusal, and its `made` is when their wait began.

        Raises:
            InvalidInputError: a request is refused, see `Engine.submit`; then no request of the call is queued.
            QueueFullError, DrainingError: likewise. SpecdecError: called from inside a round.
        """
        own = call or Call()
        asked = time.perf_counter() if part is None else part.made
        try:
            with self.between_rounds():
                self._queue(own, requests, time.perf_counter() - asked)
                if check is not None:
                    self._engine.meanwhile.append(partial(self._examine, part or own, check))
        except BaseException:  # an interrupt, too: requests may be queued already, and no caller would read them
            if call is None:
                self.abandon(own)
            raise
        return own

    def next(self, call: Call) -> Placed | None:
        """The call's next update, with its request's index in the call; runs rounds until an update arrives.

        None when all requests of the call have ended.

        Raises:
            SpecdecError: called from inside a round.
            ClosedModelError: the model was closed, and all updates reported before are read.
            ModelChangedError: from the call's check, before its first update.
        """
        me = self._outside()
        try:
            while call.places or call.refusal is not None:
                if call.refusal is not None:
                    raise call.refusal
                update = call.take()
                if update is None and self._open_engine is None and call.inbox.empty():
                    call.places.clear()
                    raise ClosedModelError(CLOSED_MEANWHILE)
                if update is None and self._in_round:
                    update = self._sleep(call)
                if update is not None and (found := self._placed(call, update)) is not None:
                    return found
                if not self._in_round:
                    self._lead(call, me)
            return None
        finally:
            self._pass_on()

    def received(self, call: Call) -> list[Placed]:
        """The updates already in the inbox, with their requests' indices. Never waits; one thread at a time."""
        found = []
        while not call.inbox.empty():
            if (update := call.take()) is not None and (placed := self._placed(call, update)) is not None:
                found.append(placed)
        return found

    def _placed(self, call: Call, update: Update) -> Placed | None:
        """An update with its request's index, None where the call has let go of it; the last one ends the request."""
        place = call.places.get(update.request_id)
        if update.last:
            call.end(update.request_id)
            self._calls.pop(update.request_id, None)
        return None if place is None else (place, update)

    def help(self) -> None:
        """Run a round, or sleep briefly if another thread runs one. For a caller that waits for free pages.
        Raises SpecdecError inside a round."""
        me = self._outside()
        try:
            if self._in_round:
                time.sleep(_SHORT_SLEEP)
            else:
                self._lead(None, me)
        finally:
            self._pass_on()

    def cancel(self, call: Call, indices: Collection[int], dropped: bool = False) -> None:
        """End these requests of a call, or all, which are reported once more. Never waits, as `abandon`.
        dropped: the caller went away."""
        each = list(call.places.items())
        wanted = set(indices)
        if (engine := self._open_engine) is not None:
            engine.deadlines.cancel([request_id for request_id, i in each if not wanted or i in wanted], dropped)

    def abandon(self, call: Call) -> None:
        """End a call's remaining requests: at once, or after the running round.

        Never waits: may be called on any thread at any time, also by a finalizer inside a round.
        """
        self._let_go(call)
        self._pass_on()

    def _let_go(self, call: Call) -> None:
        left = list(call.places)
        call.places.clear()
        self._abandoned.extend(left)
        call.inbox.put(None)

    @contextlib.contextmanager
    def between_rounds(self) -> Iterator[bool]:
        """Hold the engine so that no round runs inside the block; yields whether it has no request.
        Raises SpecdecError inside a round."""
        me = self._outside()
        try:
            self._line_up(me)
            with self._lock:
                self._holder = me
                try:
                    self._forget_abandoned()
                    yield not self._engine.has_work
                finally:
                    self._holder = None
        finally:
            self._step_out(me)
            self._pass_on()

    def _line_up(self, me: int, call: Call | None = None) -> None:
        """Wait for this thread's turn, or until `call` is ready. `_step_out` must follow in any case."""
        own: SimpleQueue[None] = SimpleQueue()
        self._line[me] = own
        while self._line.get(me) is own:  # else a signal handler on this thread has had it in its place
            # list() copies without releasing the GIL: other threads change the dict at any time.
            first = next(iter(list(self._line)), me)
            if first == me or (call is not None and call.is_ready):
                return
            wakes_first = self._line.get(first)
            with contextlib.suppress(Empty):
                own.get(timeout=_LONGEST_TURN)
                continue
            if self._holder is None and self._line.get(first) is wakes_first:
                self._line.pop(first, None)

    def _step_out(self, me: int) -> None:
        self._line.pop(me, None)
        for following in list(self._line.values())[:1]:
            following.put(None)

    def _outside(self) -> int:
        """This thread. Raises SpecdecError when it is inside a round, or in a fork without the device."""
        me = get_ident()
        if self._without_device:
            raise SpecdecError(NO_DEVICE)
        if self._holder == me:
            raise SpecdecError("the model was called from inside one of its own rounds (by its tokenizer or a hook)")
        return me

    def _queue(self, call: Call, requests: Sequence[Submits], waited: float) -> None:
        if self.num_drains:
            raise DrainingError(DRAINING)
        engine = self._engine
        first = engine.next_id
        engine.check_room(len(requests))
        engine.check_weights()
        try:
            ids = []
            for index, request in enumerate(requests, call.num_requests):
                ids.append(request.submit_to(engine))
                call.places[ids[-1]] = index
                self._calls[ids[-1]] = call
            call.num_requests += len(ids)
            if len(ids) > 1:
                engine.arrange(ids)
            engine.add_wait(ids, waited)
        except BaseException:
            gone = range(first, engine.next_id)
            self._abandoned.extend(gone)
            # All ids taken since `first`: an interrupt may strike between submit_to and the append to `ids`.
            for request_id in gone:
                call.places.pop(request_id, None)
            raise

    def _examine(self, call: Call, check: Callable[[], None]) -> None:
        """Within a round: see `Call.examine`."""
        call.examine(check)
        self._refused = self._refused or call.refusal is not None

    def _sleep(self, call: Call) -> Update | None:
        """Wait while another thread is in a round."""
        self._sleeping[call] = None
        try:
            return call.take(_LONGEST_SLEEP) if self._in_round else None
        finally:
            self._sleeping.pop(call, None)

    def _lead(self, call: Call | None, me: int) -> None:
        """Run one round for all callers, unless a round of another thread has made this call ready meanwhile."""
        try:
            self._line_up(me, call)
            if call is not None and call.is_ready:
                return
            with self._lock:
                self._holder, self._leading, self._in_round = me, call, True
                try:
                    if self._abandoned:
                        self._forget_abandoned()
                    engine = self._open_engine
                    if engine is None:
                        return
                    self._deliver(engine)  # updates of an interrupted round
                    if call is not None and call.is_ready:
                        return
                    if self.forked:
                        use_own_threads()
                    with at_home(self._device, self._stream):
                        engine.step()
                        if self._refused:
                            engine.forget_prefixes()  # its round may have called what has changed
                            self._refused = False
                    self._deliver(engine)
                    if call is not None and call.places and call.inbox.empty() and not engine.has_work:
                        raise SpecdecError(
                            "these requests are no longer in the engine, and nothing reported their end: a bug"
                        )
                finally:
                    self._holder, self._leading, self._in_round = None, None, False
        finally:
            self._step_out(me)

    def _deliver(self, engine: Engine) -> None:
        """Put the last round's updates into the inboxes. After an interrupt again: `Call.take` drops repetitions."""
        updates = engine.reported
        if updates is self._delivered:
            return
        for update in updates:
            call = self._calls.get(update.request_id)
            if call is not None:
                call.inbox.put(update)
        self._delivered = updates
        for waiting in list(self._line.values()):
            waiting.put(None)  # a ready call need not wait for its turn

    def _forget_abandoned(self) -> None:
        ids = list(self._abandoned)
        if ids:
            if self._open_engine is not None:
                self._open_engine.abort(ids)
            for request_id in ids:
                self._calls.pop(request_id, None)
            for _ in ids:
                self._abandoned.popleft()

    def _pass_on(self) -> None:
        """Remove abandoned requests, and wake a sleeping call to run the next round.

        Every thread that holds the lock calls this afterwards, so work left while the lock is held gets done.
        """
        usable = not self._without_device
        while usable and self._abandoned and self._holder is None and self._lock.acquire(blocking=False):
            try:
                self._holder = get_ident()
                self._forget_abandoned()
            finally:
                self._holder = None
                self._lock.release()
        if self._sleeping and self._holder is None:
            for call in list(self._sleeping)[:1]:
                call.inbox.put(None)

    def _after_fork(self) -> None:
        """In a child process: only the thread that forked exists, and rounds of other threads do not continue."""
        gone, me = list(self._sleeping), get_ident()
        own = self._holder == me  # it forked inside a round, for example from a hook: the round continues here as well
        if not own:
            gone += [self._leading] if self._leading else []
            gone += {call for call in self._calls.values() if call.has_thread}
            self._lock, self._holder, self._leading, self._in_round = threading.Lock(), None, None, False
        self.forked, self._without_device = True, self._device.type == "cuda"
        self._sleeping, self._line = {}, {me: self._line[me]} if own and me in self._line else {}
        for call in gone:
            call.refusal = SpecdecError(READ_ELSEWHERE)  # for the thread that forked, if it has this stream, too
            self._let_go(call)


@after_fork
def _renew_after_fork() -> None:
    for shared in list(_engines):
        shared._after_fork()
