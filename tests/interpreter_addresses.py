"""Triton's interpreter, with every address checked: what a kernel loads or stores lies in memory of its arguments.

The interpreter reads whatever lies beyond a tensor and goes on; a GPU ends the process, or does so on another day.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from triton.runtime import interpreter


def check_addresses() -> None:
    """Replace loads, stores and atomic sums, in this process.

    Raises, from then on:
        IndexError: at a launch that touches other memory (as the interpreter's own error, which names it).
    """
    launch = vars(interpreter.GridExecutor)["_init_args_hst"]
    memory = _Memory(vars(interpreter)["_interpreter"])

    def launching(self: Any, args: Any, kwargs: Any) -> Any:
        found = launch(self, args, kwargs)
        memory.allow(self.fn.__name__, [*found[0], *found[1].values()])
        return found

    interpreter.GridExecutor._init_args_hst = launching
    vars(interpreter)["_interpreter"] = memory


class _Memory:
    """What carries the interpreter's loads and stores out, asked first whether it may."""

    def __init__(self, plain: Any) -> None:
        self._plain, self._kernel = plain, ""
        self._bounds: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def allow(self, kernel: str, arguments: Iterable[Any]) -> None:
        """A launch: no memory but that of its tensors' storages, from now on."""
        storages = {t.untyped_storage() for t in _tensors(arguments)}
        self._kernel, self._bounds = kernel, sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages})

    def load(self, at: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._check(at, mask, np.dtype(dtype).itemsize)
        return self._plain.load(at, mask, other, dtype)

    def store(self, at: Any, value: Any, mask: Any) -> Any:
        self._check(at, mask, value.dtype.itemsize)
        return self._plain.store(at, value, mask)

    def atomic_rmw(self, kind: Any, at: Any, value: Any, mask: Any, order: Any) -> Any:
        self._check(at, mask, value.dtype.itemsize)
        return self._plain.atomic_rmw(kind, at, value, mask, order)

    def _check(self, at: Any, mask: Any, size: int) -> None:
        used = np.asarray(at, np.int64)[np.broadcast_to(np.asarray(mask, bool), np.shape(at))]
        inside = np.zeros(used.shape, bool)
        for low, high in self._bounds:
            inside |= (used >= low) & (used + size <= high)
        if not inside.all():
            raise IndexError(
                f"{self._kernel} touches {(~inside).sum()} of {used.size} addresses of no argument's memory"
            )


def _tensors(arguments: Iterable[Any]) -> Iterator[Any]:
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from _tensors(argument)
        elif hasattr(argument, "untyped_storage"):
            yield argument
        elif hasattr(argument, "base"):
            yield argument.base
