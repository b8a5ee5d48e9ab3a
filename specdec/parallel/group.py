"""Joining and leaving the process group of all ranks."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from specdec.parallel.collectives import Collectives, GroupCollectives

_LONGEST_WAIT = timedelta(minutes=30)
"""So long may one rank load or compile before another. A rank that is lost is found in other ways, see `workers`."""
_DEFAULTS = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "GLOO_SOCKET_IFNAME": "lo"}
"""Of the environment, where it has nothing else. All ranks are on this machine, so gloo needs no name of it."""


def join_group(rank: int, size: int, device: torch.device, rendezvous: str) -> Collectives:
    """Meet the other ranks by a file that nobody else can write to. Returns once all are there."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=_LONGEST_WAIT,
        device_id=device if on_cuda else None,
    )
    return GroupCollectives(device)


def leave_group() -> None:
    """Idempotent. Nobody is waited for."""
    if dist.is_initialized():
        dist.destroy_process_group()
