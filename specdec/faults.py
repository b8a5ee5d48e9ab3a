"""Where a fault of one request is kept from its neighbours."""

from __future__ import annotations

from types import TracebackType


class Isolated:
    """A with-block whose error ends one request, not the round.

    Whatever a request brings along (its tokenizer, its stop strings, its parameters) may raise any exception: it is kept
    in `error`, for whoever reports the request's end. An interrupt (KeyboardInterrupt, SystemExit) goes on.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> Isolated:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            self.error = error
        return self.error is not None
