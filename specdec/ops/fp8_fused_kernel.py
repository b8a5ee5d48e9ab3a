"""Norms and gated activations that end in 8 bits, as Triton kernels. Imported on CUDA only.

The quantised values are computed by the code of `specdec.ops.elementwise_kernel` and rounded to half precision before,
so that nothing depends on whether the two were fused.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.kernels.launch import dependent_launch, wait_for_predecessor
from specdec.ops.elementwise_kernel import normed_token, silu_product, token_rows
from specdec.ops.fp8_kernel import quantised

_GROUP = tl.constexpr(128)
_BLOCK, _WARPS = 1024, 4


@triton.jit
def _norm_fp8_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, H]
    residual_ptr,  # [T, H]
    weight_ptr,  # [H]
    sum_ptr,  # [T, H] contiguous
    out_ptr,  # [T, H] contiguous, e4m3
    scale_ptr,  # [T, G] contiguous, float32
    x_stride, residual_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    token, normed = normed_token(
        x_ptr, residual_ptr, weight_ptr, sum_ptr, x_stride, residual_stride, eps, WIDTH, BLOCK, ADDS, DEPENDENT
    )
    groups = tl.reshape(normed.to(tl.float32), (BLOCK // _GROUP, _GROUP))  # [G, 128]
    rounded, scale = quantised(groups, out_ptr.dtype.element_ty)
    group = tl.arange(0, BLOCK // _GROUP)  # [G]
    place = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]  # [G, 128]
    tl.store(out_ptr + token * WIDTH + place, rounded, mask=place < WIDTH)
    tl.store(scale_ptr + token * tl.cdiv(WIDTH, _GROUP) + group, scale, mask=group * _GROUP < WIDTH)


def launch_norm_fp8(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `specdec.ops.fp8`; without a residual the first result is x."""
    width = x.shape[-1]
    rows = token_rows(x)
    added = rows if residual is None else token_rows(residual)
    out = x.new_empty(rows.shape, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(len(rows), triton.cdiv(width, 128), dtype=torch.float32)
    total = x if residual is None else x.new_empty(x.shape)
    _norm_fp8_kernel[(len(rows),)](
        rows, added, weight, total, out, scales, rows.stride(0), added.stride(0), eps, WIDTH=width,
        BLOCK=max(triton.next_power_of_2(width), 128), ADDS=residual is not None, num_warps=8 if width >= 2048 else 4,
        **dependent_launch(x.device),
    )  # fmt: skip
    return total, out, scales


@triton.jit
def _silu_product_fp8_kernel(  # type: ignore[no-untyped-def]
    gate_ptr,  # [T, F]
    up_ptr,  # [T, F]
    out_ptr,  # [T, F] contiguous, e4m3
    scale_ptr,  # [T, G] contiguous, float32
    gate_stride, up_stride,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)  # [G]
    column = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]  # [G, 128]
    inside = column < WIDTH
    gate = tl.load(gate_ptr + token * gate_stride + column, mask=inside, other=0.0)  # [G, 128]
    up = tl.load(up_ptr + token * up_stride + column, mask=inside, other=0.0)  # [G, 128]
    product = silu_product(gate, up).to(gate.dtype)
    rounded, scale = quantised(product.to(tl.float32), out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * WIDTH + column, rounded, mask=inside)
    tl.store(scale_ptr + token * tl.cdiv(WIDTH, _GROUP) + group, scale, mask=group * _GROUP < WIDTH)


def launch_silu_product_fp8(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `specdec.ops.fp8`."""
    rows, others = token_rows(gate), token_rows(up)
    tokens, width = rows.shape
    groups = triton.cdiv(width, 128)
    out = gate.new_empty(rows.shape, dtype=torch.float8_e4m3fn)
    scales = gate.new_empty(tokens, groups, dtype=torch.float32)
    _silu_product_fp8_kernel[(tokens, triton.cdiv(width, _BLOCK))](
        rows, others, out, scales, rows.stride(0), others.stride(0), WIDTH=width, GROUPS=_BLOCK // 128,
        num_warps=_WARPS, **dependent_launch(gate.device),
    )  # fmt: skip
    return out, scales
