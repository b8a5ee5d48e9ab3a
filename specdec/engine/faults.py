"""Where a fault of one request is kept from its neighbours, and told from an exception that came from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType

from specdec.errors import RequestFailedError, RoundFailedError
from specdec.interrupts import is_from_signal
from specdec.requests.request import Request


def raised_twice(job: Callable[[], object], undo: Callable[[], object] | None = None) -> Exception | None:
    """Run something that may fail, and keep its fault: an exception that it raises when it is run once more, too.

    Whatever a request brings along (its tokenizer, its stop strings, its parameters) may raise any exception, and so
    may a signal handler meanwhile, or another thread. That is for the caller on this thread.

    Args:
        undo: called before the second time.

    Returns:
        The fault, for whoever reports the request's end; None where there is none.

    Raises:
        Exception: one that was raised once. BaseException: an interrupt (KeyboardInterrupt, SystemExit).
    """
    try:
        job()
        return None
    except Exception as error:
        first = error
    try:
        if not is_from_signal(first):
            _once_more(job, undo)
    except Exception as error:
        if is_from_signal(error):
            raise
        return error
    try:
        raise first
    finally:
        del first


def _once_more(job: Callable[[], object], undo: Callable[[], object] | None) -> None:
    if undo is not None:
        undo()
    job()


def round_failed(error: Exception, count: int) -> RoundFailedError:
    """An error of its own for each request: callers in several threads raise them."""
    failed = RoundFailedError(
        f"a round failed with {type(error).__name__}: {error}; the {count} requests in it were ended, others go on"
    )
    failed.__cause__ = error
    return failed


def request_failed(error: Exception, source: str) -> RequestFailedError:
    """The error of a request that `source` of its own ended."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._torn = kind is not None


def rewound(requests: Iterable[Request]) -> tuple[list[Request], int]:
    """Put requests back to what was reported of them, and waiting.

    Their rows are not closed: the row table they stand in is thrown away.

    Returns:
        The requests in order of their turns, which those with a row have had, and how many of them had one.
    """
    waiting = sorted(requests, key=lambda request: request.turn)
    ran = [request for request in waiting if request.row >= 0]
    for request in waiting:
        request.rewind()
    for request in ran:
        request.preemptions += 1
    return waiting, len(ran)
