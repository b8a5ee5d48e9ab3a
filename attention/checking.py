"""The check mode: `SPECDEC_CHECK=1` turns on validators at every stage boundary (always on in the tests)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from attention.errors import InvariantError


class _Checks:
    """Whether the validators run: `on`. The environment is read once, at import: a look-up a call would cost 25 µs."""

    on = os.environ.get("SPECDEC_CHECK") == "1"


CHECKS = _Checks()


@contextmanager
def check_mode(enabled: bool) -> Iterator[None]:
    """Turn the validators on or off inside a block."""
    before, CHECKS.on = CHECKS.on, enabled
    try:
        yield
    finally:
        CHECKS.on = before


def require(condition: bool, message: str) -> None:
    """Raise InvariantError with `message` unless `condition` holds."""
    if not condition:
        raise InvariantError(message)
