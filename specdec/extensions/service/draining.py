"""Draining: running requests end, within a limit, while new ones are refused."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

from specdec.errors import ClosedModelError
from specdec.values import number

_LIMIT = number("None (no limit), or seconds, a number from 0", lambda seconds: seconds >= 0)


@contextmanager
def drained(model: Any, timeout: float | None) -> Iterator[int]:
    """A block that begins when no request of a `SpeculativeModel` is left, and in which new ones are refused.

    Yields how many requests were cancelled because they had not ended after `timeout` seconds (None: no limit).

    Raises:
        InvalidInputError: timeout is no number of seconds. ClosedModelError: the model is closed, also meanwhile.
    """
    limit = inf if timeout is None else _LIMIT("timeout", timeout)
    shared = model._shared
    engine = model.engine
    with shared.between_rounds():
        shared.num_drains += 1
    try:
        end = time.perf_counter() + limit
        cancelled = 0
        while engine.has_work:
            shared.check_open()
            if time.perf_counter() >= end:
                with shared.between_rounds():
                    left = [request.id for request in (*engine.scheduler.waiting, *engine.scheduler.running)]
                    engine.deadlines.cancel(left)
                cancelled = len(left)
                end = inf
            shared.help()
        yield cancelled
    finally:
        shared.num_drains -= 1


def drain(model: Any, timeout: float | None) -> int:
    """See `SpeculativeModel.drain`."""
    with drained(model, timeout) as cancelled:
        return cancelled


def drain_and_close(model: Any, timeout: float | None) -> int:
    """See `SpeculativeModel.aclose`."""
    try:
        with drained(model, timeout) as cancelled:
            model.close()
    except ClosedModelError:
        return 0  # another thread was faster
    return cancelled
