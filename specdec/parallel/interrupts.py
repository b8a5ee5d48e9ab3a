"""Ctrl-C while all ranks do something."""

from __future__ import annotations

import signal
import threading
from typing import Any


class HeldInterrupt:
    """A with-block that Ctrl-C does not strike: it is raised at the end. All ranks must come to the same place.

    A second Ctrl-C strikes at once. On other threads than the main one, which no Ctrl-C strikes, it does nothing.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._here = threading.current_thread() is threading.main_thread()
        self._held = False

    def __enter__(self) -> HeldInterrupt:
        if self._here:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: Any) -> None:
        if self._held:
            raise KeyboardInterrupt
        self._held = True

    def __exit__(self, *error: object) -> None:
        if not self._here:
            return
        signal.signal(signal.SIGINT, signal.SIG_DFL if self._before is None else self._before)
        if self._held:
            signal.raise_signal(signal.SIGINT)
