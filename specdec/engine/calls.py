"""One caller's requests in a shared engine, and the inbox that rounds fill for it."""

from __future__ import annotations

from queue import Empty, SimpleQueue

from specdec.requests.request import Update


class Call:
    """The requests of one call, and what rounds have brought for them.

    Attributes:
        places: request id -> index in the call, of the requests that are not ended.
        inbox: updates, and None to wake whoever sleeps on it.
    """

    def __init__(self) -> None:
        self.places: dict[int, int] = {}
        self.inbox: SimpleQueue[Update | None] = SimpleQueue()
        self._last: dict[int, Update] = {}

    def take(self, timeout: float = 0.0) -> Update | None:
        """The next update; None when there is none within `timeout` seconds, or the call was woken."""
        try:
            update = self.inbox.get(timeout > 0, timeout)
        except Empty:
            return None
        if update is None or self._last.get(update.request_id) is update:
            return None  # an interrupted delivery was repeated
        self._last[update.request_id] = update
        return update
