"""The staging arena: everything a round needs on the device goes there in one host-to-device copy.

A ring of pinned host buffers -> one copy -> device views at fixed offsets. Offsets depend on the bucket, never on the
batch, so that a captured CUDA graph reads the same addresses every round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from attention.checking import checking
from attention.errors import InvalidInputError, StaleMetadataError

_ALIGN = 64
_RING = 2

Bucket = tuple[tuple[str, int], ...]
"""Capacity of every symbolic dimension, as sorted (name, size) pairs: hashable, the key of a layout."""


def bucket_of(**sizes: int) -> Bucket:
    """Make a bucket from dimension sizes."""
    return tuple(sorted(sizes.items()))


@dataclass(frozen=True)
class Field:
    """One array of the arena: its dtype and the symbolic names of its dimensions."""

    name: str
    dtype: type[np.generic]
    dims: tuple[str, ...]


@dataclass(frozen=True)
class ArenaLayout:
    """Where each field lies for one bucket."""

    offsets: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    nbytes: int


def layout_of(fields: Sequence[Field], bucket: Bucket) -> ArenaLayout:
    """Lay the fields out one after the other, 64-byte aligned."""
    sizes = dict(bucket)
    offsets: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
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

    views: Mapping[str, torch.Tensor]
    generation: int
    arena: StagingArena

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.views[name]

    def __contains__(self, name: str) -> bool:
        return name in self.views

    def ensure_fresh(self) -> None:
        """Raise when the arena has been refilled since (checked only under SPECDEC_CHECK=1).

        Raises:
            StaleMetadataError: these views show another round's data by now.
        """
        if checking() and self.arena.generation - self.generation >= self.arena.lifetime:
            raise StaleMetadataError(
                f"metadata of send {self.generation} is used after send {self.arena.generation} overwrote it"
            )


class StagingArena:
    """A ring of two host buffers and their place on the device.

    On CUDA the host buffers are pinned, each guarded by an event, and the device buffer is one (stream order protects
    it); on CPU the ring buffers themselves are the views.
    """

    def __init__(self, fields: Sequence[Field], max_bucket: Bucket, device: torch.device) -> None:
        self._fields = {f.name: f for f in fields}
        self._on_cuda = device.type == "cuda"
        self._capacity = layout_of(fields, max_bucket).nbytes
        self._host = [torch.zeros(self._capacity, dtype=torch.uint8, pin_memory=self._on_cuda) for _ in range(_RING)]
        self._remote = torch.zeros(self._capacity, dtype=torch.uint8, device=device) if self._on_cuda else None
        self._events = [torch.cuda.Event() for _ in range(_RING)] if self._on_cuda else []
        self._layouts: dict[Bucket, ArenaLayout] = {}
        self._windows: dict[tuple[Bucket, int], _Windows] = {}
        self._ranges: dict[tuple[Bucket, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.generation = 0

    @property
    def lifetime(self) -> int:
        """Sends after which a view shows other data: 1 on CUDA (one device buffer), 2 on CPU (the ring)."""
        return 1 if self._on_cuda else _RING

    def hosts(self, bucket: Bucket) -> list[Mapping[str, np.ndarray]]:
        """Every host buffer's fields, whole."""
        return [self._windows_of(bucket, slot).host for slot in range(_RING)]

    def send(self, bucket: Bucket, arrays: Mapping[str, np.ndarray]) -> Staged:
        """Copy the arrays to the device in one transfer.

        Args:
            bucket: capacities; every array fits in its field's capacity shape.
            arrays: by field name; fields not named are left out.

        Raises:
            InvalidInputError: an array is larger than the bucket, or the bucket larger than the arena.
        """
        windows = self._next_windows(bucket)
        device_views = {}
        for name, array in arrays.items():
            host, device_views[name] = windows.get(name, array.shape)
            host[...] = array
        return Staged(device_views, self._transfer(bucket), self)

    def begin(self, bucket: Bucket) -> int:
        """Which of `hosts(bucket)` is to be written in place now; `end` sends it."""
        self._next_windows(bucket)
        return self.generation % _RING

    def end(self, bucket: Bucket) -> Staged:
        """Send what was written since `begin`, in one transfer."""
        views = self._windows[bucket, self.generation % _RING].remote
        return Staged(views, self._transfer(bucket), self)

    def _next_windows(self, bucket: Bucket) -> _Windows:
        slot = self.generation % _RING
        if self._on_cuda:
            _wait(self._events[slot])
        return self._windows_of(bucket, slot)

    def _transfer(self, bucket: Bucket) -> int:
        slot = self.generation % _RING
        if self._remote is not None:
            remote, host_bytes = self._ranges[bucket, slot]
            remote.copy_(host_bytes, non_blocking=True)
            self._events[slot].record()
        self.generation += 1
        return self.generation

    def _windows_of(self, bucket: Bucket, slot: int) -> _Windows:
        if (bucket, slot) not in self._windows:
            layout = self._layouts.setdefault(bucket, layout_of(list(self._fields.values()), bucket))
            if layout.nbytes > self._capacity:
                raise InvalidInputError(
                    f"bucket {dict(bucket)} needs {layout.nbytes} bytes, the arena has {self._capacity}"
                )
            if self._remote is not None:
                self._ranges[bucket, slot] = (self._remote[: layout.nbytes], self._host[slot][: layout.nbytes])
            self._windows[bucket, slot] = _Windows({name: self._view(name, layout, slot) for name in self._fields})
        return self._windows[bucket, slot]

    def _view(self, name: str, layout: ArenaLayout, slot: int) -> tuple[np.ndarray, torch.Tensor]:
        dtype, shape, start = np.dtype(self._fields[name].dtype), layout.shapes[name], layout.offsets[name]
        stop = start + int(np.prod(shape)) * dtype.itemsize
        host = self._host[slot].numpy()[start:stop].view(dtype).reshape(shape)
        if self._remote is None:
            return host, torch.from_numpy(host)
        torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
        return host, self._remote[start:stop].view(torch_dtype).view(shape)


class _Windows:
    """Windows of one bucket's fields, host and device side. Remembered: making a view costs more than the copy."""

    _MOST = 4096

    def __init__(self, whole: Mapping[str, tuple[np.ndarray, torch.Tensor]]) -> None:
        self.host = {name: host for name, (host, _) in whole.items()}
        self.remote = {name: remote for name, (_, remote) in whole.items()}
        self._made: dict[tuple[str, tuple[int, ...]], tuple[np.ndarray, torch.Tensor]] = {}

    def get(self, name: str, shape: tuple[int, ...]) -> tuple[np.ndarray, torch.Tensor]:
        """Views of `shape` of field `name`. Raises InvalidInputError when the field is smaller."""
        found = self._made.get((name, shape))
        if found is None:
            if len(self._made) >= self._MOST:
                self._made.clear()
            found = self._made[name, shape] = self._make(name, shape)
        return found

    def _make(self, name: str, shape: tuple[int, ...]) -> tuple[np.ndarray, torch.Tensor]:
        host, remote = self.host[name], self.remote[name]
        if len(shape) != host.ndim or any(n > most for n, most in zip(shape, host.shape, strict=True)):
            raise InvalidInputError(f"field {name}: array {shape} does not fit the bucket's {host.shape}")
        window = tuple(slice(0, n) for n in shape)
        return host[window], remote[window]


def _wait(event: torch.cuda.Event) -> None:
    """Make sure an event has passed; in a running round it has, and only asking is no synchronisation."""
    if not event.query():
        event.synchronize()
