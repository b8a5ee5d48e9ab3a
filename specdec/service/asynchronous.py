"""Asynchronous calls: one thread leads rounds for all of a model's, and hands their updates to their event loops.

The engine has no thread of its own: a caller runs the round for all. An event loop must not, so a thread does it for
all of them (`Leader`), as one call of the engine that stays open. What a round brings is put into the streams at once,
and each event loop is woken once a round at most. A second thread reads prompts and parameters, in the order of the
calls: a tokenizer or a grammar's compiler stops neither rounds nor event loops.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

from specdec.engine.calls import CLOSED_MEANWHILE, READ_ELSEWHERE, Call
from specdec.engine.sharing import SharedEngine
from specdec.engine.streams import Stream, StreamUpdate, raise_first
from specdec.errors import ClosedModelError, SpecdecError
from specdec.requests.request import Completion, Update

MOST_UNREAD = 16
"""Updates that wait for a slow reader before new ones are added to the last one of the same completion."""
_FAILED = "the thread that leads rounds for asynchronous calls was struck by an error from outside, ask again"
_LONGEST_END = 5.0
"""Seconds to wait for the thread when the model is closed or the process ends."""

_leaders: weakref.WeakSet[Leader] = weakref.WeakSet()


class AsyncStream(AsyncIterator[StreamUpdate]):
    """The updates of one asynchronous call, to be read in one event loop. Its requests are queued at the first read.

    A slow reader delays nobody: what it has not read is kept, in at most `MOST_UNREAD` updates and one for each
    completion. A task that is cancelled while it reads cancels the requests: their rows and pages are free after the
    round that runs. A failed request does not end the others of its call: its error is raised after their last update.

    `cancel` and `close` may be called on any thread.
    """

    def __init__(self, leader: Leader, make: Callable[[], Stream]) -> None:
        """make: reads the call's prompts and parameters; runs on another thread."""
        self._leader, self._make = leader, make
        self.loop: AbstractEventLoop | None = None
        self.part = Call()
        self.requests: Stream | None = None
        self._lock = threading.Lock()
        self._changed = asyncio.Event()
        self._unread: deque[StreamUpdate] = deque()
        self._errors: list[SpecdecError] = []
        self._failure: BaseException | None = None
        self._places: dict[int, int] | None = None
        self._cancelled: deque[tuple[int, ...]] = deque()
        self._whole = self._signalled = self.closed = False

    def __repr__(self) -> str:
        left = "not queued" if self._places is None else f"{len(self._places)} completions to come"
        return f"AsyncStream({'closed' if self.closed else left}, {len(self._unread)} unread updates)"

    async def __anext__(self) -> StreamUpdate:
        """Raises as `start`; after the last update RequestFailedError or RoundFailedError, when requests failed;
        ClosedModelError when the model was closed meanwhile."""
        try:
            await self.start()
            while (found := self._next()) is None:
                await self._change()
            return found
        except BaseException:
            self.close()
            raise

    async def start(self) -> None:
        """Queue the requests now, if they are not, and wait until they are.

        Raises:
            InvalidInputError: a bad prompt or parameter. QueueFullError, DrainingError, ClosedModelError,
            ModelChangedError: the model takes no such requests, or none at the moment. SpecdecError: in a fork.
        """
        if self.loop is None:
            self._leader.check()
            self.loop = asyncio.get_running_loop()
            try:
                self.requests = await self.loop.run_in_executor(self._leader.readers, self._make)
                self._leader.add(self)
            except BaseException as error:
                self._failure = error
                self.close()
                raise
        while self._is_pending():
            await self._change()
        if self._failure is not None and not self._unread:
            raise self._failure

    async def completions(self) -> list[Completion]:
        """Read to the end: the completions in order. `cancel` ends them early. Raises as reading does."""
        self._whole = True
        done = {update.index: update.completion async for update in self if update.completion is not None}
        return [done[i] for i in sorted(done)]

    def cancel(self, *indices: int) -> None:
        """End these completions of the call, by their places in it, or all: each is reported with the tokens that it
        has, finish reason "cancelled". Never waits; nothing where they have ended."""
        self._cancelled.append(indices)
        self.pass_on_cancelled()

    def close(self) -> None:
        """Cancel unfinished requests and read no more. Idempotent, never waits."""
        self.closed = True
        self.cancel()
        self._unread.clear()
        self._leader.kept.discard(self)
        if self.loop is not None and self.needs_signal():
            signal_all(self.loop, [self])

    async def aclose(self) -> None:
        """As `close`, for `contextlib.aclosing`."""
        self.close()

    def __del__(self) -> None:
        with suppress(AttributeError):  # __init__ did not come to its end, or the interpreter ends
            if self._places:
                self.cancel()

    async def _change(self) -> None:
        """Wait for a signal since the state was looked at; meanwhile the leader keeps the stream alive."""
        self._leader.kept.add(self)
        try:
            await self._changed.wait()
        finally:
            self._leader.kept.discard(self)

    def _look(self) -> None:
        """To be called before the state is read: every change after it is signalled."""
        self._leader.check_process()
        self._changed.clear()
        self._signalled = False

    def _is_pending(self) -> bool:
        """Whether its requests are not queued yet, and may be."""
        self._look()
        return self._places is None and self._failure is None and not self.closed

    def _next(self) -> StreamUpdate | None:
        """An update that is there. Raises StopAsyncIteration at the end, or what ended the call."""
        self._look()
        with self._lock:
            if self._unread:
                return self._unread.popleft()
            going_on = bool(self._places) and not self.closed
        if self._failure is not None:
            raise self._failure
        if going_on:
            return None
        if self._errors:
            errors, self._errors = self._errors, []
            raise_first(errors)
        raise StopAsyncIteration

    # What follows is for the leader's thread.

    def queued(self, places: range) -> None:
        """Its requests are in the engine, at these places of the leader's call."""
        self._places = dict(enumerate(places))
        self.pass_on_cancelled()

    def pass_on_cancelled(self) -> None:
        """Also called once the requests are queued: they may have been cancelled while they were not."""
        while self._places is not None and self._cancelled:
            with suppress(IndexError):  # another thread was faster
                indices, left = self._cancelled.popleft(), self._places.copy()
                if places := [place for index, place in left.items() if not indices or index in indices]:
                    self._leader.shared.cancel(self._leader.call, places)

    def put(self, index: int, update: Update) -> bool:
        """Take an update; a slow reader finds several in one. Returns whether there is something to read."""
        new = StreamUpdate(index, update.token_ids, update.text, update.completion, update.logprobs)
        with self._lock:
            if update.last and self._places is not None:
                self._places.pop(index, None)
            if update.error is not None:
                self._errors.append(update.error)
            elif not self.closed and (update.last or not self._whole):
                self._keep(new)
        return bool(self._unread) or not self._places

    def _keep(self, new: StreamUpdate) -> None:
        unread = self._unread
        for place in reversed(range(len(unread) if len(unread) >= MOST_UNREAD else 0)):
            if unread[place].index == new.index:
                unread[place] = merged(unread[place], new)
                return
        unread.append(new)

    def fail(self, error: BaseException) -> None:
        """End the call by an error, raised after the updates that it has."""
        self._failure = self._failure or error
        self.cancel()

    def needs_signal(self) -> bool:
        """Whether its loop must be told of a change: once, until the reader looks."""
        signalled, self._signalled = self._signalled, True
        return not signalled

    def signal(self) -> None:
        """In its event loop: wake the reader."""
        self._changed.set()


