"""Threads that run beside the caller's."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread


def start_thread(run: Callable[..., object], *args: object, name: str | None = None) -> Thread:
    """Start a thread that runs this; the process ends without waiting for it."""
    thread = Thread(target=run, args=args, name=name, daemon=True)
    thread.start()
    return thread
