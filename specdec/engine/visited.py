"""The part of an engine that requests enter from other engines, and leave for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

from attention.errors import OutOfPagesError
from specdec.engine.admission import Admission
from specdec.engine.faults import Change
from specdec.engine.handoff import ROUNDS_IN_VAIN, Moving
from specdec.engine.launcher import LaunchedRound
from specdec.engine.scheduler import Scheduler
from specdec.requests.moved import Arrival, MovedRequest
from specdec.requests.request import Request
from specdec.requests.submission import Submission


class Visited(ABC):
    """`Engine`'s part in requests that move. Attributes: see there."""

    moving: Moving
    scheduler: Scheduler
    inflight: LaunchedRound | None
    _admission: Admission
    _change: Change
    _next_id: int

    @abstractmethod
    def _queue(self, request: Request) -> int: ...

    def _collect(self) -> None:
        """Pages that nobody needs any more are free."""
        self.moving.settle(self.scheduler.pools(), self.moving.due())

    def _begin_moving(self) -> None:
        """A round begins, and there are pages aside."""
        self.moving.begin_round()
        self._collect()

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def submit_leaving(self, request: Submission) -> int:
        """As `Engine.submit`, but the request leaves with its first token, for another engine.

        Args:
            request: with `hand_off`, the seconds for which its pages are held.
        """
        limit = self.check_leaving(request)
        own = (request.token_ids, request.params, limit, request.sample_index, request.eos_token_ids)
        queued = self._admission.request(self._take_id(), *own)
        queued.hand_off = request.hand_off
        return self._queue(queued)

    def check_leaving(self, request: Submission) -> int:
        """As `Engine.check`, of a request whose prompt alone is read here."""
        return self._admission.check(request.token_ids, request.params, hand_off=True)

    def check_moved(self, moved: MovedRequest) -> None:
        """Whether a request from another engine can be served, see `Admission.check_moved`."""
        self._admission.check_moved(moved)

    def reserve(self, moved: MovedRequest) -> int:
        """Pages for the keys and values of a request from another engine, to be filled and then given to `resume`.

        Returns:
            Their number, see `Moving`.

        Raises:
            InvalidInputError, CacheTooSmallError: such a request cannot be served here, see `Admission.check_moved`.
            OutOfPagesError: not now.
        """
        self._admission.check_moved(moved)
        with self._change:
            self._collect()
            without_head = self.scheduler.head_pages is not None and not moved.num_drafts
            rounds = 0 if self.inflight is None else ROUNDS_IN_VAIN
            try:
                return self.moving.reserve(self.scheduler.pools(), moved, without_head, rounds)
            except OutOfPagesError as error:
                missing = error
        raise missing  # outside: an error that leaves the block means that rows are to be made anew

    def may_fill(self, number: int) -> bool:
        """Whether reserved pages may be written to, see `Moving.may_fill`."""
        return self.inflight is None or self.moving.may_fill(number)

    def resume(self, moved: MovedRequest, arrival: tuple[int, Mapping[str, torch.Tensor]] | None = None) -> int:
        """Queue a request from another engine; it goes on as if it had been here all the time.

        Args:
            arrival: the number of its pages, filled, and its tensors (see `Departure`); None to read its tokens again.
        """
        self._admission.check_moved(moved)
        request = self._admission.moved(self._take_id(), moved)
        if arrival is not None:
            number, tensors = arrival
            request.arrival = Arrival(self.moving.take(number), tensors)
        return self._queue(request)

    def release(self, leases: Sequence[str]) -> None:
        """Pages that are held for requests that left are free: nobody will read them. Unknown leases are over."""
        with self._change:
            self.moving.release(self.scheduler.pools(), leases)

    def drop(self, number: int, settled: Callable[[], bool]) -> None:
        """A request for which pages were reserved does not come, see `Moving.drop`."""
        with self._change:
            self.moving.drop(self.scheduler.pools(), number, settled)
