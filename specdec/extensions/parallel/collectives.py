"""Sums, gathers and broadcasts between ranks over torch's default process group (gloo, NCCL), and how it is left.

The group is left whatever the device waits for and whatever CUDA graphs hold. NCCL ends a communicator only when no
CUDA graph holds a launch of it any more, and waits for that without end. Graphs are dropped when the device is idle,
and the device may wait for a lost rank until NCCL's abort begins. So the abort begins on a separate thread, and the
graphs are dropped meanwhile.
Source: NVIDIA/nccl, src/init.cc (commDestroySync polls until localPersistentRefs is 0, since NCCL 2.26; ncclCommAbort
sets the abort flag that its kernels look at, then goes there).
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attention.threads import start_thread
from specdec.errors import RanksLostError

_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13's name, and the one before it."""
_LOOK = timedelta(seconds=0.5)
"""The longest single wait of torch for other ranks: Python handles Ctrl-C only between two waits."""
LONGEST_RELEASE = 2.0
"""Seconds in which launched rounds end once other ranks are no longer waited for; a round waits some hundred times."""
_LONGEST_LEAVE = 2.5
"""Seconds for NCCL, after that: with two ranks, the loss of a rank is raised within 5 s, even if NCCL never ends."""
log = logging.getLogger("specdec")


class RankGoneError(RanksLostError):
    """Another rank no longer takes part. Rank 0 knows which one, and why."""


class _named:
    """A with-block that turns torch's error about a lost rank, a RuntimeError, into a RankGoneError."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            raise RankGoneError(f"another rank is gone ({error})") from error


def _done(work: Any) -> None:
    """Wait until a call is done. On a GPU it is only queued (None), without waiting. A call may end after a wait for it
    has timed out, so its own error is raised by one more wait at the end."""
    if work is None:
        return
    while not work.is_completed():
        with suppress(RuntimeError):
            work.wait(_LOOK)
    work.wait(_LOOK)


class Collectives:
    """Exchanges between ranks over torch.distributed's default group.

    Every rank calls the same functions in the same order, with tensors of the same shapes. All raise RankGoneError when
    another rank takes part no more. name: what `describe()` calls them.
    """

    def __init__(self, device: torch.device) -> None:
        """device: where the tensors are."""
        self._device = device
        self._size = dist.get_world_size()
        self._graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()
        self.name = "gloo"
        if device.type == "cuda":
            self._leaving = HelperThread("leave")
            self._watching = HelperThread("idle")
            self.name = "NCCL"

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in new memory; the same bits on every rank."""
        out = x.clone(memory_format=torch.contiguous_format)
        with _named():
            _done(dist.all_reduce(out, async_op=not out.is_cuda))
        return out

    def gather(self, x: Tensor) -> Tensor:
        """[N, …]: every rank's x."""
        out = x.new_empty(self._size * x.shape[0], *x.shape[1:])
        with _named():
            _done(_gather(out, x.contiguous(), async_op=not out.is_cuda))
        return out.view(self._size, *x.shape)

    def from_first(self, x: Tensor) -> None:
        """Overwrite x, contiguous, with rank 0's x."""
        with _named():
            _done(dist.broadcast(x, src=0, async_op=not x.is_cuda))

    def least(self, values: Sequence[int]) -> list[int]:
        """The smallest of all ranks' values, place by place; on the host."""
        found = torch.tensor(values, dtype=torch.int64)
        with _named():
            # async_op on any device: `found` is on the host, so the exchange runs over gloo.
            _done(dist.all_reduce(found, dist.ReduceOp.MIN, async_op=True))
        return found.tolist()

    def abort(self) -> None:
        """Let calls that wait for a lost rank fail. May be called on another thread; idempotent.

        gloo's calls fail by themselves when the other end of a connection is gone.
        """
        if self._device.type != "cuda" or not dist.is_initialized():
            return
        backend: Any = dist.group.WORLD._get_backend(self._device)  # type: ignore[union-attr]
        backend.abort()

    def hold(self, graph: torch.cuda.CUDAGraph) -> None:
        """Note a captured graph that holds exchanges, so that `leave` drops it."""
        self._graphs.add(graph)

    def leave(self) -> None:
        """Leave the group; other ranks may be gone. No call and no launch of a graph follows."""
        if self._device.type != "cuda":
            leave_group()
            return
        left = self._leaving.start(leave_group)
        self.let_go()
        for graph in list(self._graphs):
            graph.reset()
        if not left.wait(_LONGEST_LEAVE):
            log.warning("NCCL did not let go of the other ranks: no other tensor-parallel model loads in this process")

    def let_go(self) -> None:
        """Wait briefly until all launches on the device are done. Called after the abort of the group has begun."""
        self._idle().wait(LONGEST_RELEASE)

    def _idle(self) -> threading.Event:
        """An event that is set once all that was launched on the device is done, or has failed."""
        return self._watching.start(partial(torch.cuda.synchronize, self._device))


_Call = tuple[Callable[[], object], threading.Event]


class HelperThread:
    """A thread that runs calls in turn. It starts with the object: since Python 3.12 no thread can be started once the
    interpreter ends, which is when models that were never closed are closed. It ends with the object."""

    def __init__(self, name: str) -> None:
        self._calls = SimpleQueue[_Call | None]()
        start_thread(_run, self._calls, name=name)
        weakref.finalize(self, self._calls.put, None).atexit = False  # at exit, calls may still follow

    def start(self, call: Callable[[], object]) -> threading.Event:
        """Run `call` after those before it. The event is set when it is done; exceptions are ignored."""
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
    """Leave the default process group. Idempotent. Waits for no other rank, since they may be gone, but with NCCL until
    no CUDA graph holds its launches."""
    if not dist.is_initialized():
        return
    if "nccl" in dist.get_backend_config():
        # Not destroy_process_group, which with NCCL waits for other ranks.
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()
