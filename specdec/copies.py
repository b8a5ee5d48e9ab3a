"""Copies that a captured CUDA graph holds as kernels.

A contiguous `copy_` or `clone` becomes a memory copy, and from a few KB on that is a node of its own kind in the graph.
"""

from __future__ import annotations

import torch

from attention.checking import require


def copy_into(to: torch.Tensor, source: torch.Tensor) -> None:
    """Write `source` to `to`, of the same shape, by a product with one: every value and sign stays.

    Floating-point or integer tensors; another floating-point dtype is rounded to.
    """
    require(to.shape == source.shape, f"a copy from {tuple(source.shape)} to {tuple(to.shape)}")
    torch.mul(source, 1, out=to)


def copied(source: torch.Tensor) -> torch.Tensor:
    """A copy of `source`, floating-point or integer."""
    return torch.mul(source, 1)
