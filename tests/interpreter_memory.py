"""Triton's interpreter, with every address looked at: what a GPU may not forgive, and the interpreter does not see.

- What a kernel loads or stores lies in memory of its arguments. The interpreter reads whatever lies beyond a tensor.
- Dependent launches (`attention.kernels.launch`). The interpreter runs one launch after the other; on a GPU a kernel
  may be there before the one before it has ended. So before it waits it stores nothing, and loads nothing that the
  launch before it has stored. And all programs wait, of a kernel with a parameter DEPENDENT, of others all or none:
  where one does not, the next kernel may begin too soon.

What torch's own operators store between two launches is not known here: they end before the next one begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
from triton.runtime import interpreter

_WAIT, _WORD = "wait_for_predecessor", 2
"""The device function that waits; bytes of the words in which loads are compared with stores."""


def check_memory() -> None:
    """Replace loads, stores and atomic operations, in this process.

    Raises, from then on:
        IndexError, RuntimeError: at a launch that does any of this (as the interpreter's own error, which names it).
    """
    executor, function = interpreter.GridExecutor, interpreter.InterpretedFunction
    begin, end = (vars(executor)[name] for name in ("_init_args_hst", "_restore_args_dev"))
    call = function.__call__
    place = interpreter.interpreter_builder.set_grid_idx
    memory = _Memory(vars(interpreter)["_interpreter"])

    def beginning(self: Any, args: Any, kwargs: Any) -> Any:
        found = begin(self, args, kwargs)
        dependent = "DEPENDENT" in self.fn.__code__.co_varnames
        memory.begin(self.fn.__name__, [*found[0], *found[1].values()], dependent)
        return found

    def ending(self: Any, *args: Any) -> Any:
        memory.end()
        return end(self, *args)

    def calling(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__name__ == _WAIT:
            memory.wait()
        return call(self, *args, **kwargs)

    def placing(*index: int) -> None:
        memory.next_program()
        place(*index)

    function.__call__ = calling
    interpreter.interpreter_builder.set_grid_idx = placing
    patch.multiple(executor, _init_args_hst=beginning, _restore_args_dev=ending).start()
    patch.object(interpreter, "_interpreter", memory).start()


class _Memory:
    """What carries the interpreter's loads and stores out, asked first whether it may."""

    def __init__(self, plain: Any) -> None:
        self._plain, self._kernel, self._dependent = plain, "", False
        self._bounds: list[tuple[int, int]] = []
        self._stored: list[np.ndarray] = []
        self._stored_before: list[np.ndarray] = []
        self._programs = self._waited = 0
        self._waits, self._stores_early = False, 0
        self._loaded_early: list[np.ndarray] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def begin(self, kernel: str, arguments: Iterable[Any], dependent: bool) -> None:
        """A launch: no memory but that of its tensors' storages, from now on. dependent: whether it has to wait."""
        storages = {t.untyped_storage() for t in _tensors(arguments)}
        self._kernel, self._dependent = kernel, dependent
        self._bounds = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages})
        self._stored, self._stored_before = [], self._stored
        self._programs = self._waited = 0

    def next_program(self) -> None:
        """Another one begins."""
        self._programs += 1
        self._waits, self._stores_early, self._loaded_early = False, 0, []

    def wait(self) -> None:
        """It waits for the launch before: what it did until now is looked at."""
        if self._waits:
            return
        self._waits = True
        self._waited += 1
        if self._stores_early:
            raise RuntimeError(f"{self._kernel} stores {self._stores_early} times before it waits")
        if self._loaded_early and self._stored_before:
            self._stored_before = [np.unique(np.concatenate(self._stored_before))]
            found = np.isin(np.concatenate(self._loaded_early), self._stored_before[0]).sum()
            if found:
                raise RuntimeError(f"{self._kernel} loads {found} words of the launch before it, and only then waits")

    def end(self) -> None:
        """The launch has ended."""
        missing = self._programs - self._waited
        if (self._waited or self._dependent) and missing:
            raise RuntimeError(f"{missing} of {self._programs} programs of {self._kernel} do not wait")

    def load(self, at: Any, mask: Any, other: Any, dtype: Any) -> Any:
        used = self._checked(at, mask, np.dtype(dtype).itemsize)
        if not self._waits:
            self._loaded_early.append(_words(used, np.dtype(dtype).itemsize))
        return self._plain.load(at, mask, other, dtype)

    def store(self, at: Any, value: Any, mask: Any) -> Any:
        self._note_stored(at, mask, value)
        return self._plain.store(at, value, mask)

    def atomic_rmw(self, kind: Any, at: Any, value: Any, mask: Any, order: Any) -> Any:
        self._note_stored(at, mask, value)
        return self._plain.atomic_rmw(kind, at, value, mask, order)

    def _note_stored(self, at: Any, mask: Any, value: Any) -> None:
        self._stored.append(_words(self._checked(at, mask, value.dtype.itemsize), value.dtype.itemsize))
        self._stores_early += not self._waits

    def _checked(self, at: Any, mask: Any, size: int) -> np.ndarray:
        """The addresses that are used; an error if one is no argument's."""
        used = np.asarray(at, np.int64)[np.broadcast_to(np.asarray(mask, bool), np.shape(at))]
        inside = np.zeros(used.shape, bool)
        for low, high in self._bounds:
            inside |= (used >= low) & (used + size <= high)
        if not inside.all():
            raise IndexError(
                f"{self._kernel} touches {(~inside).sum()} of {used.size} addresses of no argument's memory"
            )
        return used


def _words(addresses: np.ndarray, size: int) -> np.ndarray:
    """The words of so many bytes at each address."""
    return ((addresses[:, None] + np.arange(0, size, _WORD)) // _WORD).ravel()


def _tensors(arguments: Iterable[Any]) -> Iterator[Any]:
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from _tensors(argument)
        elif hasattr(argument, "untyped_storage"):
            yield argument
        elif hasattr(argument, "base"):
            yield argument.base