def merged(first: StreamUpdate, then: StreamUpdate) -> StreamUpdate:
    """Two updates of one completion as one."""
    ids, text = [*first.token_ids, *then.token_ids], first.text + then.text
    told = (
        None if first.logprobs is None and then.logprobs is None else (*(first.logprobs or ()), *(then.logprobs or ()))
    )
    return StreamUpdate(first.index, ids, text, then.completion, told)


def signal_all(loop: AbstractEventLoop, streams: list[AsyncStream]) -> None:
    """Wake the readers of these streams of one event loop. Where it is closed nobody reads them: they are closed."""
    try:
        loop.call_soon_threadsafe(_signal, streams)
    except RuntimeError:
        for stream in streams:
            stream.close()


def _signal(streams: list[AsyncStream]) -> None:
    for stream in streams:
        stream.signal()


class Leader:
    """Leads rounds for all asynchronous calls of a model, on a thread that begins with the first call.

    The thread refers to it only while there is something to do: a model that was dropped is collected.

    Attributes:
        shared: the model's engine. call: of all requests, open as long as the model is. readers: the thread on which
            prompts and parameters are read. kept: streams whose readers wait. process: it belongs to this one.
    """

    def __init__(self, shared: SharedEngine) -> None:
        self.shared, self.call = shared, Call(has_thread=True)
        self.readers = ThreadPoolExecutor(1, "specdec-prompts")
        self.kept: set[AsyncStream] = set()
        self.process = os.getpid()
        self._new: deque[AsyncStream] = deque()
        self._owners: dict[int, tuple[weakref.ref[AsyncStream], int]] = {}
        self._told: set[AsyncStream] = set()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._change = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ended = False
        weakref.finalize(self, self._wake.put, None).atexit = False
        _leaders.add(self)

    def check_process(self) -> None:
        """Raises SpecdecError in a fork of the process whose thread leads."""
        if self.process != os.getpid():
            raise SpecdecError(READ_ELSEWHERE)

    def check(self) -> None:
        """Raises SpecdecError in a fork, ClosedModelError after the model's `close`."""
        self.check_process()
        self.shared.check_open()

    def add(self, stream: AsyncStream) -> None:
        """Queue a stream's requests before the next round. Raises ClosedModelError after `end`."""
        with self._change:
            if self._ended:
                raise ClosedModelError(CLOSED_MEANWHILE)
            self._new.append(stream)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=_run, args=(weakref.ref(self), self._wake), name="specdec-leader", daemon=True
                )
                self._thread.start()
        self._wake.put(None)

    def end(self) -> None:
        """End the thread; calls that are open raise ClosedModelError after the updates that they have."""
        with self._change:
            self._ended, thread = True, self._thread
        self._wake.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(_LONGEST_END)
        self.readers.shutdown(wait=False)

    def lead(self) -> bool:
        """On its thread: run rounds until nothing is left to do. False at the end."""
        try:
            while True:
                while not self._wake.empty():
                    self._wake.get()
                if self._ended:
                    raise ClosedModelError(CLOSED_MEANWHILE)
                if not self._new and not self._owners:
                    return True
                self._queue_new()
                if self._owners:
                    self.shared.help()
                self._hand_over()
                self.shared.check_open()
        except BaseException as error:
            self._hand_over()
            self._fail(error)
            return isinstance(error, Exception) and not self._ended

    def _queue_new(self) -> None:
        while self._new:
            stream = self._new.popleft()
            if stream.closed or stream.requests is None:
                continue
            self._told.add(stream)
            try:
                requests, check = stream.requests.hand_over()
                first = self.call.num_requests
                self.shared.submit(requests, check, self.call, stream.part)
            except Exception as error:
                stream.fail(error)
                continue
            own = weakref.ref(stream)
            self._owners.update({first + index: (own, index) for index in range(len(requests))})
            stream.queued(range(first, first + len(requests)))

    def _hand_over(self) -> None:
        """What the last round has brought goes into the streams, and their event loops are told."""
        told, self._told = self._told, set()
        for place, update in self.shared.received(self.call):
            own, index = self._owners[place] if not update.last else self._owners.pop(place)
            if (stream := own()) is None:
                continue
            if stream.part.refusal is not None:
                stream.closed = True  # as `SharedEngine.next`, which reads no update of a refused call
                stream.fail(stream.part.refusal)
            if stream.put(index, update):
                told.add(stream)
        _tell(told)

    def _fail(self, error: BaseException) -> None:
        """End all calls that are open."""
        closed = isinstance(error, ClosedModelError)
        each = {stream for own, _ in self._owners.values() if (stream := own()) is not None}
        new = [self._new.popleft() for _ in range(len(self._new))]
        for stream in (*each, *new):
            mine = ClosedModelError(CLOSED_MEANWHILE) if closed else SpecdecError(f"{_FAILED}: {error!r}")
            mine.__cause__ = None if closed else error
            stream.fail(mine)
        self._owners.clear()
        self.shared.abandon(self.call)
        self.call = Call(has_thread=True)
        _tell({*each, *new})


