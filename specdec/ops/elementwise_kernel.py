"""Triton kernels of gated activation, RMS norm and rotary embedding. Imported on CUDA only.

Results in 8 bits are rounded to half precision before, so that nothing depends on whether the two were fused.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from attention.kernels.launch import dependent_launch, wait_for_predecessor
from attention.kernels.tiles import block_of, load_float, load_where, long_program_id
from specdec.ops.fp8_kernel import eight_bits, quantised
from specdec.ops.linear import without_gaps

_GROUP = constexpr(128)
_BLOCK, _WARPS = 1024, 4


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    values, start, token, out_ptr, scale_ptr, WIDTH: constexpr, BLOCK: constexpr
):
    """Store a token's values [BLOCK] from column `start` on; where there are scales, in 8 bits and a scale a group."""
    if scale_ptr is None:
        column = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + token * WIDTH + column, values, mask=column < WIDTH)
    else:
        groups = tl.reshape(values.to(tl.float32), (BLOCK // _GROUP, _GROUP))  # [G, 128]
        rounded, scale = quantised(groups, out_ptr.dtype.element_ty)
        group = start // _GROUP + tl.arange(0, BLOCK // _GROUP)  # [G]
        place = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]  # [G, 128]
        tl.store(out_ptr + token * WIDTH + place, rounded, mask=place < WIDTH)
        tl.store(scale_ptr + token * tl.cdiv(WIDTH, _GROUP) + group, scale, mask=group * _GROUP < WIDTH)


@triton.jit
def _silu_product_kernel(  # type: ignore[no-untyped-def]
    gate_ptr,  # [T, F]
    up_ptr,  # [T, F]
    out_ptr,  # [T, F] contiguous; e4m3 with scales
    scale_ptr,  # [T, G] contiguous, float32, or None
    gate_stride, up_stride,
    WIDTH: constexpr, BLOCK: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    token, start = long_program_id(0), tl.program_id(1) * BLOCK
    column = start + tl.arange(0, BLOCK)  # [BLOCK]
    inside = column < WIDTH
    gate = load_where(gate_ptr + token * gate_stride + column, inside)  # [BLOCK]
    up = load_where(up_ptr + token * up_stride + column, inside)  # [BLOCK]
    wide = gate.to(tl.float32)
    product = (wide / (1 + tl.exp(-wide)) * up.to(tl.float32)).to(gate.dtype)
    _store(product, start, token, out_ptr, scale_ptr, WIDTH, BLOCK)


def launch_silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """See `specdec.ops.elementwise`."""
    out = gate.new_empty(gate.shape)
    _launch_silu_product(gate, up, out, None)
    return out


def launch_silu_product_fp8(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """See `specdec.ops.fp8`."""
    out, scales = eight_bits(gate)
    _launch_silu_product(gate, up, out, scales)
    return out, scales


def _launch_silu_product(gate: Tensor, up: Tensor, out: Tensor, scales: Tensor | None) -> None:
    rows, others = _token_rows(gate), _token_rows(up)
    tokens, width = rows.shape
    _silu_product_kernel[(tokens, triton.cdiv(width, _BLOCK))](
        rows, others, out, scales, rows.stride(0), others.stride(0), WIDTH=width, BLOCK=_BLOCK, num_warps=_WARPS,
        **dependent_launch(gate.device),
    )  # fmt: skip


def _token_rows(x: Tensor) -> Tensor:
    """x [1, T, F] or [T, F] -> [T, F], values of a row side by side."""
    return without_gaps(x[0] if x.ndim == 3 else x)


@triton.jit
def _norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, H]
    residual_ptr,  # [T, H]
    weight_ptr,  # [H]
    sum_ptr,  # [T, H] contiguous
    out_ptr,  # [T, H] contiguous; e4m3 with scales
    scale_ptr,  # [T, G] contiguous, float32, or None
    x_stride, residual_stride, eps,
    WIDTH: constexpr, BLOCK: constexpr, ADDS: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)  # [BLOCK]
    inside = column < WIDTH
    weight = load_where(weight_ptr + column, inside)  # [BLOCK]; no kernel writes it: no need to wait
    wait_for_predecessor(DEPENDENT)
    token = long_program_id(0)
    x = load_where(x_ptr + token * x_stride + column, inside)  # [BLOCK]
    if ADDS:
        residual = load_where(residual_ptr + token * residual_stride + column, inside)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + token * WIDTH + column, x, mask=inside)
    values = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)  # scalar
    normed = ((values * scale).to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
    _store(normed, 0, token, out_ptr, scale_ptr, WIDTH, BLOCK)


def launch_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `specdec.ops.elementwise`; without a residual the first result is x."""
    out = x.new_empty(x.shape)
    return _launch_norm(x, residual, weight, eps, out, None), out


def launch_norm_fp8(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """See `specdec.ops.fp8`; without a residual the first result is x."""
    out, scales = eight_bits(x)
    return _launch_norm(x, residual, weight, eps, out, scales), out, scales


def _launch_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    scales: Tensor | None,
) -> Tensor:
    """Returns the sum of x and the residual."""
    width, rows = x.shape[-1], _token_rows(x)
    added = rows if residual is None else _token_rows(residual)
    total = x if residual is None else x.new_empty(x.shape)
    _norm_kernel[(len(rows),)](
        rows, added, weight, total, out, scales, rows.stride(0), added.stride(0), eps, WIDTH=width,
        BLOCK=max(triton.next_power_of_2(width), 128), ADDS=residual is not None, num_warps=8 if width >= 2048 else 4,
        **dependent_launch(x.device),
    )  # fmt: skip
    return total


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
    QUERY_HEADS: constexpr, KEY_HEADS: constexpr, HALF: constexpr,
    SECOND: constexpr,  # where cos and sin of the second half begin
    BLOCK: constexpr, HEADS: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    token = long_program_id(0)
    head = block_of(tl.program_id(1), HEADS)[:, None]  # [HEADS, 1] query heads, then key heads
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
    x1 = load_float(source, inside)  # [HEADS, D/2]
    x2 = load_float(source + HALF, inside)  # [HEADS, D/2]
    y1 = x1 * load_where(cos, fits) - x2 * load_where(sin, fits)
    y2 = x2 * load_where(cos + SECOND, fits) + x1 * load_where(sin + SECOND, fits)
    tl.store(to, y1, mask=inside)
    tl.store(to + HALF, y2, mask=inside)


def launch_rotation(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    outs: tuple[Tensor, Tensor],
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
