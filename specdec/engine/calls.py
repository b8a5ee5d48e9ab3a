"""Call: one caller's requests in a shared engine, and its inbox of updates."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from specdec.errors import ModelChangedError, SpecdecError
from specdec.interrupts import raised_twice
from specdec.requests.request import Update

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


class Call:
    """The requests of one call, and their updates.

    Attributes:
        places: request id -> index in the call, of the requests that are not ended.
        inbox: updates, and None to wake the sleeping caller.
        num_requests: queued so far. refusal: why the call cannot be served, found during its first round.
        made: creation time, in time.perf_counter seconds. has_thread: a dedicated thread reads the call; a forked
            process does not have that thread.
    """

    def __init__(self, has_thread: bool = False) -> None:
        self.refusal: SpecdecError | None = None
        self.places: dict[int, int] = {}
        self.inbox: SimpleQueue[Update | None] = SimpleQueue()
        self._last: dict[int, Update] = {}
        self.num_requests, self.made, self.has_thread = 0, time.perf_counter(), has_thread

    @property
    def is_ready(self) -> bool:
        """Whether its caller has an update to read, or nothing left to wait for."""
        return not self.places or not self.inbox.empty()

    def take(self, timeout: float = 0.0) -> Update | None:
        """The next update; None if none arrives within `timeout` seconds or the call is woken."""
        try:
            update = self.inbox.get(timeout > 0, timeout)
        except Empty:
            return None
        if update is None or self._last.get(update.request_id) is update:
            return None  # an interrupted delivery was repeated
        if update.last:
            self._last.pop(update.request_id, None)  # a repetition has no place any more: see `SharedEngine.next`
        else:
            self._last[update.request_id] = update
        return update

    def end(self, request_id: int) -> None:
        """Forget a request that has ended, its last update too: a call may stay open for any number of requests."""
        self.places.pop(request_id, None)
        self._last.pop(request_id, None)

    def examine(self, check: Callable[[], None]) -> None:
        """Run a check of the model and refuse this call alone if it raises, for any reason."""
        fault = raised_twice(check)
        if isinstance(fault, ModelChangedError):
            self.refusal = fault
        elif fault is not None:
            self.refusal = ModelChangedError(
                "the model has changed since it was wrapped, so that it cannot be looked at "
                f"({type(fault).__name__}: {fault}); wrap it again with "
                "SpeculativeModel.from_pretrained(model, …)"
            )
            self.refusal.__cause__ = fault
