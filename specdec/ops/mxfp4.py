"""MXFP4: numbers of 4 bits (sign, two bits of exponent, one of mantissa), 32 of a row with one power of two.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 5.4.1; the order of a byte's two numbers is
that of openai/gpt-oss, gpt_oss/torch/weights.py.
"""

from __future__ import annotations

import torch

BLOCK = 32
"""Numbers that share an exponent."""
_BIAS = 127
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantised(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """blocks [..., O, I/2] uint8, the earlier number of two in the low bits; exponents [..., O, I/32] uint8 -> float32
    [..., O, I]."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=blocks.device)
    pairs = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)  # [..., O, I]
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.to(torch.int32) - _BIAS)
    return (values[pairs.int()].unflatten(-1, (-1, BLOCK)) * scales[..., None]).flatten(-2)
