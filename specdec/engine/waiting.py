"""The queue: requests that wait for a row, in order of their turns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from specdec.requests.request import Request


class WaitingRequests:
    """A queue in which every operation takes as long however many requests wait.

    As `collections.deque`, but a request is found by its identity, in a dict.
    """

    def __init__(self) -> None:
        self._requests: OrderedDict[Request, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    @property
    def first(self) -> Request:
        """The next request. Raises StopIteration when the queue is empty."""
        return next(iter(self._requests))

    def append(self, request: Request) -> None:
        """It comes behind all others."""
        self._requests[request] = None

    def appendleft(self, request: Request) -> None:
        """It comes before all others."""
        self._requests[request] = None
        self._requests.move_to_end(request, last=False)

    def extend(self, requests: Iterable[Request]) -> None:
        """They come behind all others, in this order."""
        for request in requests:
            self.append(request)

    def extendleft(self, requests: Iterable[Request]) -> None:
        """They come before all others, the last of them first."""
        for request in requests:
            self.appendleft(request)

    def popleft(self) -> Request:
        """Remove and return the next request. Raises KeyError when the queue is empty."""
        return self._requests.popitem(last=False)[0]

    def remove(self, request: Request) -> None:
        """Remove a request at any place. Raises KeyError when it is not in the queue."""
        del self._requests[request]

    def clear(self) -> None:
        """Empty the queue."""
        self._requests.clear()

    def move_to_end(self, requests: Sequence[Request]) -> None:
        """Move these requests behind all others, in this order. Raises KeyError when one is not in the queue."""
        for request in requests:
            self._requests.move_to_end(request)
