"""Joining the process group of all ranks; `leaving` has the way out."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from specdec.parallel.collectives import Collectives, GroupCollectives
from specdec.parallel.symmetric import symmetric_or_group

_LONGEST_WAIT = timedelta(minutes=30)
"""So long may one rank load or compile before another. A rank that is lost is found in other ways, see `workers`."""
_MEETING = timedelta(minutes=2)
"""So long the others are waited for, all of which run already."""
_NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
"""Of the environment: NVLink multicast stays off."""
_NO_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""NCCL's own threads would end this process, the user's, when a rank is lost; here that is noticed by its socket."""
_COLLECTIVES = "SPECDEC_COLLECTIVES"
"""A variable of the environment: "nccl" keeps sums from symmetric memory, to compare the two."""


def join_group(rank: int, size: int, device: torch.device, rendezvous: str) -> Collectives:
    """Meet the other ranks by a file that nobody else can write to. Returns once all are there."""
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
    return GroupCollectives(device)
