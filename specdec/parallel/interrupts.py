"""Signals while all ranks do something."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

_FOREIGN = (signal.SIG_DFL, signal.SIG_IGN, None)
"""What `signal.getsignal` says where no function of Python's is called: nothing is raised there."""
_NUMBERS = tuple(int(n) for n in signal.valid_signals() if isinstance(n, signal.Signals) and "RT" not in n.name)


class HeldInterrupt:
    """A with-block that no signal strikes whose handler may raise (Ctrl-C, an alarm): the handler is called at the end.
    All ranks must come to the same place.

    A second one of the same number strikes at once. On other threads than the main one, which no signal strikes, it
    does nothing.
    """

    def __init__(self) -> None:
        self._before: dict[int, Callable[..., Any]] = {}
        self._here = threading.current_thread() is threading.main_thread()
        self._held: set[int] = set()

    def __enter__(self) -> HeldInterrupt:
        if self._here:
            for number in _NUMBERS:
                handler: Any = signal.getsignal(number)
                if handler not in _FOREIGN:
                    self._before[number] = handler
                    signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: Any) -> None:
        if number in self._held:
            self._before[number](number, frame)
        self._held.add(number)

    def __exit__(self, *error: object) -> None:
        try:
            self._put_back()
        finally:  # once more: one may have struck in the midst of it
            self._put_back()
            self._strike()

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _strike(self) -> None:
        if self._held:
            try:
                signal.raise_signal(self._held.pop())
            finally:
                self._strike()
