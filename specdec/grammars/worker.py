"""Calls of llguidance that can be given up: some grammars make it loop for ever, without a limit of its own.

A greedy term that takes what must follow it, as in Lark `/a*/ "a"`, leaves one byte that may come, for ever, and
llguidance (1.9.1) never ends the list of bytes that must come. The thread that runs such a call cannot be stopped, only
left behind.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class Worker:
    """llguidance's threads, and one of ours that waits for them. executor: llguidance's own threads."""

    def __init__(self, lib: Any) -> None:
        """lib: the module llguidance."""
        self.executor = lib.LLExecutor()
        self._calls: SimpleQueue[tuple[Callable[[], None], Future[None]]] = SimpleQueue()
        # A daemon, because one that is left behind must not keep the process from ending.
        threading.Thread(target=self._serve, name="specdec-grammars", daemon=True).start()

    def _serve(self) -> None:
        while True:
            call, outcome = self._calls.get()
            try:
                call()
            except BaseException as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(None)

    def returns(self, call: Callable[[], None], seconds: float) -> bool:
        """Run a call that releases the GIL; False where it has not returned by then: the worker is lost with it."""
        outcome: Future[None] = Future()
        self._calls.put((call, outcome))
        for _ in range(2):  # in halves: a process that was stopped for a while gets the second
            try:
                outcome.result(seconds / 2)
                return True
            except TimeoutError:
                if outcome.done():
                    raise
        return False


class Workers:
    """The worker of this process; a forked one has none of its parent's threads. lost: how many were left behind."""

    def __init__(self, lib: Any) -> None:
        """lib: the module llguidance."""
        self._lib, self._own = lib, dict[int, Worker]()
        self.lost = 0

    def returns(self, call: Callable[[Any], None], seconds: float) -> bool:
        """See `Worker.returns`; the call is given llguidance's threads."""
        pid = os.getpid()
        if pid not in self._own:
            self._own = {pid: Worker(self._lib)}
        worker = self._own[pid]
        if worker.returns(lambda: call(worker.executor), seconds):
            return True
        self._own, self.lost = {}, self.lost + 1
        return False
