"""Sums by torch's symmetric memory: every GPU reads the others' parts itself, where they can reach each other's memory.

On few tokens such a sum is three times as fast as NCCL's (docs/parallel.md). All else is NCCL's. NVLink multicast is
never used: TORCH_SYMM_MEM_DISABLE_MULTICAST is set before anything is allocated (`specdec.parallel.group`).

Source: pytorch/pytorch, torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu: one_shot_all_reduce_copy reads
all parts of all ranks; two_shot_all_reduce_out sums a part on each and lets the others read it.
"""

from __future__ import annotations

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
        self.name = "symmetric memory, NCCL"

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