def _tell(streams: set[AsyncStream]) -> None:
    """Wake the readers of these streams: one callback for each event loop."""
    by_loop: dict[AbstractEventLoop, list[AsyncStream]] = {}
    for stream in streams:
        if stream.loop is not None and stream.needs_signal():
            by_loop.setdefault(stream.loop, []).append(stream)
    for loop, own in by_loop.items():
        signal_all(loop, own)


def _run(leader_of: weakref.ref[Leader], wake: SimpleQueue[None]) -> None:
    """The thread."""
    while True:
        wake.get()
        leader = leader_of()
        if leader is None or not leader.lead():
            return
        del leader


def leader_of(model: Any) -> Leader:
    """The leader of a `SpeculativeModel`, made at its first asynchronous call; the model ends it when it is closed."""
    found: Leader = vars(model).setdefault("_leader", Leader(model._shared))
    if found.process != os.getpid():
        found = vars(model)["_leader"] = Leader(model._shared)
    return found


def stream_of(model: Any, prompts: Any, params: Any, options: dict[str, Any]) -> AsyncStream:
    """See `SpeculativeModel.stream_async`."""
    return AsyncStream(leader_of(model), partial(model.stream, prompts, params, **options))


@atexit.register
def _end_all() -> None:
    """A thread that is inside torch while the interpreter ends may crash the process."""
    for leader in list(_leaders):
        if leader.process == os.getpid():
            leader.end()
