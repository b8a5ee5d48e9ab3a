"""Sums and gathers between ranks as operators that torch.compile does not look into, and that CUDA graphs hold.

Compiled code finds the ranks of its process when it runs: `specdec.parallel.ranks.current`.
"""

from __future__ import annotations

import torch

from specdec.parallel import ranks


@torch.library.custom_op("specdec::sum_ranks", mutates_args=())
def sum_ranks(x: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' x, the same bits on each of them.

    Raises:
        SpecdecError: this rank runs alone.
    """
    return ranks.current().collectives.sum(x)


@sum_ranks.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("specdec::gather_ranks", mutates_args=())
def gather_ranks(x: torch.Tensor, size: int) -> torch.Tensor:
    """x [..., C] of each of `size` ranks -> [..., size·C], in the order of ranks.

    Raises:
        SpecdecError: this rank runs alone.
    """
    found = ranks.current().collectives.gather(x)
    return found.movedim(0, -2).reshape(*x.shape[:-1], size * x.shape[-1])


@gather_ranks.register_fake
def _(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], size * x.shape[-1])
