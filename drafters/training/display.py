"""What a person sees while a head is trained."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from drafters.training.state import Measurement


class TrainingDisplay:
    """A progress bar with the loss; every measurement becomes a line above it. A context manager."""

    def __init__(self, console: Console, steps: int, done: int) -> None:
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"))
        self._progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
        self._task = self._progress.add_task("training", total=steps, completed=done, loss="-")

    def __enter__(self) -> TrainingDisplay:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, step: int) -> None:
        """Show that `step` optimizer steps are made."""
        self._progress.update(self._task, completed=step)

    def loss(self, value: float) -> None:
        """Show the loss."""
        self._progress.update(self._task, loss=f"{value:.3f}")

    def measurement(self, measured: Measurement) -> None:
        """Print one line: held-out acceptance per draft."""
        per_draft = " ".join(f"{share:.3f}" for share in measured.acceptance)
        line = f"step {measured.step}: loss {measured.loss:.3f}, held-out acceptance {per_draft} (τ {measured.tau:.2f})"
        self._progress.console.print(line, highlight=False)
