"""Leader: one thread leads rounds for all of a model's, and hands their updates to their event loops.

The engine has no thread: a caller runs the round for all. An event loop must not block, so one thread runs rounds for
all of them, as one call of the engine that stays open. A round's updates are put into the streams at once, and each
event loop is woken at most once a round. A second thread reads prompts and parameters, in the order of the calls, so
that a tokenizer stops neither rounds nor event loops. A third one reads long prompts, and a fourth one the calls that
have grammars, whose compiler may take seconds.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from asyncio import AbstractEventLoop
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

from attention.threads import start_thread
from specdec.engine.sharing import CLOSED_MEANWHILE, READ_ELSEWHERE, SharedEngine
from specdec.errors import ClosedModelError, SpecdecError
from specdec.extensions.service.asynchronous import AsyncStream, signal_all
from specdec.requests.chats import num_characters, prompts_in
from specdec.requests.request import Call
from specdec.values import Options, listed

_FAILED = "the thread that leads rounds for asynchronous calls was struck by an error from outside, ask again"
_LONGEST_END = 5.0
"""Seconds to wait for the thread when the model is closed or the process ends."""

_LONG = 50_000
"""Characters of a call, with its tools, whose tokens take as long as a round or more."""
_MANY = 100
"""Prompts or messages of a call that take as long."""

_leaders: weakref.WeakSet[Leader] = weakref.WeakSet()


class Leader:
    """Leads rounds for all asynchronous calls of a model, on a thread that begins with the first call.

    The thread refers to it only while it has work, so that a model that was dropped is collected.

    Attributes:
        shared: the model's engine. call: the call of all requests, open as long as the model is. readers: the thread
            that reads prompts and parameters, the thread for long prompts, and the thread for grammars. kept: streams
            whose readers wait. process: id of the process that it belongs to.
    """

    def __init__(self, shared: SharedEngine) -> None:
        self.shared = shared
        self.call = Call(has_thread=True)
        names = ("specdec-prompts", "specdec-long-prompts", "specdec-grammar-prompts")
        self.readers = [ThreadPoolExecutor(1, name) for name in names]
        self.kept = set[AsyncStream]()
        self.process = os.getpid()
        self.new = deque[AsyncStream]()
        self.owners: dict[int, tuple[weakref.ref[AsyncStream], int]] = {}
        self._told = set[AsyncStream]()
        self._wake = SimpleQueue[None]()
        self._change = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ended = False
        # Wakes the thread when the leader is collected, so that it ends. At exit `_end_all` does that.
        weakref.finalize(self, self._wake.put, None).atexit = False
        _leaders.add(self)

    def check_process(self) -> None:
        """Raises SpecdecError in a fork of the process whose thread leads."""
        if self.process != os.getpid():
            raise SpecdecError(READ_ELSEWHERE)

    def add(self, stream: AsyncStream) -> None:
        """Queue a stream's requests before the next round. Raises ClosedModelError after `end`."""
        with self._change:
            if self._ended:
                raise ClosedModelError(CLOSED_MEANWHILE)
            self.new.append(stream)
            if self._thread is None or not self._thread.is_alive():
                self._thread = start_thread(_run, weakref.ref(self), self._wake, name="specdec-leader")
        self._wake.put(None)

    def end(self) -> None:
        """End the thread; calls that are open raise ClosedModelError after the updates that they have."""
        with self._change:
            self._ended = True
            thread = self._thread
        self._wake.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(_LONGEST_END)
        for readers in self.readers:
            readers.shutdown(wait=False)

    def lead(self) -> bool:
        """On its thread: run rounds until nothing is left to do. False at the end."""
        try:
            while True:
                while not self._wake.empty():
                    self._wake.get()
                if self._ended:
                    raise ClosedModelError(CLOSED_MEANWHILE)
                if not self.new and not self.owners:
                    return True
                self._queue_new()
                if self.owners:
                    self.shared.help()
                self._hand_over()
                self.shared.check_open()
        except BaseException as error:
            with suppress(Exception):  # what raised may raise again
                self._hand_over()
            self.fail(error)
            return isinstance(error, Exception) and not self._ended

    def _queue_new(self) -> None:
        while self.new:
            stream = self.new.popleft()
            if stream.closed or stream.requests is None:
                continue
            self._told.add(stream)
            try:
                requests, check = stream.requests.hand_over()
                first = self.call.num_requests
                self.shared.submit(requests, check, self.call, stream.part)
            except Exception as error:  # a refusal or a failed check of the model: of this call alone
                stream.fail(error)
                continue
            # Weak: a stream that its reader drops is collected, and cancels its requests.
            own = weakref.ref(stream)
            self.owners.update({first + index: (own, index) for index in range(len(requests))})
            stream.queued(range(first, first + len(requests)))

    def _hand_over(self) -> None:
        """Put the updates of the last round into the streams, and wake their event loops."""
        told = self._told
        self._told = set()
        for place, update in self.shared.received(self.call):
            own, index = self.owners[place] if not update.last else self.owners.pop(place)
            if (stream := own()) is None:
                continue
            if stream.part.refusal is not None:
                stream.closed = True  # as `SharedEngine.next`, which reads no update of a refused call
                stream.fail(stream.part.refusal)
            if stream.put(index, update):
                told.add(stream)
        _tell(told)

    def fail(self, error: BaseException) -> None:
        """End all calls that are open."""
        closed = isinstance(error, ClosedModelError)
        each = {stream for own, _ in self.owners.values() if (stream := own()) is not None}
        new = [self.new.popleft() for _ in range(len(self.new))]
        for stream in (*each, *new):
            mine = ClosedModelError(CLOSED_MEANWHILE) if closed else SpecdecError(f"{_FAILED}: {error!r}")
            mine.__cause__ = None if closed else error
            stream.fail(mine)
        self.owners.clear()
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
        # Else this frame would keep the leader alive while the thread waits.
        del leader


def leader_of(model: Any) -> Leader:
    """The leader of a `SpeculativeModel`, made at its first asynchronous call; the model ends it when it is closed."""
    found: Leader | None = vars(model).get("_leader")
    if found is None:
        found = vars(model).setdefault("_leader", Leader(model._shared))  # another thread may have been faster
    if found.process != os.getpid():  # a fork, in which the parent's threads do not run
        found = vars(model)["_leader"] = Leader(model._shared)
    model.engine.coming = found.new
    return found


def stream_of(model: Any, prompts: Any, params: Any, options: Options) -> AsyncStream:
    """See `SpeculativeModel.stream_async`."""
    leader = leader_of(model)
    has_grammar = any(
        getattr(each, "grammar", None) is not None for each in (*listed(params), SimpleNamespace(**options))
    )
    # Other calls do not wait behind one whose texts take long to tokenise.
    is_long = len(prompts_in(prompts)) > _MANY or num_characters([prompts, options]) > _LONG
    readers = leader.readers[2 if has_grammar else 1 if is_long else 0]
    return AsyncStream(leader, partial(model.stream, prompts, params, **options), readers)


@atexit.register
def _end_all() -> None:
    """A thread that is inside torch while the interpreter ends may crash the process."""
    for leader in list(_leaders):
        if leader.process == os.getpid():
            leader.end()
