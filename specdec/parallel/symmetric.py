"""Sums by torch's symmetric memory: every GPU reads the others' parts itself, where they can reach each other's memory.

On few tokens such a sum is three times as fast as NCCL's (docs/parallel.md). All else is NCCL's. NVLink multicast is
never used: TORCH_SYMM_MEM_DISABLE_MULTICAST is set before anything is allocated (`specdec.parallel.group`).

Source: pytorch/pytorch, torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu: one_shot_all_reduce_copy reads
all parts of all ranks; two_shot_all_reduce_out sums a part on each and lets the others read it. Before and after that
(CUDASymmetricMemory-inl.h) each block waits, without end, until its word in another rank's signal pad is 0 and makes it
1 (put_signal), and until its word in the own pad is 1 and makes it 0 (wait_signal).
"""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from specdec.errors import InvariantError
from specdec.parallel.collectives import GroupCollectives

MOST_BYTES = 8 << 20
"""Of one sum: 512 tokens of width 8,192 in bfloat16. Longer ones are NCCL's, whose launch then no longer counts."""
ONE_SHOT_BYTES = 64 << 10
"""Up to so many every rank sums all by itself: one synchronisation less than two shots."""
_ALIGNED = 16
_DTYPES = (torch.bfloat16, torch.float32)
LONGEST_RELEASE = 3.0
"""Seconds in which launched rounds come to their end once nobody is waited for: a round waits some hundred times."""


class IdleWatch:
    """Notices when a device is idle, on a thread of its own.

    The thread is there from the beginning: since Python 3.12 none can be started once the interpreter ends, which is
    when models that were never closed are.
    """

    def __init__(self, device: torch.device) -> None:
        self._asked: SimpleQueue[threading.Event | None] = SimpleQueue()
        threading.Thread(target=_answer, args=(device, self._asked), name="idle", daemon=True).start()
        weakref.finalize(self, self._asked.put, None).atexit = False  # `release` comes after such callbacks

    def idle(self) -> threading.Event:
        """Set once all that was launched on the device before is done, or has failed."""
        found = threading.Event()
        self._asked.put(found)
        return found


def _answer(device: torch.device, asked: SimpleQueue[threading.Event | None]) -> None:
    while (found := asked.get()) is not None:
        with suppress(RuntimeError):  # of what was launched: others are told of it
            torch.cuda.synchronize(device)
        found.set()


class SymmetricCollectives(GroupCollectives):
    """As `GroupCollectives`, but for sums of up to 8 MiB."""

    def __init__(self, device: torch.device) -> None:
        """Allocate, and meet the other ranks. Raises RuntimeError or AttributeError where that cannot be."""
        import torch.distributed._symmetric_memory as symmetric

        super().__init__(device)
        group = dist.group.WORLD
        if group is None:
            raise InvariantError("there is no process group")
        self._group = group.group_name
        self._one_shot: Any = torch.ops.symm_mem.one_shot_all_reduce_copy
        self._two_shot: Any = torch.ops.symm_mem.two_shot_all_reduce_out
        self._memory: Any = symmetric.empty(MOST_BYTES, dtype=torch.uint8, device=device)
        self._meeting = symmetric.rendezvous(self._memory, self._group)
        self._own_pad, *self._other_pads = self._pads(self._meeting)
        self._beside = torch.cuda.Stream(device)
        scratch = torch.empty_like(self._own_pad)
        self._fill(scratch, [scratch])  # so that no kernel is left to load when a sum keeps the GPU waiting
        self._watch = IdleWatch(device)
        self.name = "symmetric memory, NCCL"

    def _pads(self, meeting: Any) -> list[torch.Tensor]:
        """Signal pads as int32: this rank's first."""
        others = [rank for rank in range(self._size) if rank != meeting.rank]
        return [meeting.get_signal_pad(rank, dtype=torch.int32) for rank in (meeting.rank, *others)]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives.sum`. What is summed where, and so every bit, depends on the size alone."""
        if x.nbytes > MOST_BYTES or not x.nbytes or x.nbytes % _ALIGNED or x.dtype not in _DTYPES:
            return super().sum(x)
        x = x.contiguous()
        memory = self._memory[: x.nbytes].view(x.dtype).view(x.shape)
        if x.nbytes <= ONE_SHOT_BYTES:
            found: torch.Tensor = self._one_shot(memory, x, "sum", self._group)
            return found
        out = torch.empty_like(x)
        memory.copy_(x)
        self._two_shot(memory, "sum", self._group, out)
        return out

    def abort(self) -> None:
        """See `Collectives.abort`: NCCL's calls and the sums that wait for each other are let go at once."""
        beside = threading.Thread(target=self.release, name="release", daemon=True)
        beside.start()
        super().abort()
        beside.join()

    def release(self) -> None:
        """See `Collectives.release`. Sums wait for signals: they are given in place of the lost ranks, until all that
        was launched is done. What it computes, nobody reads."""
        deadline, idle = time.monotonic() + LONGEST_RELEASE, self._watch.idle()
        with suppress(RuntimeError):  # of a device in an error, on which nothing waits
            while not idle.wait(1e-3) and time.monotonic() < deadline:
                self._fill(self._own_pad, self._other_pads)

    def _fill(self, own: torch.Tensor, others: list[torch.Tensor]) -> None:
        """All signals for this rank given, and all of its own taken."""
        with torch.cuda.stream(self._beside):
            own.fill_(1)
            for pad in others:
                pad.fill_(0)
        self._beside.synchronize()


def symmetric_or_group(device: torch.device) -> GroupCollectives:
    """Symmetric memory where every rank has it and it is right, else NCCL; `name` says which, and why.

    All ranks choose the same.
    """
    plain = GroupCollectives(device)
    peers = all(torch.cuda.can_device_access_peer(device, i) for i in range(dist.get_world_size()) if i != device.index)
    if not plain.least([int(peers)])[0]:
        plain.name = "NCCL (the GPUs cannot reach each other's memory)"
        return plain
    reason, found = "", None
    try:
        found = SymmetricCollectives(device)
    except (RuntimeError, ImportError, AttributeError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if not plain.least([int(found is not None)])[0] or found is None:
        plain.name = f"NCCL (symmetric memory: {reason or 'not on another rank'})"
        return plain
    if not plain.least([int(_is_right(found, plain, device))])[0]:
        plain.name = "NCCL (symmetric memory gave wrong sums)"
        return plain
    return found


def _is_right(found: GroupCollectives, plain: GroupCollectives, device: torch.device) -> bool:
    """Whether sums of every kind are NCCL's, up to rounding, twice in a row."""
    right = True
    for count in (8, ONE_SHOT_BYTES // 4, ONE_SHOT_BYTES // 2, MOST_BYTES // 4):
        x = torch.arange(count, device=device, dtype=torch.float32) * (1 + dist.get_rank()) / count
        for part in (x, x.flip(0)):
            right = torch.allclose(found.sum(part), plain.sum(part)) and right
    return right
