"""AsyncStream: the updates of one asynchronous call, handed over from the thread that leads rounds."""

from __future__ import annotations

import asyncio
import threading
import weakref
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from typing import Any, Self

from specdec.engine.streams import Stream, StreamUpdate, placed, raise_first
from specdec.errors import ENDED, SpecdecError
from specdec.requests.request import Call, Completion, Update

MOST_UNREAD = 16
"""Updates that wait for a slow reader before new ones are added to the last one of the same completion."""


class AsyncStream(AsyncIterator[StreamUpdate]):
    """The updates of one asynchronous call, to be read in one event loop. Its requests are queued at the first read.

    A slow reader delays no others: unread updates are kept, at most `MOST_UNREAD` and one for each
    completion. A task that is cancelled while it reads cancels the requests: their rows and pages are free after the
    round that runs. A failed request does not end the others of its call: its error is raised after their last update.

    `cancel` and `close` may be called on any thread. `async with` closes it at its end.
    """

    def __init__(self, leader: Any, make: Callable[[], Stream], readers: Executor | None = None) -> None:
        """leader: a `Leader`. make: reads the call's prompts and parameters, in `readers`."""
        self._leader = leader
        self._make = make
        self._readers = readers
        self.loop: AbstractEventLoop | None = None
        self.part = Call()
        self.requests: Stream | None = None
        self.prompts: list[list[int]] = []  # of each completion, from `start` on
        self._lock = threading.Lock()
        self.changed = asyncio.Event()
        self._unread = deque[StreamUpdate]()
        self._errors: list[SpecdecError] = []
        self.failure: BaseException | None = None
        self._places: dict[int, int] | None = None
        self.task: asyncio.Task[Any] | None = None
        self._cancelled = deque[tuple[int, ...]]()
        self._whole = self._signalled = self.closed = False

    def __repr__(self) -> str:
        left = "not queued" if self._places is None else f"{len(self._places)} completions to come"
        return f"AsyncStream({'closed' if self.closed else left}, {len(self._unread)} unread updates)"

    async def __anext__(self) -> StreamUpdate:
        """Raises as `start`; after the last update RequestFailedError or RoundFailedError, when requests failed;
        ClosedModelError when the model was closed meanwhile."""
        self._leader.check_process()
        self._follow_task()
        try:
            if self._places is None:
                await self.start()
            while (found := self._next()) is None:
                await self._change()
            return found
        except BaseException:  # asyncio.CancelledError is no Exception: a cancelled read cancels the requests
            self.close()
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def start(self) -> None:
        """Queue the requests now, if they are not, and wait until they are.

        Raises:
            InvalidInputError: a bad prompt or parameter. QueueFullError, DrainingError, ClosedModelError,
            ModelChangedError: the model takes no such requests, or none at the moment. SpecdecError: in a fork.
        """
        if self.loop is None:
            self._leader.check_process()
            self._leader.shared.check_open()
            self.loop = asyncio.get_running_loop()
            try:
                self.requests = await self.loop.run_in_executor(self._readers, self._make)
                self.prompts = [each.token_ids for each in self.requests.unread]
                self._leader.add(self)
            except BaseException as error:
                self.failure = error
                self.close()
                raise
        while self._is_pending():
            await self._change()
        if self.failure is not None and not self._unread:
            raise self.failure

    def unread(self) -> list[StreamUpdate]:
        """Take the updates that are there, without waiting."""
        with self._lock:
            found = list(self._unread)
            self._unread.clear()
        return found

    async def completions(self) -> list[Completion]:
        """Read to the end: the completions in order. `cancel` ends them early. Raises as reading does."""
        self._whole = True
        done = {}
        try:
            async for update in self:
                if update.completion is not None:
                    done[update.index] = update.completion
        except ENDED as error:
            error.completions = done
            raise
        return [done[i] for i in sorted(done)]

    def cancel(self, *indices: int) -> None:
        """End the completions at these `indices` of the call, or all: each is reported with the tokens that it
        has, finish reason "cancelled". Never waits; nothing where they have ended."""
        self._cancelled.append(indices)
        self.pass_on_cancelled()

    def close(self) -> None:
        """Cancel unfinished requests and read no more. Idempotent, never waits."""
        self.closed = True
        self.cancel()
        with self._lock:
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
                self.closed = True
                self.cancel()

    def _follow_task(self) -> None:
        """The task that reads: cancelled outside of a read, in its own code, it ends the stream too."""
        task = asyncio.current_task()
        if task is not self.task and task is not None:
            self.task = task
            task.add_done_callback(partial(_close_if_cancelled, weakref.ref(self)))

    async def _change(self) -> None:
        """Wait for a signal since the state was looked at; meanwhile the leader keeps the stream alive."""
        self._leader.kept.add(self)
        try:
            await self.changed.wait()
        finally:
            self._leader.kept.discard(self)

    def _look(self) -> None:
        """To be called before the state is read, so that every later change is signalled."""
        self._leader.check_process()
        self.changed.clear()
        self._signalled = False

    def _is_pending(self) -> bool:
        """Whether its requests are not queued yet, and may be."""
        self._look()
        return self._places is None and self.failure is None and not self.closed

    def _next(self) -> StreamUpdate | None:
        """An update that is there. Raises StopAsyncIteration at the end, or what ended the call."""
        self._look()
        with self._lock:
            if self._unread:
                return self._unread.popleft()
            going_on = bool(self._places) and not self.closed
        if self.failure is not None:
            raise self.failure
        if going_on:
            return None
        raise_first(self._errors)
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
                indices = self._cancelled.popleft()
                left = self._places.copy()
                if places := [place for index, place in left.items() if not indices or index in indices]:
                    self._leader.shared.cancel(self._leader.call, places, self.closed)

    def put(self, index: int, update: Update) -> bool:
        """Take an update; a slow reader finds several in one. Returns whether the reader has something to read."""
        new = StreamUpdate(index, update.token_ids, update.text, update.completion, update.logprobs)
        with self._lock:
            if update.last and self._places is not None:
                self._places.pop(index, None)
            if update.error is not None:
                self._errors.append(placed(update.error, index))
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
        self.failure = self.failure or error
        self.cancel()

    def needs_signal(self) -> bool:
        """Whether its event loop must be woken for a change: once, until the reader looks."""
        signalled = self._signalled
        self._signalled = True
        return not signalled


def _close_if_cancelled(stream_of: weakref.ref[AsyncStream], task: asyncio.Task[Any]) -> None:
    stream = stream_of()
    if stream is not None and task is stream.task and task.cancelled():  # its last reader
        stream.close()


def merged(first: StreamUpdate, then: StreamUpdate) -> StreamUpdate:
    """Merge two updates of one completion."""
    ids = first.token_ids + then.token_ids
    text = first.text + then.text
    told = (
        None if first.logprobs is None and then.logprobs is None else (*(first.logprobs or ()), *(then.logprobs or ()))
    )
    return StreamUpdate(first.index, ids, text, then.completion, told)


def signal_all(loop: AbstractEventLoop, streams: list[AsyncStream]) -> None:
    """Wake the readers of these streams of one event loop. If the loop is closed, close the streams."""
    try:
        loop.call_soon_threadsafe(_signal, streams)
    except RuntimeError:
        for stream in streams:
            stream.close()


def _signal(streams: list[AsyncStream]) -> None:
    """In their event loop: wake the readers."""
    for stream in streams:
        stream.changed.set()
