"""Values that a caller gives: read strictly, and named in the error where they are not what is allowed."""

from __future__ import annotations

import operator
import reprlib
from typing import Any

import numpy as np

from specdec.errors import InvalidInputError

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80
_REPR.maxlong = 40


def short(value: object) -> str:
    """repr(value), cut where it is long."""
    try:
        return _REPR.repr(value).replace("\n", " ")
    except ValueError:  # a whole number of more digits than Python writes
        return f"<{type(value).__name__}>"


def refuse(name: str, value: object, allowed: str) -> InvalidInputError:
    """The error for a value that is not allowed."""
    return InvalidInputError(f"{name}={short(value)}: allowed is {allowed}")


def whole(name: str, value: Any, least: int, most: int | None, allowed: str) -> int:
    """A whole number: an int or a scalar with `__index__` (numpy, torch); no bool, no float, no str.

    Raises:
        InvalidInputError: it is none, or outside [least, most].
    """
    if not is_whole(value) or value < least or (most is not None and value > most):
        raise refuse(name, value, allowed)
    return operator.index(value)


def real(name: str, value: Any, allowed: str) -> float:
    """A number: whatever has `__float__` (numpy and torch scalars, Decimal); no bool, no str, no array.

    Raises:
        InvalidInputError: it is none, or too large for a float.
    """
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__float__") or getattr(value, "ndim", 0) > 0:
        raise refuse(name, value, allowed)
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError, RuntimeError) as error:
        raise refuse(name, value, allowed) from error


def flag(name: str, value: Any) -> bool:
    """A bool, Python's or numpy's.

    Raises:
        InvalidInputError: it is anything else; "yes" and 1 are not read as True.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise refuse(name, value, "True or False")
    return bool(value)


def is_whole(value: Any) -> bool:
    """Whether this is a whole number: an int, or a scalar of numpy or torch with `__index__`; a bool is none."""
    if type(value) is int:
        return True
    if isinstance(value, (bool, np.bool_)) or getattr(value, "ndim", 0) > 0:
        return False
    try:
        operator.index(value)
    except (TypeError, RuntimeError):
        return False
    return "bool" not in str(getattr(value, "dtype", ""))
