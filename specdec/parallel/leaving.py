"""Leaving the process group, whatever the device waits for and whatever CUDA graphs hold.

NCCL ends a communicator only when no CUDA graph holds a launch of it any more, and waits for that without end. Graphs
are dropped when the device is idle, and the device may wait for a rank that is gone until NCCL's abort begins. So the
abort begins on a thread of its own, and the graphs are dropped meanwhile.

Source: NVIDIA/nccl, src/init.cc (commDestroySync polls until localPersistentRefs is 0, since NCCL 2.26; ncclCommAbort
sets the abort flag that its kernels look at, then goes there).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

import torch.distributed as dist

_Call = tuple[Callable[[], object], threading.Event]


class HelperThread:
    """Runs calls in turn. There from the beginning: since Python 3.12 no thread can be started once the interpreter
    ends, which is when models that were never closed are. Ends with this object."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        threading.Thread(target=_run, args=(self._calls,), name=name, daemon=True).start()
        weakref.finalize(self, self._calls.put, None).atexit = False  # calls come after such callbacks, too

    def start(self, call: Callable[[], object]) -> threading.Event:
        """Set once `call` has returned, or has failed, which nobody is told."""
        done = threading.Event()
        self._calls.put((call, done))
        return done


def _run(calls: SimpleQueue[_Call | None]) -> None:
    while (found := calls.get()) is not None:
        call, done = found
        with suppress(Exception):
            call()
        done.set()


def leave_group() -> None:
    """Idempotent. Nobody is waited for but CUDA graphs that hold NCCL's launches: other ranks may be gone already."""
    if not dist.is_initialized():
        return
    if "nccl" in dist.get_backend_config():
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()
