"""Values that a caller gives, of whatever type: read strictly, and named in the error where they are not allowed.

Imports neither torch nor numpy: the command line reads its option list from files that import this one.
"""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from specdec.errors import InvalidInputError

P = ParamSpec("P")
R = TypeVar("R")
Json = dict[str, Any]
"""A JSON object."""
Fields = Mapping[str, Any]
"""Fields by name, to be read: of a JSON object, a message or a batch."""
Options = dict[str, Any]
"""Options by name, as a call or a file gives them."""
TokenIds = tuple[int, ...]
IdSequence = Sequence[int]
"""Ids of tokens or of requests, to be read."""
Function = Callable[..., Any]
Reader = Callable[[str, Any], Any]
"""(name, value given) -> the value that is kept. Raises InvalidInputError, by name: a value that is not allowed."""
_MOST_DIGITS = 10**40
MOST_COUNT = 2**63 - 1
"""What torch and numpy can count to; Python's own integers have no end."""


class _Short(reprlib.Repr):
    """Representations of one line, cut to some two hundred characters; huge integers are given by their size."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 200

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if abs(x) < _MOST_DIGITS else f"<an integer of {x.bit_length()} bits>"

    def repr_instance(self, x: Any, level: int) -> str:
        return super().repr_instance(x, level).replace("\n", " ")


short = _Short().repr
"""A value as a message shows it: `repr`, on one line, cut where it is long, whatever the value is."""


def size(num_bytes: int) -> str:
    """Bytes in the largest unit of which there is at least a tenth.

    >>> size(1536), size(3 << 30)
    ('1.5 KiB', '3 GiB')
    """
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if num_bytes >= 0.1 * 2**shift:
            return f"{num_bytes / 2**shift:.3g} {unit}"
    return f"{num_bytes / 2**10:.3g} KiB"


def least_bytes(value: Any, most: int) -> int:
    """Bytes that a value has as JSON at least; counted until they are more than `most`.

    >>> least_bytes({"a": ["b", 1]}, 100), least_bytes(["b"] * 1000, 10) > 10
    (13, True)
    """
    found = 0
    inside = [value]
    while inside and found <= most:
        own = inside.pop()
        if isinstance(own, str):
            found += len(own) + 2
        elif isinstance(own, dict):
            found += sum(map(len, own)) + 4 * len(own) + 1
            inside += own.values()
        elif isinstance(own, list):
            found += len(own) + 1
            inside += own
        else:
            found += 1
    return found


def ratio(amount: float, of: float) -> float:
    """amount / of; NaN where there is nothing to divide by."""
    return amount / of if of else math.nan


def listed(given: Any) -> list[Any]:
    """What a list or tuple holds; any other value as the only one of a list."""
    return [*given] if isinstance(given, (list, tuple)) else [given]


def are_texts(values: Iterable[Any]) -> bool:
    """Whether all are strings, none of them empty."""
    return all(isinstance(text, str) and text for text in values)


def only(given: Mapping[str, R], names: Collection[str]) -> dict[str, R]:
    """The fields of these names that there are, in their own order."""
    return {name: given[name] for name in given if name in names}


def without(given: Mapping[str, R], names: Collection[str]) -> dict[str, R]:
    """The fields of other names."""
    return {name: value for name, value in given.items() if name not in names}


def without_none(given: Fields) -> Options:
    """The fields that are not None."""
    return {name: value for name, value in given.items() if value is not None}


def wrong(name: str, value: object, why: str) -> InvalidInputError:
    """The error for a value, with what is wrong about it or what to give."""
    return InvalidInputError(f"{name}={short(value)}: {why}")


def refuse(name: str, value: object, allowed: str) -> InvalidInputError:
    """The error for a value that is not allowed."""
    return wrong(name, value, f"allowed is {allowed}")


def refuse_type(name: str, value: object, allowed: str) -> InvalidInputError:
    """The error for a value whose type is not allowed."""
    return InvalidInputError(f"{name}={short(value)} ({type(value).__name__}): allowed is {allowed}")


def unknown(what: str, given: Iterable[str], known: Collection[str], hint: str = "") -> InvalidInputError:
    """The error for names that there are not.

    hint: what to give in place of the first; "" for a name like it, and all that are known.
    """
    names = list(given)
    close = get_close_matches(names[0], known, 1, 0.8)
    meant = f"did you mean {close[0]}? " if close else ""
    return InvalidInputError(f"{what} {', '.join(map(repr, names))}: {hint or meant + 'known are ' + ', '.join(known)}")


def only_known(call: Callable[P, R], refused: Callable[[Fields, Collection[str]], InvalidInputError]) -> Callable[P, R]:
    """A method that raises InvalidInputError for a keyword given by its place, too, and `refused(unknown, known)`."""
    names = tuple(signature(call).parameters)[1:]

    @wraps(call)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        for name in names[: len(args) - 1]:
            if name in options:
                raise InvalidInputError(f"{name}={short(options[name])} is given by its place, too: give it once")
        if odd := without(options, names):
            raise refused(odd, names)
        return call(*args, **options)

    return checked


def whole(name: str, value: Any, least: int, most: int | None = MOST_COUNT, allowed: str = "") -> int:
    """A whole number: an int or a scalar with `__index__` (numpy, torch); no bool, no float, no str.

    most: None for no end. allowed: for the message; default the range.

    Raises:
        InvalidInputError: another type, or outside [least, most].
    """
    open_end = most is None or most == MOST_COUNT
    if not is_whole(value):
        span = f", {least} or more" if open_end else f" from {least} to {most}"
        raise refuse_type(name, value, allowed or f"a whole number{span}")
    number = operator.index(value)
    if number < least or (most is not None and number > most):
        span = f"{least} or more" if number < least and open_end else f"{least} … {most}"
        raise refuse(name, number, allowed or span)
    return number


def real(name: str, value: Any, allowed: str) -> float:
    """A number: whatever has `__float__` (numpy and torch scalars, Decimal); no bool, no str, no array.

    Raises:
        InvalidInputError: another type, or too large for a float.
    """
    if _is_bool(value) or not hasattr(value, "__float__") or getattr(value, "ndim", 0) > 0:
        raise refuse(name, value, allowed)
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError, RuntimeError) as error:
        raise refuse(name, value, allowed) from error


def number(allowed: str, fits: Callable[[float], bool]) -> Reader:
    """A reader of numbers that fit, which raises InvalidInputError for others; see `real`."""

    def read(name: str, value: Any) -> float:
        found = real(name, value, allowed)
        if not fits(found):
            raise refuse(name, value, allowed)
        return found

    return read


share = number("more than 0, at most 1", lambda x: 0 < x <= 1)
"""A number in (0, 1]. Raises InvalidInputError: another value."""


def read_options(options: Any, readers: Mapping[str, Reader]) -> None:
    """Replace values of a frozen dataclass by what their readers make of them; a default of None stays as it is.

    Raises:
        InvalidInputError: a value that is not allowed.
    """
    for name, read in readers.items():
        value = getattr(options, name)
        if value is not None or options.__dataclass_fields__[name].default is not None:
            object.__setattr__(options, name, read(name, value))


def flag(name: str, value: Any) -> bool:
    """A bool, Python's or numpy's; "yes" and 1 are not read as True. Raises InvalidInputError: another value."""
    if not _is_bool(value) or getattr(value, "ndim", 0) > 0:
        raise wrong(name, value, "allowed are True and False")
    return bool(value)


def choice(name: str, value: Any, allowed: Collection[str], hint: str = "") -> str:
    """One of some words. Raises InvalidInputError, with the hint or the words: another word or type."""
    if not isinstance(value, str) or value not in allowed:
        raise wrong(name, value, hint or f"allowed are {', '.join(allowed)}")
    return value


def scale_pairs(name: str, value: Any) -> tuple[tuple[float, float], ...]:
    """(scale of keys, scale of values) of each layer, from any sequence of pairs; none for None.

    Raises:
        InvalidInputError: no sequence of pairs of positive numbers.
    """
    if value is None:
        return ()
    try:
        pairs = tuple((float(keys), float(values)) for keys, values in value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        allowed = "one pair (scale of keys, scale of values) of numbers for each layer"
        raise refuse(name, value, allowed) from error
    if not pairs:
        raise InvalidInputError(f"{name} is empty: give one pair of numbers for each layer, or None for 1.0 everywhere")
    for layer, pair in enumerate(pairs):
        if not all(math.isfinite(scale) and scale > 0 for scale in pair):
            raise InvalidInputError(
                f"KV cache scales of layer {layer}: {pair}; allowed are two positive numbers (keys, values)"
            )
    return pairs


def token_ids(name: str, value: Any) -> TokenIds:
    """Different token ids, from a collection, array or 1-D tensor. Raises InvalidInputError: another value, or none."""
    found = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(found, Collection) or isinstance(found, (str, Mapping)) or not found:
        allowed = "token ids, one at least (draft_vocab_of finds them), or the name of a JSON file of them"
        raise refuse_type(name, value, allowed)
    ids = tuple(whole(name, each, 0) for each in found)
    if len(set(ids)) < len(ids):
        raise InvalidInputError(f"{name}: {len(ids)} token ids, of which {len(set(ids))} differ; give each once")
    return ids


def is_whole(value: Any) -> bool:
    """Whether this is a whole number: an int, or a scalar of numpy or torch with `__index__`; a bool is none."""
    if type(value) is int:
        return True
    if _is_bool(value) or getattr(value, "ndim", 0) > 0:
        return False
    try:
        operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # tensors without values, of other dtypes
        return False
    return True


def _is_bool(value: Any) -> bool:
    """Python's bool, or a scalar or array of numpy or torch with that dtype."""
    return isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
