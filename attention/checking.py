"""Checks of whole numbers that a caller gives, and the check mode: `SPECDEC_CHECK=1` turns on validators at every stage
boundary (always on in the tests)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from operator import index
from typing import Any

from attention.errors import InvalidInputError, InvariantError


class _Checks:
    """Whether the validators run: `on`. The environment is read once, at import: a look-up a call would cost 25 µs."""

    on = os.environ.get("SPECDEC_CHECK") == "1"


CHECKS = _Checks()


def require(condition: bool, message: str) -> None:
    """Raise InvariantError with `message` unless `condition` holds."""
    if not condition:
        raise InvariantError(message)


def whole_number(name: str, value: Any) -> int:
    """`value`, at least 1, as an int.

    Raises:
        InvalidInputError: it is no whole number (numpy's are), or less than 1.
    """
    try:
        number = index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or number < 1:
        raise InvalidInputError(f"{name}={value!r}: allowed are whole numbers from 1 on")
    return number


def whole_numbers(name: str, values: Any, allowed: str) -> list[int]:
    """Each of `values` as an int.

    Raises:
        InvalidInputError: this is no sequence of whole numbers (numpy's are, booleans are not).
    """
    given: list[Any] = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else [None]
    try:
        if any(isinstance(value, bool) for value in given):
            raise TypeError
        return [index(value) for value in given]
    except TypeError:
        raise InvalidInputError(f"{name} {values!r}: allowed are {allowed}") from None
