"""Joining the process group of all ranks, and sums by torch's symmetric memory, where GPUs can read each other's parts.

On few tokens such a sum is three times as fast as NCCL's (docs/parallel.md). All else is NCCL's. NVLink multicast is
never used: TORCH_SYMM_MEM_DISABLE_MULTICAST is set before anything is allocated (`join_group`).

Source: pytorch/pytorch, torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu: one_shot_all_reduce_copy reads
all parts of all ranks; two_shot_all_reduce_out sums a part on each and lets the others read it. Before and after that
(CUDASymmetricMemory-inl.h, sync_remote_blocks) each block does, for every rank and for its own too, what has no end: it
waits until its word in that rank's signal pad is 0 and makes it 1 (put_signal), then until that rank's word in the own
pad is 1 and makes it 0 (wait_signal). A pad is [blocks, ranks that signal].
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attention.threads import start_thread
from specdec.extensions.parallel.collectives import LONGEST_RELEASE, Collectives

MOST_BYTES = 8 << 20
"""Of one sum: 512 tokens of width 8,192 in bfloat16. NCCL does longer ones, where its launch time no longer counts."""
ONE_SHOT_BYTES = 1 << 20
"""Up to so many bytes of all ranks together, every rank computes the full sum: one synchronisation and one launch less
than two shots. Two H200s took 10.9 us for 512 KiB each, 12.1 for 768; in two shots, with a copy, 10.6 to 13 and 10.8.
"""
_ALIGNED = 16
_RANKS = (2, 4, 8)
"""Numbers of ranks for which torch has sums in two shots."""
_GIVE_EVERY = 2e-4
"""Seconds. A sum waits two or three times, and each needs all signals once: of 80 layers 320 to 480 times a round."""
_DTYPES = (torch.bfloat16, torch.float32)
_LONGEST_WAIT = timedelta(minutes=30)
"""How long one rank may load or compile before another. A lost rank is found in other ways, see `workers`."""
_MEETING = timedelta(minutes=2)
"""How long the others are waited for, all of which run already."""
_NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
"""Of the environment: NVLink multicast stays off."""
_NO_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""NCCL's own threads would end this process, the user's, when a rank is lost; here that is noticed by its socket."""
_COLLECTIVES = "SPECDEC_COLLECTIVES"
"""A variable of the environment: "nccl" keeps sums from symmetric memory, to compare the two."""
_numbers = itertools.count()
"""Of the groups that symmetric memory has had in this process: torch keeps what it knows of one by its name."""


