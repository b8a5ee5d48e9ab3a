"""Where a fault of one request is kept from its neighbours."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from specdec.errors import RequestFailedError, RoundFailedError


class Isolated:
    """A with-block whose error ends one request, not the round.

    Whatever a request brings along (its tokenizer, its stop strings, its parameters) may raise any exception: it is
    kept in `error`, for whoever reports the request's end. An interrupt (KeyboardInterrupt, SystemExit) goes on.
    """

    def __init__(self, handle: Callable[[Exception], None] | None = None) -> None:
        """handle: called with the error, outside of the block."""
        self.error: Exception | None = None
        self._handle = handle

    def __enter__(self) -> Isolated:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            self.error = error
            if self._handle is not None:
                self._handle(error)
        return self.error is not None


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
