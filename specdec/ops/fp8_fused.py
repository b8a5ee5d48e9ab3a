"""Norms and gated activations whose result is read by FP8 layers alone: quantised before it is ever written.

Each is what `specdec.ops.norm` or `specdec.ops.silu` computes, rounded as there, and then the `fp8_quantise` of it: the
same bits in one launch instead of two.
"""

from __future__ import annotations

import torch

from specdec.ops.fp8 import BLOCK, FP8, fp8_quantise
from specdec.ops.norm import add_rms_norm, rms_norm
from specdec.ops.silu import silu_product


@torch.library.custom_op("specdec::rms_norm_fp8", mutates_args=())
def rms_norm_fp8(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x [1, T, H], weight [H] in half precision -> its `rms_norm` as e4m3 [T, H], scales [T, ⌈H/128⌉] float32."""
    if x.is_cuda:
        from specdec.ops.fp8_fused_kernel import launch_norm_fp8

        return launch_norm_fp8(x, None, weight, eps)[1:]
    return fp8_quantise(rms_norm(x, weight, eps)[0])


@rms_norm_fp8.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(x)


@torch.library.custom_op("specdec::add_rms_norm_fp8", mutates_args=())
def add_rms_norm_fp8(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, residual [1, T, H] -> their sum, rounded, and its `rms_norm_fp8`."""
    if x.is_cuda:
        from specdec.ops.fp8_fused_kernel import launch_norm_fp8

        return launch_norm_fp8(x, residual, weight, eps)
    total, normed = add_rms_norm(x, residual, weight, eps)
    return total, *fp8_quantise(normed[0])


@add_rms_norm_fp8.register_fake
def _(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), *_empty(x)


@torch.library.custom_op("specdec::silu_product_fp8", mutates_args=())
def silu_product_fp8(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """gate, up [1, T, F] or [T, F] -> their `silu_product` as e4m3 [T, F], scales [T, ⌈F/128⌉] float32."""
    if gate.is_cuda:
        from specdec.ops.fp8_fused_kernel import launch_silu_product_fp8

        return launch_silu_product_fp8(gate, up)
    return fp8_quantise(silu_product(gate, up).view(-1, gate.shape[-1]))


@silu_product_fp8.register_fake
def _(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(gate)


def _empty(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of [1, T, H] or [T, H]."""
    tokens, width = x.shape[-2:]
    return x.new_empty(tokens, width, dtype=FP8), x.new_empty(tokens, -(-width // BLOCK), dtype=torch.float32)
