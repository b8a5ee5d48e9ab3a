"""LinesOfProgress: progress that can be followed without a terminal. Imports nothing of training."""

from __future__ import annotations

import threading

from rich.progress import Progress

from attention.threads import start_thread

LINE_S = 10.0


class LinesOfProgress(Progress):
    """A progress bar; where there is no terminal to draw it on, a line of it every LINE_S seconds."""

    def start(self) -> None:
        super().start()
        self._ended = threading.Event()
        if not self.console.is_terminal and not self.disable:
            start_thread(self._print_lines)

    def stop(self) -> None:
        self._ended.set()
        super().stop()

    def _print_lines(self) -> None:
        while not self._ended.wait(LINE_S):
            self.console.print(self.get_renderable())
