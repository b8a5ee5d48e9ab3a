"""Faults of single requests and of rounds, distinguished from exceptions that came from outside, and reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from specdec.errors import RequestFailedError, RoundFailedError
from specdec.interrupts import raised_twice
from specdec.requests.request import Request, RowRound, Update
from specdec.requests.user_code import UserCodeError


def round_failed(error: Exception, count: int) -> RoundFailedError:
    """A new error object for each request, because callers in several threads raise them."""
    failed = RoundFailedError(
        f"a round failed with {type(error).__name__}: {error}; the {count} requests in it were ended, others go on"
    )
    failed.__cause__ = error
    return failed


def request_failed(error: Exception, source: str) -> RequestFailedError:
    """The error of a request that ended because its `source` raised."""
    failed = RequestFailedError(f"a request was ended because {source} raised {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


class Change:
    """A with-block around everything that changes rows, pages, the queue or launched rounds.

    An interrupt (KeyboardInterrupt, wherever it strikes) that leaves the block marks the state as torn; `mend` is
    called before the next block begins.
    """

    def __init__(self, mend: Callable[[], None]) -> None:
        self._mend = mend
        self._torn = False

    def __enter__(self) -> None:
        if self._torn:
            self._mend()
        self._torn = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._torn = kind is not None


def rewound(requests: Iterable[Request]) -> tuple[list[Request], int]:
    """Reset requests to their reported tokens, waiting. Their rows are not closed: the row table is discarded.

    Returns:
        The requests in order of their turns, and how many of them had a row.
    """
    waiting = sorted(requests, key=lambda request: request.turn)
    ran = [request for request in waiting if request.row >= 0]
    for request in waiting:
        request.rewind()
    for request in ran:
        request.preemptions += 1
    return waiting, len(ran)


def taken(request: Request, share: RowRound, now: float) -> Update:
    """A request's update of one round; with an error when its text or the user's code in it raised."""
    found: list[Update] = []
    undo = partial(request.give_back, len(request.new_tokens), len(request.rounds), request.finish_reason)
    fault = raised_twice(lambda: found.append(request.take(share, now)), undo)
    if isinstance(fault, UserCodeError):
        return Update(request.id, [], "", error=request_failed(fault.error, fault.source))
    if fault is not None:
        return Update(request.id, [], "", error=request_failed(fault, "its text or stop strings"))
    return found[-1]
