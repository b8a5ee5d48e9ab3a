"""Triton kernels of gated activation, RMS norm and rotary embedding. Imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.kernels.launch import dependent_launch, wait_for_predecessor

_BLOCK, _WARPS = 1024, 4


@triton.jit
def silu_product(gate, up):  # type: ignore[no-untyped-def]
    """silu(gate) · up in float32, of values of any shape and dtype."""
    gate = gate.to(tl.float32)
    return gate / (1 + tl.exp(-gate)) * up.to(tl.float32)


@triton.jit
def _silu_product_kernel(  # type: ignore[no-untyped-def]
    gate_ptr,  # [T, F]
    up_ptr,  # [T, F]
    out_ptr,  # [T, F] contiguous
    gate_stride, up_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # scalar, [BLOCK]
    inside = column < WIDTH
    gate = tl.load(gate_ptr + token * gate_stride + column, mask=inside, other=0.0)  # [BLOCK]
    up = tl.load(up_ptr + token * up_stride + column, mask=inside, other=0.0)  # [BLOCK]
    tl.store(out_ptr + token * WIDTH + column, silu_product(gate, up).to(out_ptr.dtype.element_ty), mask=inside)


def launch_silu_product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See `specdec.ops.elementwise`."""
    rows, others = token_rows(gate), token_rows(up)
    tokens, width = rows.shape
    out = gate.new_empty(gate.shape)
    _silu_product_kernel[(tokens, triton.cdiv(width, _BLOCK))](
        rows, others, out, rows.stride(0), others.stride(0), WIDTH=width, BLOCK=_BLOCK, num_warps=_WARPS,
        **dependent_launch(gate.device),
    )  # fmt: skip
    return out


def token_rows(x: torch.Tensor) -> torch.Tensor:
    """x [1, T, F] or [T, F] -> [T, F], values of a row side by side."""
    rows = x[0] if x.ndim == 3 else x
    return rows if rows.stride(-1) == 1 else rows.contiguous()


@triton.jit
def normed_token(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, sum_ptr,
    x_stride, residual_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
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
    x_stride, residual_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    token, normed = normed_token(
        x_ptr, residual_ptr, weight_ptr, sum_ptr, x_stride, residual_stride, eps, WIDTH, BLOCK, ADDS, DEPENDENT
    )
    column = tl.arange(0, BLOCK)
    tl.store(out_ptr + token * WIDTH + column, normed, mask=column < WIDTH)


def launch_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `specdec.ops.elementwise`; without a residual the first result is x."""
    width = x.shape[-1]
    rows = token_rows(x)
    added = rows if residual is None else token_rows(residual)
    out = x.new_empty(x.shape)
    total = x if residual is None else x.new_empty(x.shape)
    _norm_kernel[(len(rows),)](
        rows, added, weight, total, out, rows.stride(0), added.stride(0), eps, WIDTH=width,
        BLOCK=triton.next_power_of_2(width), ADDS=residual is not None, num_warps=8 if width >= 2048 else 4,
        **dependent_launch(x.device),
    )  # fmt: skip
    return total, out


_HEADS_A_PROGRAM = 16


@triton.jit
def _rotation_kernel(  # type: ignore[no-untyped-def]
    query_ptr,  # [1, Hq, T, D]
    key_ptr,  # [1, Hkv, T, D]
    cos_ptr,  # [1, 1, T, D or D/2]
    sin_ptr,  # [1, 1, T, D or D/2]
    query_out_ptr,  # [T, Hq, D] heads side by side
    key_out_ptr,  # [T, Hkv, D] heads side by side
    query_token, query_head, key_token, key_head, cos_token, sin_token, query_out_token, key_out_token,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr,
    SECOND: tl.constexpr,  # where cos and sin of the second half begin
    BLOCK: tl.constexpr, HEADS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]  # [HEADS, 1] query heads, then key heads
    column = tl.arange(0, BLOCK)[None, :]  # [1, D/2]
    is_query = head < QUERY_HEADS
    inside = (head < QUERY_HEADS + KEY_HEADS) & (column < HALF)  # [HEADS, D/2]
    own = tl.where(is_query, head, head - QUERY_HEADS)
    source = tl.where(
        is_query,
        query_ptr + token * query_token + own * query_head + column,
        key_ptr + token * key_token + own * key_head + column,
    )
    to = tl.where(
        is_query,
        query_out_ptr + token * query_out_token + own * (2 * HALF) + column,
        key_out_ptr + token * key_out_token + own * (2 * HALF) + column,
    )
    cos, sin = cos_ptr + token * cos_token + column, sin_ptr + token * sin_token + column
    fits = column < HALF
    x1 = tl.load(source, mask=inside, other=0.0).to(tl.float32)  # [HEADS, D/2]
    x2 = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)  # [HEADS, D/2]
    y1 = x1 * tl.load(cos, mask=fits, other=0.0) - x2 * tl.load(sin, mask=fits, other=0.0)
    y2 = x2 * tl.load(cos + SECOND, mask=fits, other=0.0) + x1 * tl.load(sin + SECOND, mask=fits, other=0.0)
    tl.store(to, y1.to(query_out_ptr.dtype.element_ty), mask=inside)
    tl.store(to + HALF, y2.to(query_out_ptr.dtype.element_ty), mask=inside)


def launch_rotation(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    outs: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """See `specdec.ops.elementwise.rotated`; cos and sin of width D/2 hold for both halves.

    outs: the rotated query and key, laid out in memory as [T, H, D], tokens any distance apart.
    """
    query, key, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, cos, sin))
    (_, query_heads, tokens, dim), key_heads = query.shape, key.shape[1]
    _rotation_kernel[(tokens, triton.cdiv(query_heads + key_heads, _HEADS_A_PROGRAM))](
        query, key, cos, sin, *outs, query.stride(2), query.stride(1), key.stride(2), key.stride(1), cos.stride(2),
        sin.stride(2), outs[0].stride(2), outs[1].stride(2), QUERY_HEADS=query_heads, KEY_HEADS=key_heads,
        HALF=dim // 2, SECOND=cos.shape[-1] - dim // 2, BLOCK=triton.next_power_of_2(dim // 2), HEADS=_HEADS_A_PROGRAM,
        num_warps=4, **dependent_launch(query.device),
    )  # fmt: skip
