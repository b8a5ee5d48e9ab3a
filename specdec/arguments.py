"""Arguments of any type, checked: a value that is right comes back, another is told with what is allowed."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Collection
from typing import Any

import numpy as np

from specdec.errors import InvalidInputError

_MOST_DIGITS = 10**40
_MOST_COUNT = 2**63 - 1
"""What torch and numpy can count to; Python's own integers have no end."""


class _Short(reprlib.Repr):
    """Representations cut to a line; the integers that Python refuses to print are told by their size."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 200

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if abs(x) < _MOST_DIGITS else f"<an integer of {x.bit_length()} bits>"

    def repr_instance(self, x: Any, level: int) -> str:
        return super().repr_instance(x, level).replace("\n", " ")


shown = _Short().repr
"""A value as a message shows it: on one line, of some two hundred characters at most, whatever the value is."""


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """An integer of any integer type (numpy's too), but no bool. Without `most` the largest is 2^63 - 1.

    Raises:
        InvalidInputError: another type, or outside least … most.
    """
    bound = _MOST_COUNT if most is None else most
    allowed = f"a whole number, {least} or more" if most is None else f"a whole number from {least} to {most}"
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except (TypeError, RuntimeError, ValueError):  # tensors of several elements, without values, of other dtypes
        number = None
    if number is None:
        raise InvalidInputError(f"{name}={shown(value)} ({type(value).__name__}): allowed is {allowed}")
    if not least <= number <= bound:
        allowed = f"{least} or more" if number < least and most is None else f"{least} … {bound}"
        raise InvalidInputError(f"{name}={shown(number)}: allowed is {allowed}")
    return number


def share(name: str, value: Any) -> float:
    """A number in (0, 1].

    Raises:
        InvalidInputError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not 0 < value <= 1:
        raise InvalidInputError(f"{name}={shown(value)}: allowed is more than 0, at most 1")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """True or False, and nothing that merely counts as one of them: "no" would be true.

    Raises:
        InvalidInputError: it is none.
    """
    if not isinstance(value, bool):
        raise InvalidInputError(f"{name}={shown(value)}: allowed are True and False")
    return value


def choice(name: str, value: Any, allowed: Collection[str]) -> str:
    """One of some words.

    Raises:
        InvalidInputError: another word or type.
    """
    if not isinstance(value, str) or value not in allowed:
        raise InvalidInputError(f"{name}={shown(value)}: allowed are {', '.join(allowed)}")
    return value


def scale_pairs(name: str, value: Any) -> tuple[tuple[float, float], ...]:
    """(scale of keys, scale of values) of each layer, from any sequence of pairs; none for None.

    Raises:
        InvalidInputError: it is no sequence of pairs of positive numbers.
    """
    if value is None:
        return ()
    try:
        pairs = tuple((float(keys), float(values)) for keys, values in value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidInputError(
            f"{name}={shown(value)}: allowed is one pair (scale of keys, scale of values) of numbers for each layer"
        ) from error
    if not pairs:
        raise InvalidInputError(f"{name} is empty: give one pair of numbers for each layer, or None for 1.0 everywhere")
    for layer, pair in enumerate(pairs):
        if not all(math.isfinite(scale) and scale > 0 for scale in pair):
            raise InvalidInputError(
                f"KV cache scales of layer {layer}: {pair}; allowed are two positive numbers (keys, values)"
            )
    return pairs
