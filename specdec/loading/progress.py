"""What a start is doing, on a terminal: each step that is logged, with its seconds, while it runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

log = logging.getLogger("specdec")
"""Steps of a start are logged here at level INFO: loading, building kernels, compiling, capturing."""


class _Steps(logging.Filter):
    """Shows every step as the last line of a display; passes on only what the logger would show by itself."""

    def __init__(self, progress: Progress, shown: int) -> None:
        super().__init__()
        self._progress = progress
        self._shown = shown
        self._running: TaskID | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """A record -> whether others see it too."""
        if record.levelno == logging.INFO:
            self.finish()
            self._running = self._progress.add_task(record.getMessage(), total=1)
        return record.levelno >= self._shown

    def finish(self) -> None:
        """The running step is done."""
        if self._running is not None:
            self._progress.update(self._running, completed=1)


@contextmanager
def startup_progress(console: Console | None = None) -> Iterator[None]:
    """Show the steps of a start while they run; without a terminal nothing is shown, and the log is as it was.

    Args:
        console: default standard error.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), TimeElapsedColumn())
    own_level = log.level
    with Progress(*columns, console=console, transient=True) as progress:
        steps = _Steps(progress, log.getEffectiveLevel())
        log.addFilter(steps)
        log.setLevel(min(logging.INFO, log.getEffectiveLevel()))
        try:
            yield
        finally:
            log.setLevel(own_level)
            log.removeFilter(steps)
            steps.finish()
