"""Checks of a transform's arguments: whole numbers, and batches whose rows it keeps whole."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

import numpy as np

from attention.batch.host import HostBatch
from attention.errors import InvalidInputError


def whole_number(name: str, value: Any, least: int) -> int:
    """`value` as an int.

    Raises:
        InvalidInputError: it is no whole number (numpy's are), or less than `least`.
    """
    try:
        number = index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise InvalidInputError(f"{name}={value!r}: allowed are whole numbers from {least} on")
    return number


def whole_numbers(name: str, values: Any, allowed: str) -> list[int]:
    """Each of `values` as an int.

    Raises:
        InvalidInputError: this is no sequence of whole numbers (numpy's are, booleans are not).
    """
    given: list[Any] = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else [None]
    try:
        if any(isinstance(value, (bool, np.bool_)) for value in given):
            raise TypeError
        return [index(value) for value in given]
    except TypeError:
        raise InvalidInputError(f"{name} {values!r}: allowed are {allowed}") from None


def refuse_extras(batch: HostBatch, done: str) -> None:
    """Refuse a batch with extras: they describe whole rows in their order, as recurrent states do.

    Raises:
        InvalidInputError: the batch has some.
    """
    for extra in batch.extras:
        raise InvalidInputError(f"a batch of rows with {extra.what} cannot be {done}")
