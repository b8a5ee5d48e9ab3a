"""The check mode: `SPECDEC_CHECK=1` turns on validators at every stage boundary (always on in the tests)."""

from __future__ import annotations

import os

from attention.errors import InvariantError


def checking() -> bool:
    """Whether the validators run. Read at every call, so that a test can switch it."""
    return os.environ.get("SPECDEC_CHECK") == "1"


def require(condition: bool, message: str) -> None:
    """Raise InvariantError with `message` unless `condition` holds.

    Raises:
        InvariantError: the condition is false.
    """
    if not condition:
        raise InvariantError(message)
