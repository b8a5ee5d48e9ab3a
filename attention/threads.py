"""Threads that run beside the caller's."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Thread


def start_thread(run: Callable[..., object], *args: object, name: str | None = None) -> Thread:
    """Start a thread that runs this; the process ends without waiting for it."""
    thread = Thread(target=run, args=args, name=name, daemon=True)
    thread.start()
    return thread


def after_fork(function: Callable[[], None]) -> Callable[[], None]:
    """Decorate a function that runs in every child process, right after the fork. Windows has no fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
    return function
