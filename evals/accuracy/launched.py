"""The processes of `accelerate launch` or torchrun, each with a model of its own and a share of the documents."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(weeks=52)  # of a process that waits for a slower one; lm-eval's own


@dataclass(frozen=True)
class Launched:
    """This process among those started together.

    Attributes:
        rank: its place. size: how many there are.
        group: of all of them, on CPUs; None where there is one.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    @classmethod
    def from_environment(cls) -> Launched:
        """Join the processes that $RANK and $WORLD_SIZE tell of."""
        size = launched_processes()
        if size == 1:
            return cls()
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=_TIMEOUT)
        return cls(dist.get_rank(), size, dist.new_group(backend="gloo", timeout=_TIMEOUT))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all processes [size, ...], on the CPU."""
        if self.size == 1:
            return tensor
        found = [torch.empty_like(tensor, device="cpu") for _ in range(self.size)]
        dist.all_gather(found, tensor.cpu(), group=self.group)
        return torch.stack(found)

    def gather_object(self, own: Any, dst: int = 0) -> list[Any] | None:
        """Every process's object at process `dst`, None elsewhere."""
        if self.size == 1:
            return [own]
        found: list[Any] | None = [None] * self.size if self.rank == dst else None
        dist.gather_object(own, found, dst=dst, group=self.group)
        return found

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            dist.barrier(group=self.group)


def launched_processes() -> int:
    """How many processes were started together; 1 where a launcher started none."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def own_cuda_device() -> str:
    """The GPU of this process among those of its machine."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
