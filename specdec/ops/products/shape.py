"""What a choice of algorithm depends on."""

from __future__ import annotations

from typing import NamedTuple

import torch

_ALIGNED = 16
"""Bytes: rows and addresses that the chosen algorithms may read and write at once."""


class ProductShape(NamedTuple):
    """x [tokens, width] · weightᵀ [width, rows] in one dtype, all of them without gaps.

    >>> str(ProductShape(torch.bfloat16, 6144, 4096, 96))
    'bfloat16 6144x4096 96'
    """

    dtype: torch.dtype
    rows: int
    width: int
    tokens: int

    def __str__(self) -> str:
        """The name of the shape in a file of choices."""
        return f"{str(self.dtype).removeprefix('torch.')} {self.rows}x{self.width} {self.tokens}"

    @property
    def is_aligned(self) -> bool:
        """Whether every row of weight, input and output begins at a multiple of 16 bytes."""
        size = self.dtype.itemsize
        return self.rows * size % _ALIGNED == 0 == self.width * size % _ALIGNED


def aligned(*tensors: torch.Tensor) -> bool:
    """Whether each lies in memory without gaps, from a multiple of 16 bytes on."""
    return all(x.is_contiguous() and x.data_ptr() % _ALIGNED == 0 for x in tensors)
