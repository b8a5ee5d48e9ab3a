"""The steps of a start and the seconds they take: each step that is logged, shown on a terminal while it runs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

log = logging.getLogger("specdec")
"""Steps of a start are logged here at level INFO: loading, building kernels, compiling, capturing."""


class StartSteps(logging.Filter):
    """Times every step that is logged by the thread it was made on, and shows the running one.

    A step lasts until the next one begins; records with `aside` end no step. Other handlers get only the records
    that the logger would give them anyway.
    """

    def __init__(self, progress: Progress, shown: int) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}
        self._progress = progress
        self._shown = shown
        self._thread = threading.get_ident()
        self._running: tuple[str, float, TaskID] | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether other handlers get the record."""
        if record.levelno == logging.INFO:
            step = record.getMessage()
            aside = getattr(record, "aside", False) or record.thread != self._thread
            if not aside:
                self.finish()
            shown = self._progress.add_task(step, total=1, completed=int(aside))
            if not aside:
                self._running = step, time.perf_counter(), shown
        return record.levelno >= self._shown

    def finish(self) -> None:
        """End the running step."""
        if self._running is None:
            return
        name, begun, shown = self._running
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun
        self._progress.update(shown, completed=1)
        self._running = None


_active = threading.local()


@contextmanager
def startup_progress(console: Console | None = None) -> Iterator[dict[str, float]]:
    """Time the steps of a start; yields seconds by step, complete when the outermost one ends.

    Steps are shown while they run on `console`, standard error by default, if that is a terminal. Nested calls on one
    thread share the outermost. The log's settings are put back.
    """
    outer: StartSteps | None = getattr(_active, "steps", None)
    if outer is not None:
        yield outer.seconds
        return
    console = console or Console(stderr=True)
    columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), TimeElapsedColumn())
    own_level = log.level
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        steps = _active.steps = StartSteps(progress, log.getEffectiveLevel())
        log.addFilter(steps)
        # Else the logger makes no INFO records; `StartSteps.filter` keeps them from handlers that should not get them.
        log.setLevel(min(logging.INFO, log.getEffectiveLevel()))
        try:
            yield steps.seconds
        finally:
            del _active.steps
            log.setLevel(own_level)
            log.removeFilter(steps)
            steps.finish()
