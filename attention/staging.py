"""Arrays that are declared once (`Section`), and the arena that sends a round's to the device in one copy.

@dataclass(frozen=True)
class Places(Generic[A]):                        # A: numpy arrays on the host, tensors on the device
    slots: A = array(np.int64, "tokens")         # dtype and dimensions, in the order of the arena
    sources: A | None = array(np.int64, "rows", optional=True)

section = Section(Places, "round")               # in an arena: fields round.slots, round.sources
staged = arena.send(bucket, section.values(places))   # arrays that are None are left out
section.of(staged.views)                         # Places of tensors; of an arena's host buffers, Places of arrays

`StagingArena`: a ring of pinned host buffers -> one copy -> device views at fixed offsets. These depend on the bucket,
never on the batch, so that a captured CUDA graph reads the same addresses every round.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from attention.checking import CHECKS
from attention.errors import InvalidInputError, StaleMetadataError

A = TypeVar("A")
Arrays = dict[str, np.ndarray]
"""Arrays on the host, by the names of their fields."""
Views = Mapping[str, Tensor]
"""The same on the device."""
Sizes = dict[str, int]
"""Sizes of an arena's arrays, by the names that their declarations give."""
S = TypeVar("S")
_ARRAY = "array"
_ALIGN = 64
_RING = 2
_PLACES = 64
"""Places that an arena keeps laid out: a bucket has one in each buffer of the ring."""
_WINDOWS = 2048
"""Windows that an arena keeps, of all its places together: some dozens of different rounds' worth."""


@dataclass(frozen=True)
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


def dtype_of(kind: type[Any], name: str) -> type[np.generic]:
    """The declared dtype of such a field."""
    return kind.__dataclass_fields__[name].metadata[_ARRAY][0]


class Section(Generic[S]):
    """The arrays of a declared class in an arena. fields: their places."""

    def __init__(
        self,
        kind: type[S],
        name: str,
        without: Container[str] = (),
        shared: Mapping[str, str] | None = None,
        leading: Mapping[str, str] | None = None,
    ) -> None:
        """Name the arrays `name.array` and their dimensions `name.dimension`.

        Fields of the dataclass `kind` that are no `array` are given to `of`. without: arrays that this arena lacks.
        shared: dimensions that go by a full name of the arena's instead. leading: by array, an additional first
        dimension.
        """
        self._kind = kind
        own = dict(shared or {})
        before = dict(leading or {})
        declared = [f for f in dataclasses.fields(kind) if _ARRAY in f.metadata and f.name not in without]  # type: ignore[arg-type]
        self._names = tuple((f.name, f"{name}.{f.name}") for f in declared)
        self.fields = tuple(_place(f, name, own, before.get(f.name)) for f in declared)

    def values(self, source: Any) -> Arrays:
        """Arrays by their names in the arena, from an object's attributes of these names, without None."""
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


Bucket = tuple[tuple[str, int], ...]
"""Capacity of every symbolic dimension, as sorted (name, size) pairs: hashable, the key of a layout."""


def bucket_of(**sizes: int) -> Bucket:
    """Make a bucket from dimension sizes."""
    return tuple(sorted(sizes.items()))


