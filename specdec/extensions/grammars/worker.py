"""Calls of llguidance that can be abandoned: some grammars make it loop forever, and it has no time limit.

A greedy term that takes what must follow it, as in Lark `/a*/ "a"`, always leaves exactly one allowed byte, so
llguidance (1.9.1) never completes the list of forced bytes. The thread that runs such a call cannot be stopped, only
abandoned.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from queue import SimpleQueue
from typing import Any

from attention.cached import cached_property
from attention.threads import start_thread


class GrammarThread:
    """A thread that waits for llguidance. executor: llguidance's own threads, made when they are first needed."""

    def __init__(self, lib: Any) -> None:
        """lib: the module llguidance."""
        self._lib = lib
        self._calls = SimpleQueue[tuple[Callable[[GrammarThread], None], Future[None]]]()
        # A daemon, because one that is left behind must not keep the process from ending.
        start_thread(self._serve, name="specdec-grammars")

    @cached_property
    def executor(self) -> Any:
        """llguidance's own threads; lost with a call that does not return."""
        return self._lib.LLExecutor()

    def _serve(self) -> None:
        while True:
            call, outcome = self._calls.get()
            try:
                call(self)
            except BaseException as error:  # raised again on the caller's thread, by `Future.result`
                outcome.set_exception(error)
            else:
                outcome.set_result(None)

    def returns(self, call: Callable[[GrammarThread], None], seconds: float | None) -> bool:
        """Run a call that releases the GIL; False where it has not returned by then: the worker is lost with it.

        seconds None: the caller's thread makes the call, however long it takes.
        """
        if seconds is None:
            call(self)
            return True
        outcome: Future[None] = Future()
        self._calls.put((call, outcome))
        for _ in range(2):  # in halves: a process that was stopped for a while gets the second
            try:
                outcome.result(seconds / 2)
                return True
            except TimeoutError:
                if outcome.done():  # the call itself raised a TimeoutError
                    raise
        return False


class GrammarThreads:
    """The workers of this process, one for each call that runs. lost: how many were left behind."""

    def __init__(self, lib: Any) -> None:
        """lib: the module llguidance."""
        self._lib = lib
        self.lost = 0
        self._idle: dict[int, list[GrammarThread]] = {}

    def returns(self, call: Callable[[GrammarThread], None], seconds: float | None) -> bool:
        """See `GrammarThread.returns`. No call waits for another: compiling may take longer than masks may."""
        idle = self._idle.setdefault(os.getpid(), [])  # a forked process has none of its parent's threads
        try:
            worker = idle.pop()
        except IndexError:
            worker = GrammarThread(self._lib)
        try:
            returned = worker.returns(call, seconds)
        except Exception:  # of the call, which is over
            idle.append(worker)
            raise
        if returned:
            idle.append(worker)
        else:
            self.lost += 1
        return returned


@cache
def workers_of(lib: Any) -> GrammarThreads:
    """The workers for all tokenizers of this process."""
    return GrammarThreads(lib)
