"""The check mode: `SPECDEC_CHECK=1` turns on validators at every stage boundary (always on in the tests)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from attention.errors import InvariantError

_enabled = os.environ.get("SPECDEC_CHECK") == "1"


def checking() -> bool:
    """Whether the validators run. The environment is read once, at import: a look-up a call would cost 25 µs."""
    return _enabled


@contextmanager
def check_mode(enabled: bool) -> Iterator[None]:
    """Turn the validators on or off for a while."""
    global _enabled
    before, _enabled = _enabled, enabled
    try:
        yield
    finally:
        _enabled = before


def require(condition: bool, message: str) -> None:
    """Raise InvariantError with `message` unless `condition` holds."""
    if not condition:
        raise InvariantError(message)
