"""The engine's state after an interrupt: the requests are the truth, all else is made anew from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType

from specdec.requests.request import Request


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
