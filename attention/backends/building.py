"""Kernels that are built in the background, each once a process, and awaited where they are first needed.

The compiler runs in separate processes (tens of seconds for a FlashInfer module), so threads suffice to build several
kernels at once while the caller does something else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from threading import Event, Lock
from typing import Any

from attention.errors import KernelBuildError
from attention.threads import start_thread

log = logging.getLogger("specdec")
ASIDE = {"aside": True}
"""`extra` of a log record about work in the background of the step that was logged last."""


class Build:
    """One kernel that is being built, or was."""

    def __init__(self, name: str, make: Callable[[], object]) -> None:
        """name: the kernel's name for messages; make: builds and loads it."""
        self.name = name
        self._make = make
        self._done = Event()
        self._error: Exception | None = None
        self._made: Any = None
        self._started = time.perf_counter()
        self._seconds = 0.0
        start_thread(self._run, name=f"build {name}")

    @property
    def done(self) -> bool:
        """Whether nothing is left to wait for."""
        return self._done.is_set()

    @property
    def failed(self) -> bool:
        """Whether it ended in an error."""
        return self.done and self._error is not None

    @property
    def state(self) -> str:
        """How far it is, in words."""
        if not self.done:
            return f"being built for {time.perf_counter() - self._started:.1f} s"
        return self._outcome()

    def _outcome(self) -> str:
        if self._error is not None:
            return f"failed after {self._seconds:.1f} s: {type(self._error).__name__}"
        return f"ready after {self._seconds:.1f} s"

    def wait(self) -> Any:
        """Wait for the kernel and return the result of `make`. Raises KernelBuildError: it could not be built."""
        if not self.done:
            log.info("waiting for attention kernel: %s", self.name)
            self._done.wait()
        if self._error is not None:
            raise KernelBuildError(f"the attention kernel {self.name} could not be built: {self._error}") from (
                self._error
            )
        return self._made

    def _run(self) -> None:
        try:
            self._made = self._make()
        except Exception as error:  # any error: `wait` raises it on the caller's thread, this thread has no caller
            self._error = error
        self._seconds = time.perf_counter() - self._started
        log.info("attention kernel %s: %s", self.name, self._outcome(), extra=ASIDE)
        self._done.set()


Builds = tuple[Build, ...]
_builds: dict[Hashable, Build] = {}
_lock = Lock()


def in_background(key: Hashable, name: str, make: Callable[[], object]) -> Build:
    """The build under this key: one that runs or is done; a new one the first time, and after one that failed."""
    with _lock:
        found = _builds.get(key)
        if found is None or found.failed:
            found = _builds[key] = Build(name, make)
        return found
