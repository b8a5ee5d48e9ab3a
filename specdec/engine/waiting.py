"""The queue: requests that wait for a row, in order of their turns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from specdec.requests.request import Request


class WaitingRequests(OrderedDict[Request, None]):
    """A queue in which every operation takes as long however many requests wait.

    With the methods of `collections.deque`, but a request is found by its identity, in a dict.
    """

    @property
    def first(self) -> Request:
        """The next request. Raises StopIteration when the queue is empty."""
        return next(iter(self))

    def append(self, request: Request) -> None:
        """It comes behind all others."""
        self[request] = None

    def appendleft(self, request: Request) -> None:
        """It comes before all others."""
        self[request] = None
        self.move_to_end(request, last=False)

    def extend(self, requests: Iterable[Request]) -> None:
        """They come behind all others, in this order."""
        self.update(dict.fromkeys(requests))

    def extendleft(self, requests: Iterable[Request]) -> None:
        """They come before all others, the last of them first."""
        for request in requests:
            self.appendleft(request)

    def popleft(self) -> Request:
        """Remove and return the next request. Raises KeyError when the queue is empty."""
        return self.popitem(last=False)[0]

    def remove(self, request: Request) -> None:
        """Remove a request at any place. Raises KeyError when it is not in the queue."""
        del self[request]