@dataclass(frozen=True)
class Signals:
    """The words of signal pads (views) that a rank's sums wait for.

    awaited: words of its own pad, 1 where another rank has signalled; without the rank's word for itself, because a sum
    that signals itself waits until that is 0. taken: words of the others' pads, 0 where they have taken this rank's
    signal.
    """

    awaited: tuple[Tensor, ...]
    taken: tuple[Tensor, ...]

    @classmethod
    def of(cls, pads: Sequence[Tensor], rank: int) -> Signals:
        """pads: every rank's, int32; words beyond the last full block are unused."""
        size = len(pads)
        blocks = [pad[: len(pad) // size * size].view(-1, size) for pad in pads]
        own = blocks[rank]
        awaited = tuple(words for words in (own[:, :rank], own[:, rank + 1 :]) if words.numel())
        return cls(awaited, tuple(block[:, rank] for other, block in enumerate(blocks) if other != rank))

    def give(self) -> None:
        """Act as if every other rank had signalled, and had taken all signals."""
        for words in self.awaited:
            words.fill_(1)
        for words in self.taken:
            words.fill_(0)


class SymmetricCollectives(Collectives):
    """As `Collectives`, but for sums of up to 8 MiB."""

    def __init__(self, device: torch.device, store: dist.Store) -> None:
        """Allocate, and meet the other ranks by `store`. Raises RuntimeError or AttributeError where that cannot be."""
        import torch.distributed._symmetric_memory as symmetric

        super().__init__(device)
        if self._size not in _RANKS:
            raise RuntimeError(f"torch has none in two shots for {self._size} ranks")
        name: Any = f"symmetric memory {next(_numbers)}"
        self._group = name
        self._met = _register(self._group, RenumberedStore(store), self._size)
        self._one_shot: Any = torch.ops.symm_mem.one_shot_all_reduce_copy
        self._two_shot: Any = torch.ops.symm_mem.two_shot_all_reduce_out
        self._memory: Any = symmetric.empty(MOST_BYTES, dtype=torch.uint8, device=device)
        self._meeting = symmetric.rendezvous(self._memory, self._group)
        self._beside = torch.cuda.Stream(device)
        pads = [self._meeting.get_signal_pad(rank, dtype=torch.int32) for rank in range(self._size)]
        self._signals = Signals.of(pads, self._meeting.rank)
        scratch = Signals.of([torch.zeros_like(pad) for pad in pads], self._meeting.rank)
        self._give(scratch)  # so that no kernel is left to load when a sum keeps the GPU waiting
        self.name = "symmetric memory, NCCL"

    def sum(self, x: Tensor) -> Tensor:
        """See `Collectives.sum`. What is summed where, and so every bit, depends on the size alone."""
        if x.nbytes > MOST_BYTES or not x.nbytes or x.nbytes % _ALIGNED or x.dtype not in _DTYPES:
            return super().sum(x)
        x = x.contiguous()
        memory = self._memory[: x.nbytes].view(x.dtype).view(x.shape)
        if x.nbytes * self._size <= ONE_SHOT_BYTES:
            return self._one_shot(memory, x, "sum", self._group)
        out = torch.empty_like(x)
        memory.copy_(x)
        self._two_shot(memory, "sum", self._group, out)
        return out

    def abort(self) -> None:
        """See `Collectives.abort`: NCCL's calls and the sums that wait for each other are let go at once."""
        beside = start_thread(self.let_go, name="release")
        super().abort()
        beside.join()

    def let_go(self) -> None:
        """Signal in place of the lost ranks until all that was launched is done. Results of its sums are unused."""
        deadline = time.monotonic() + LONGEST_RELEASE
        idle = self._idle()
        with suppress(RuntimeError):  # of a device in an error, on which nothing waits
            while not idle.wait(_GIVE_EVERY) and time.monotonic() < deadline:
                self._give(self._signals)

    def _give(self, signals: Signals) -> None:
        with torch.cuda.stream(self._beside):
            signals.give()
        self._beside.synchronize()


def _register(name: Any, store: dist.Store, size: int) -> tuple[dist.ProcessGroup, dist.Store]:
    """A group of all ranks, used only to exchange memory. Ends with the default group.

    Keep both results as long as it is used: torch does not keep Python's part of a store.
    """
    from torch._C._distributed_c10d import _register_process_group

    group = dist.ProcessGroup(store, dist.get_rank(), size)
    group._set_group_name(name)
    _register_process_group(name, group)
    return group, store


def symmetric_or_group(device: torch.device, store: dist.Store) -> Collectives:
    """Symmetric memory if every rank has it and its sums are right, else NCCL; all ranks choose the same. `name` has
    the choice and its reason. store: a store shared by all ranks, for this purpose alone."""
    plain = Collectives(device)
    peers = all(torch.cuda.can_device_access_peer(device, i) for i in range(dist.get_world_size()) if i != device.index)
    if not plain.least([int(peers)])[0]:
        plain.name = "NCCL (the GPUs cannot reach each other's memory)"
        return plain
    reason = ""
    found = None
    try:
        found = SymmetricCollectives(device, store)
    except (RuntimeError, ImportError, AttributeError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if not plain.least([int(found is not None)])[0] or found is None:
        plain.name = f"NCCL (symmetric memory: {reason or 'not on another rank'})"
        return plain
    if not plain.least([int(_is_right(found, plain, device))])[0]:
        plain.name = "NCCL (symmetric memory gave wrong sums)"
        return plain
    return found


def _is_right(found: Collectives, plain: Collectives, device: torch.device) -> bool:
    """Whether sums of every kind are NCCL's, up to rounding, twice in a row."""
    right = True
    most_of_one_shot = ONE_SHOT_BYTES // dist.get_world_size()
    for size in (32, most_of_one_shot, 2 * most_of_one_shot, MOST_BYTES):
        count = size // 4
        x = torch.arange(count, device=device, dtype=torch.float32) * (1 + dist.get_rank()) / count
        for part in (x, x.flip(0)):
            right = torch.allclose(found.sum(part), plain.sum(part)) and right
    return right


class RenumberedStore(dist.Store):
    """Another store, whose keys PREFIX/NUMBER/RANK have their numbers counted from the first that is set here.

    torch's symmetric memory numbers what ranks exchange by what the process has exchanged so far, in any group, and
    waits for keys with its own numbers. Rank 0 is the user's process, in which tensor-parallel models may have been
    open before; the other ranks' processes are new. Without this they would wait for each other (mended in torch's
    main branch in September 2026, where numbers are the group's and this changes nothing).

    Source: pytorch/pytorch, torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryUtils.hpp (StoreExchange), issue
    196082 and pull request 196350.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self._first: int | None = None

    def set(self, key: str, value: Any) -> None:
        """As `torch.distributed.Store.set`, of bytes. The first call of an exchange."""
        if self._first is None:
            self._first = int(key.split("/")[-2])
        self._store.set(self._renumbered(key), value)

    def get(self, key: str) -> bytes:
        """As `torch.distributed.Store.get`: waits as long as the other store does."""
        return self._store.get(self._renumbered(key))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        """As `torch.distributed.Store.wait`; without a timeout as long as the other store does."""
        self._store.wait([self._renumbered(key) for key in keys], *timeout)

    def _renumbered(self, key: str) -> str:
        *prefix, number, rank = key.split("/")
        return "/".join((*prefix, str(int(number) - (self._first or 0)), rank))


def join_group(rank: int, size: int, device: torch.device, rendezvous: str) -> Collectives:
    """Meet the other ranks by a file in a folder of this user alone. Returns once all have joined."""
    os.environ.update(_NO_MULTICAST | _NO_WATCHDOG)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine: gloo needs no name of it
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.set_device(device)
    # As destroy_process_group leaves it. torch numbers the groups that a process has begun, failed and interrupted ones
    # too, and ranks whose numbers differ would wait for each other.
    dist.distributed_c10d._world.group_count = 0
    store = dist.FileStore(rendezvous, size)
    store.set_timeout(_MEETING)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=_LONGEST_WAIT,
        device_id=device if on_cuda else None,
    )
    if on_cuda and os.environ.get(_COLLECTIVES) != "nccl":
        return symmetric_or_group(device, dist.PrefixStore("symmetric memory", store))
    return Collectives(device)
