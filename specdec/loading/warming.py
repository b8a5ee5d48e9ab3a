"""Loads torch's compiler in the background of a start."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from threading import Thread
from typing import Any

_NICE = 10
"""Niceness of the compiler's processes."""
_LEFT_TO_TORCH = (ImportError, AttributeError, AssertionError, RuntimeError, OSError)
"""Errors of torch versions with other names, or without such processes. They start what they need when they compile."""


@cache
def loading_thread() -> Thread:
    """The thread that loads the compiler and starts the processes in which it compiles kernels, begun once a process.

    Both take seconds. The processes import torch, at a low priority: compilers of attention kernels are what a first
    start waits for in the end.
    """
    thread = Thread(target=_warm, name="load the compiler", daemon=True)
    thread.start()
    return thread


def _warm() -> None:
    with suppress(*_LEFT_TO_TORCH):
        from torch._inductor.async_compile import AsyncCompile

        make_pool(AsyncCompile)
    with suppress(ImportError):  # raised again where it is needed
        import specdec.execution.graphs  # noqa: F401 (with the compiler)


def make_pool(compiler: Any) -> None:
    """Start the compiler's processes. Called on one thread: with two at once, torch would start them twice.

    compiler: torch's AsyncCompile.
    """
    compiler.warm_pool()  # first computes a hash of torch's sources
    process = getattr(compiler.process_pool(), "process", None)
    if process is not None and hasattr(os, "setpriority"):
        own = os.getpriority(os.PRIO_PROCESS, process.pid)
        os.setpriority(os.PRIO_PROCESS, process.pid, max(own, _NICE))  # those that it forks inherit it
    compiler.wakeup()  # else the process pool would start its workers only at the first compilation