def on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device by itself, without waiting for it; on a CPU the same memory."""
    own = torch.from_numpy(values)
    return own.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else own.to(device)


@dataclass(frozen=True)
class ArenaLayout:
    """Offset of each field for one bucket."""

    offsets: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    nbytes: int


def layout_of(fields: Sequence[Field], bucket: Bucket) -> ArenaLayout:
    """Lay the fields out one after the other, 64-byte aligned."""
    sizes = dict(bucket)
    offsets = {}
    shapes = {}
    end = 0
    for field in fields:
        shapes[field.name] = tuple(sizes[d] for d in field.dims)
        offsets[field.name] = end
        nbytes = math.prod(shapes[field.name]) * np.dtype(field.dtype).itemsize
        end += -(-nbytes // _ALIGN) * _ALIGN
    return ArenaLayout(offsets, shapes, end)


@dataclass(frozen=True)
class Staged:
    """Device views of one `send`. Valid until the ring comes around (two sends later)."""

    views: Views
    generation: int
    arena: StagingArena

    def __getitem__(self, name: str) -> Tensor:
        return self.views[name]

    def __contains__(self, name: str) -> bool:
        return name in self.views

    def ensure_fresh(self) -> None:
        """Raise when the arena has been refilled since (checked only under SPECDEC_CHECK=1).

        Raises:
            StaleMetadataError: these views show another round's data by now.
        """
        if CHECKS.on and self.arena.generation - self.generation >= self.arena.lifetime:
            raise StaleMetadataError(
                f"metadata of send {self.generation} is used after send {self.arena.generation} overwrote it"
            )


class StagingArena:
    """A ring of two host buffers and their place on the device.

    On CUDA the host buffers are pinned, each guarded by an event, and the device buffer is one (stream order protects
    it); on CPU the ring buffers themselves are the views.
    """

    def __init__(self, fields: Sequence[Field], max_bucket: Bucket, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._capacity = layout_of(fields, max_bucket).nbytes
        self._host = [torch.zeros(self._capacity, dtype=torch.uint8, pin_memory=self._on_cuda) for _ in range(_RING)]
        self._remote = torch.zeros(self._capacity, dtype=torch.uint8, device=device) if self._on_cuda else None
        self._events = [torch.cuda.Event() for _ in range(_RING)] if self._on_cuda else []
        buffers = _Buffers(tuple(fields), self._host, self._remote)
        # Views are cached because making them costs more than the copy. The LRU caches are bounded because prompts of
        # random length have unboundedly many shapes. The cached functions do not reference the arena, so that no
        # reference cycle keeps its buffers alive.
        self._place = lru_cache(_PLACES)(buffers.place)
        self._window = lru_cache(_WINDOWS)(_window)
        self.generation = 0

    @property
    def lifetime(self) -> int:
        """Sends after which a view shows other data: 1 on CUDA (one device buffer), 2 on CPU (the ring)."""
        return 1 if self._on_cuda else _RING

    def hosts(self, bucket: Bucket) -> list[Arrays]:
        """Every host buffer's fields, whole."""
        return [self._place(bucket, slot).host for slot in range(_RING)]

    def send(self, bucket: Bucket, arrays: Arrays) -> Staged:
        """Copy the arrays, by field name, to the device in one transfer; each fits in its field's capacity in `bucket`.

        Raises:
            InvalidInputError: an array is larger than the bucket, or the bucket larger than the arena.
        """
        slot = self.begin()
        window = self._window
        place = self._place(bucket, slot)
        device_views = {}
        for name, array in arrays.items():
            host, device_views[name] = window(place, name, array.shape)
            host[...] = array
        return Staged(device_views, self._transfer(place, slot), self)

    def begin(self) -> int:
        """Index of the buffer of `hosts(bucket)` to write in place now, once its last copy is done; `end` sends it."""
        slot = self.generation % _RING
        if self._on_cuda:
            # Make sure an event has passed; in a running round it has, and only asking is no synchronisation.
            event = self._events[slot]
            if not event.query():
                event.synchronize()
        return slot

    def end(self, bucket: Bucket) -> Staged:
        """Send the buffer written since `begin`, in one transfer."""
        slot = self.generation % _RING
        place = self._place(bucket, slot)
        return Staged(place.remote, self._transfer(place, slot), self)

    def _transfer(self, place: _Place, slot: int) -> int:
        if place.remote_bytes is not None:
            place.remote_bytes.copy_(place.host_bytes, non_blocking=True)
            self._events[slot].record()
        self.generation += 1
        return self.generation


@dataclass(frozen=True, eq=False)
class _Place:
    """One bucket's fields, whole, in one buffer of the ring: host and device side.

    host_bytes, remote_bytes: source and destination of one transfer (remote_bytes is None on CPU).
    """

    host: Arrays
    remote: Views
    host_bytes: Tensor
    remote_bytes: Tensor | None


@dataclass(frozen=True)
class _Buffers:
    """The memory of an arena: a ring of host buffers, and the device's, None on CPU. uint8, all of one size."""

    fields: tuple[Field, ...]
    host: Sequence[Tensor]
    remote: Tensor | None

    def place(self, bucket: Bucket, slot: int) -> _Place:
        """Lay a bucket out in a buffer. Raises InvalidInputError when it is larger than the buffer."""
        layout = layout_of(self.fields, bucket)
        capacity = len(self.host[slot])
        if layout.nbytes > capacity:
            raise InvalidInputError(f"bucket {dict(bucket)} needs {layout.nbytes} bytes, the arena has {capacity}")
        views = {field.name: self._view(field, layout, slot) for field in self.fields}
        return _Place(
            host={name: host for name, (host, _) in views.items()},
            remote={name: remote for name, (_, remote) in views.items()},
            host_bytes=self.host[slot][: layout.nbytes],
            remote_bytes=None if self.remote is None else self.remote[: layout.nbytes],
        )

    def _view(self, field: Field, layout: ArenaLayout, slot: int) -> tuple[np.ndarray, Tensor]:
        dtype = np.dtype(field.dtype)
        shape = layout.shapes[field.name]
        start = layout.offsets[field.name]
        stop = start + int(np.prod(shape)) * dtype.itemsize
        host = self.host[slot].numpy()[start:stop].view(dtype).reshape(shape)
        if self.remote is None:
            return host, torch.from_numpy(host)
        torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
        return host, self.remote[start:stop].view(torch_dtype).view(shape)


def _window(place: _Place, name: str, shape: tuple[int, ...]) -> tuple[np.ndarray, Tensor]:
    """Views of `shape` of a field, host and device side. Raises InvalidInputError when the field is smaller."""
    host = place.host[name]
    remote = place.remote[name]
    if len(shape) != host.ndim or any(n > most for n, most in zip(shape, host.shape, strict=True)):
        raise InvalidInputError(f"field {name}: array {shape} does not fit the bucket's {host.shape}")
    window = tuple(slice(0, n) for n in shape)
    return host[window], remote[window]
