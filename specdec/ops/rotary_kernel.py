"""Rotary embedding of queries and keys as one Triton kernel, some heads of one token per program.

Imported on CUDA only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.kernels.pdl import dependent_launch, wait_for_predecessor

_HEADS_A_PROGRAM = 16


@triton.jit
def _rotation_kernel(  # type: ignore[no-untyped-def]
    query_ptr,  # [1, Hq, T, D]
    key_ptr,  # [1, Hkv, T, D]
    cos_ptr,  # [1, 1, T, D or D/2]
    sin_ptr,  # [1, 1, T, D or D/2]
    query_out_ptr,  # [T, Hq, D] heads side by side
    key_out_ptr,  # [T, Hkv, D] heads side by side
    query_token,
    query_head,
    key_token,
    key_head,
    cos_token,
    sin_token,
    query_out_token,
    key_out_token,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    SECOND: tl.constexpr,  # where cos and sin of the second half begin
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
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
    """See `specdec.ops.rotary.rotated`; cos and sin of width D/2 hold for both halves.

    outs: the rotated query and key, laid out in memory as [T, H, D], tokens any distance apart.
    """
    query, key, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, cos, sin))
    (_, query_heads, tokens, dim), key_heads = query.shape, key.shape[1]
    _rotation_kernel[(tokens, triton.cdiv(query_heads + key_heads, _HEADS_A_PROGRAM))](
        query,
        key,
        cos,
        sin,
        *outs,
        query.stride(2),
        query.stride(1),
        key.stride(2),
        key.stride(1),
        cos.stride(2),
        sin.stride(2),
        outs[0].stride(2),
        outs[1].stride(2),
        QUERY_HEADS=query_heads,
        KEY_HEADS=key_heads,
        HALF=dim // 2,
        SECOND=cos.shape[-1] - dim // 2,
        BLOCK=triton.next_power_of_2(dim // 2),
        HEADS=_HEADS_A_PROGRAM,
        num_warps=4,
        **dependent_launch(query.device),
    )
