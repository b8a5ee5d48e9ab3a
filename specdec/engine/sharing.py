"""One engine for callers on any thread: whoever waits for results runs the next round, for everybody.

There is no engine thread. A call that has nothing to hand out runs a round itself unless another thread is in one; then
it sleeps until that round has brought it something, or nobody is in a round any more. So requests of all threads share
the batch, one thread alone pays for a lock that nobody else holds, and a stream that is not read keeps nobody waiting:
its updates lie in its own inbox.

Interrupts (KeyboardInterrupt) strike the main thread between any two calls. So what must not be lost is a lock of
CPython's own in a with-statement, or one assignment, or it can be done twice.

A lock of CPython's goes to whoever asks first, and the thread that has just ended a round would ask for the next one
before those that wait are awake. So who wants the engine stands in a line, in which each is woken by the one before.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from queue import Empty, SimpleQueue
from threading import get_ident

import torch

from attention.hf.gate import use_own_threads
from specdec.engine.calls import Call
from specdec.engine.engine import Engine
from specdec.engine.scheduler import Usage
from specdec.engine.stats import EngineStats
from specdec.errors import ClosedModelError, SpecdecError
from specdec.requests.request import Update
from specdec.requests.submission import Submits
from specdec.torch_state import has_default_device, no_default_device

_LONGEST_SLEEP = 0.5
"""Seconds after which a sleeping call looks around unasked: an interrupted thread may not have woken it."""

_SHORT_SLEEP = 1e-3

_LONGEST_TURN = 0.2
"""Seconds after which the first in the line is left out, if nobody has the engine: it was interrupted."""

_CLOSED = (
    "this SpeculativeModel is closed; wrap its hf_model again with SpeculativeModel.from_pretrained(hf_model, …), or "
    "load one that was divided among ranks by its name"
)
_CLOSED_MEANWHILE = "the SpeculativeModel was closed while this request was running; read what is wanted before close()"
_READ_ELSEWHERE = (
    "another thread was waiting for this stream when the process was forked, and it is not in this process; ask again"
)
_NO_DEVICE = (
    "this process is a fork of the one that loaded the model onto a GPU, which no fork can use; load the model in a "
    "process that is a program of its own (multiprocessing: 'spawn')"
)

_engines: weakref.WeakSet[SharedEngine] = weakref.WeakSet()


class SharedEngine:
    """Lets threads share an `Engine`. Everything that touches the engine holds `_lock`; `_holder` says which thread.

    `_line` has the threads that want it or have it, in the order in which they came, and what each is woken by;
    `_in_round`: one has it for a round. `forked`: this process is a fork of the one that made it.
    """

    def __init__(self, engine: Engine, device: torch.device) -> None:
        """Rounds run on `device`, on the stream that is current there now, whichever thread runs them."""
        self._open_engine: Engine | None = engine
        self._last_stats = engine.stats
        self._device, self._device_type = device, device.type
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._line: dict[int, SimpleQueue[None]] = {}
        self._in_round = False
        self._calls: dict[int, Call] = {}
        self._sleeping: dict[Call, None] = {}
        self._leading: Call | None = None
        self._refused = self.forked = False
        self._abandoned: deque[int] = deque()
        self._delivered: list[Update] = engine.reported
        _engines.add(self)

    @property
    def _without_device(self) -> bool:
        return self.forked and self._device_type == "cuda"

    @property
    def stats(self) -> EngineStats:
        """The engine's counters; after `close` as they were then."""
        return self._last_stats if self._open_engine is None else self._open_engine.stats

    @property
    def _engine(self) -> Engine:
        """The open engine. Raises ClosedModelError after `close`."""
        if self._open_engine is None:
            raise ClosedModelError(_CLOSED)
        return self._open_engine

    def close(self) -> None:
        """End all requests and let go of the engine. Idempotent.

        Waits for a round that runs on another thread. What was reported before can still be read; then calls and
        streams that have requests left raise ClosedModelError.

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
                        self._deliver()
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
            raise ClosedModelError(_CLOSED)

    def usage(self) -> Usage:
        """What requests hold between two rounds: see `Engine.usage`. Raises SpecdecError inside a round."""
        with self.between_rounds():
            return self._engine.usage()

    def submit(self, requests: Sequence[Submits], check: Callable[[], None] | None = None) -> Call:
        """Queue the requests of a call.

        check: of the model, runs while the first round after this does; where it raises ModelChangedError, `next` does.

        Raises:
            InvalidInputError: a request is refused, see `Engine.submit`; none of the call is queued then.
            SpecdecError: called from inside a round.
        """
        call, me, asked = Call(), self._outside(), time.perf_counter()
        try:
            self._line_up(me)
            with self._lock:
                self._holder = me
                try:
                    self._forget_abandoned()
                    self._queue(call, requests, time.perf_counter() - asked)
                    if check is not None:
                        self._engine.meanwhile.append(partial(self._examine, call, check))
                finally:
                    self._holder = None
        except BaseException:
            self.abandon(call)
            raise
        finally:
            self._step_out(me)
            self._pass_on()
        return call

    def next(self, call: Call) -> tuple[int, Update] | None:
        """The call's next update, from its inbox or from rounds that are run for it, and whose it is in the call.

        None when all of the call is ended.

        Raises:
            SpecdecError: called from inside a round.
            ClosedModelError: the model was closed, and all that was reported before is handed out.
            ModelChangedError: what the call's check found, before its first update.
        """
        me = self._outside()
        try:
            while call.places or call.refusal is not None:
                if call.refusal is not None:
                    raise call.refusal
                update = call.take()
                if update is None and self._open_engine is None and call.inbox.empty():
                    call.places.clear()
                    raise ClosedModelError(_CLOSED_MEANWHILE)
                if update is None and self._in_round:
                    update = self._sleep(call)
                place = None if update is None else call.places.get(update.request_id)
                if update is not None and place is not None:
                    if update.last:
                        call.places.pop(update.request_id, None)
                        self._calls.pop(update.request_id, None)
                    return place, update
                if not self._in_round:
                    self._lead(call, me)
            return None
        finally:
            self._pass_on()

    def help(self) -> None:
        """Run a round for everybody, or sleep a moment where another thread is in one: for who waits for pages.

        Raises:
            SpecdecError: called from inside a round.
        """
        me = self._outside()
        try:
            if self._in_round:
                time.sleep(_SHORT_SLEEP)
            else:
                self._lead(None, me)
        finally:
            self._pass_on()

    def abandon(self, call: Call) -> None:
        """End what is left of a call: at once, or after the round that is running.

        May be called on any thread at any moment, by a finalizer inside a round too: it waits for nothing.
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
        """Hold the engine, so that no round runs inside; yields whether it has no request.

        Raises:
            SpecdecError: called from inside a round.
        """
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
        """Wait until all who came before have had the engine, or there is something for `call`.

        `_step_out` must follow, whatever happens.
        """
        own: SimpleQueue[None] = SimpleQueue()
        self._line[me] = own
        while self._line.get(me) is own:  # else a signal handler on this thread has had it in its place
            first = next(iter(list(self._line)), me)
            if first == me or (call is not None and _has_something(call)):
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
            raise SpecdecError(_NO_DEVICE)
        if self._holder == me:
            raise SpecdecError("the model was called from inside one of its own rounds (by its tokenizer or a hook)")
        return me

    def _queue(self, call: Call, requests: Sequence[Submits], waited: float) -> None:
        first = self._engine.next_id
        self._engine.check_weights()
        try:
            for index, request in enumerate(requests):
                request_id = request.submit_to(self._engine)
                call.places[request_id] = index
                self._calls[request_id] = call
            if len(call.places) > 1:
                self._engine.arrange(list(call.places))
            self._engine.add_wait(list(call.places), waited)
        except BaseException:
            self._abandoned.extend(range(first, self._engine.next_id))
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
        """Run one round for everybody, unless another thread's has brought this call something meanwhile."""
        try:
            self._line_up(me, call)
            if call is not None and _has_something(call):
                return
            with self._lock:
                self._holder, self._leading, self._in_round = me, call, True
                try:
                    if self._open_engine is not None:
                        self._round(call)
                finally:
                    self._holder, self._leading, self._in_round = None, None, False
        finally:
            self._step_out(me)

    def _round(self, call: Call | None) -> None:
        self._forget_abandoned()
        self._deliver()
        if call is None or not _has_something(call):
            with self._at_home():
                self._engine.step()
                if self._refused:
                    self._engine.forget_prefixes()  # its round may have called what has changed
                    self._refused = False
            self._deliver()
            if call is not None:
                self._check_alive(call)

    def _deliver(self) -> None:
        """Hand out what the last round reported. After an interrupt it is handed out again; a `Call` sees to that."""
        updates = self._engine.reported
        if updates is self._delivered:
            return
        for update in updates:
            call = self._calls.get(update.request_id)
            if call is not None:
                call.inbox.put(update)
        self._delivered = updates
        for waiting in list(self._line.values()):
            waiting.put(None)  # whoever has got something need not wait for its turn

    def _check_alive(self, call: Call) -> None:
        if call.places and call.inbox.empty() and not self._engine.has_work:
            raise SpecdecError("these requests are no longer in the engine, and nothing reported their end: a bug")

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
        """Before a thread goes: forget what was abandoned, and wake a sleeping call to run the next round.

        Whoever holds the lock comes here after; so what is left to do while it is held is never left undone.
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

    def _at_home(self) -> AbstractContextManager[object]:
        """What is a thread's own in torch, the same for every round: devices, stream, no autocast."""
        use_own_threads()
        autocast = torch.is_autocast_enabled(self._device_type)
        default = has_default_device()
        if self._stream is None and not autocast and not default:
            return nullcontext()
        home = ExitStack()
        if self._stream is not None:
            home.enter_context(torch.cuda.device(self._device))
            home.enter_context(torch.cuda.stream(self._stream))
        if autocast:
            home.enter_context(torch.autocast(self._device_type, enabled=False))
        if default:
            home.enter_context(no_default_device())
        return home

    def _after_fork(self) -> None:
        """In a child process: only the thread that forked is left, and nobody else's round goes on."""
        gone, me = list(self._sleeping), get_ident()
        own = self._holder == me  # it forked inside a round, from a hook for example: that goes on here as well
        if not own:
            gone += [self._leading] if self._leading else []
            self._lock, self._holder, self._leading, self._in_round = threading.Lock(), None, None, False
        self.forked = True
        self._sleeping, self._line = {}, {me: self._line[me]} if own and me in self._line else {}
        for call in gone:
            call.refusal = SpecdecError(_READ_ELSEWHERE)  # for the thread that forked, if it has this stream, too
            self._let_go(call)


def _has_something(call: Call) -> bool:
    """Whether its caller has something to read, or nothing to wait for."""
    return not call.places or not call.inbox.empty()


def _renew_after_fork() -> None:
    for shared in list(_engines):
        shared._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)
