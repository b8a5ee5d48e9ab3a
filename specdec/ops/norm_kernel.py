"""The residual sum and RMS normalisation in one Triton kernel, one program per token. Imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.kernels.pdl import dependent_launch, wait_for_predecessor
from specdec.ops.silu_kernel import token_rows


@triton.jit
def normed_token(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    weight_ptr,
    sum_ptr,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A program's token, and its normed values [BLOCK] in x's dtype; the residual sum is stored. See `_norm_kernel`."""
    column = tl.arange(0, BLOCK)  # [BLOCK]
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)  # [BLOCK]; no kernel writes it: no need to wait
    wait_for_predecessor(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0)  # [BLOCK]
    if ADDS:
        residual = tl.load(residual_ptr + token * residual_stride + column, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + token * WIDTH + column, x, mask=inside)
    values = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)  # scalar
    return token, ((values * scale).to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, H]
    residual_ptr,  # [T, H]
    weight_ptr,  # [H]
    sum_ptr,  # [T, H] contiguous
    out_ptr,  # [T, H] contiguous
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    token, normed = normed_token(
        x_ptr, residual_ptr, weight_ptr, sum_ptr, x_stride, residual_stride, eps, WIDTH, BLOCK, ADDS, DEPENDENT
    )
    column = tl.arange(0, BLOCK)
    tl.store(out_ptr + token * WIDTH + column, normed, mask=column < WIDTH)


def launch_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `specdec.ops.norm`; without a residual the first result is x."""
    width = x.shape[-1]
    rows = token_rows(x)
    added = rows if residual is None else token_rows(residual)
    out = x.new_empty(x.shape)
    total = x if residual is None else x.new_empty(x.shape)
    _norm_kernel[(len(rows),)](
        rows,
        added,
        weight,
        total,
        out,
        rows.stride(0),
        added.stride(0),
        eps,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ADDS=residual is not None,
        num_warps=8 if width >= 2048 else 4,
        **dependent_launch(x.device),
    )
    return total, out
