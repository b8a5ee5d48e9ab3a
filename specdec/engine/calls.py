"""One caller's requests in a shared engine, and the inbox that rounds fill for it."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue

from specdec.engine.faults import raised_twice
from specdec.errors import ModelChangedError, SpecdecError
from specdec.requests.request import Update


class Call:
    """The requests of one call, and what rounds have brought for them.

    Attributes:
        places: request id -> index in the call, of the requests that are not ended.
        inbox: updates, and None to wake whoever sleeps on it.
        refusal: set when it is found out, while its first round runs, that the call cannot be served.
    """

    def __init__(self) -> None:
        self.refusal: SpecdecError | None = None
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

    def examine(self, check: Callable[[], None]) -> None:
        """Run a check of the model: what it finds refuses this call, and nobody else's.

        So does a check that fails itself, as on modules that are no longer there.
        """
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
