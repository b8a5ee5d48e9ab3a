"""Section: arrays declared once, by a class that serves for host values, host buffers and device views.

@dataclass(frozen=True)
class Places(Generic[A]):                        # A: numpy arrays on the host, tensors on the device
    slots: A = array(np.int64, "tokens")         # dtype and dimensions, in the order of the arena
    sources: A | None = array(np.int64, "rows", optional=True)

section = Section(Places, "round")               # in an arena: fields round.slots, round.sources
arena.send(bucket, section.values(places))       # arrays that are None are left out
section.of(staged.views)                         # Places of tensors; of an arena's host buffers, Places of arrays
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

A = TypeVar("A")
S = TypeVar("S")
_ARRAY = "array"


@dataclasses.dataclass(frozen=True)
class Field:
    """One array of an arena: its dtype and the symbolic names of its dimensions."""

    name: str
    dtype: type[np.generic]
    dims: tuple[str, ...]


def array(dtype: type[np.generic], *dimensions: str, optional: bool = False) -> Any:
    """A field of a dataclass that is an array of an arena.

    Args:
        dimensions: symbolic names. optional: it may be None, and is not sent then.
    """
    default = None if optional else dataclasses.MISSING
    return dataclasses.field(default=default, metadata={_ARRAY: (dtype, dimensions)})


def array_names(kind: type[Any]) -> tuple[str, ...]:
    """The fields of a dataclass that are arrays."""
    return tuple(f.name for f in dataclasses.fields(kind) if _ARRAY in f.metadata)


class Section(Generic[S]):
    """The arrays of a declared class in an arena.

    Attributes:
        fields: their places.
    """

    def __init__(
        self,
        kind: type[S],
        name: str,
        without: Container[str] = (),
        shared: Mapping[str, str] | None = None,
        leading: Mapping[str, str] | None = None,
    ) -> None:
        """Name the arrays `name.array` and their dimensions `name.dimension`.

        Args:
            kind: a dataclass; its fields that are no `array` are given to `of`.
            without: arrays that this arena does not have.
            shared: dimensions that go by a full name of the arena's instead. leading: by array, one more in front.
        """
        self._kind, own, before = kind, dict(shared or {}), dict(leading or {})
        declared = [f for f in dataclasses.fields(kind) if _ARRAY in f.metadata and f.name not in without]  # type: ignore[arg-type]
        self._names = tuple((f.name, f"{name}.{f.name}") for f in declared)
        self.fields = tuple(_place(f, name, own, before.get(f.name)) for f in declared)

    def values(self, source: Any) -> dict[str, np.ndarray]:
        """The arrays of an object that has them as attributes, by their names in the arena, without those that are
        None; {} for None."""
        if source is None:
            return {}
        found = {full: getattr(source, name) for name, full in self._names}
        return {full: value for full, value in found.items() if value is not None}

    def of(self, views: Mapping[str, Any], kind: type[Any] | None = None, **others: Any) -> Any:
        """The class over the arena's host buffers or its device views; None where a view is missing.

        Args:
            kind: a class that inherits from the declared one. others: its fields that are no arrays.
        """
        return (kind or self._kind)(**{name: views.get(full) for name, full in self._names}, **others)


def _place(declared: dataclasses.Field[Any], name: str, shared: Mapping[str, str], leading: str | None) -> Field:
    dtype, dimensions = declared.metadata[_ARRAY]
    own = tuple(shared.get(dimension, f"{name}.{dimension}") for dimension in dimensions)
    return Field(f"{name}.{declared.name}", dtype, own if leading is None else (leading, *own))
