"""Rotary embedding of queries and keys as one Triton kernel, some heads of one token a program.

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
    query_ptr,
    key_ptr,
    cos_ptr,
    sin_ptr,
    query_out_ptr,
    key_out_ptr,
    query_token,
    query_head,
    key_token,
    key_head,
    cos_token,
    sin_token,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_predecessor(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    is_query = head < QUERY_HEADS
    inside = (head < QUERY_HEADS + KEY_HEADS) & (column < HALF)
    own = tl.where(is_query, head, head - QUERY_HEADS)
    source = tl.where(
        is_query,
        query_ptr + token * query_token + own * query_head + column,
        key_ptr + token * key_token + own * key_head + column,
    )
    to = tl.where(
        is_query,
        query_out_ptr + (token * QUERY_HEADS + own) * (2 * HALF) + column,
        key_out_ptr + (token * KEY_HEADS + own) * (2 * HALF) + column,
    )
    cos, sin = cos_ptr + token * cos_token + column, sin_ptr + token * sin_token + column
    fits = column < HALF
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    turned_first = first * tl.load(cos, mask=fits, other=0.0) - second * tl.load(sin, mask=fits, other=0.0)
    turned_second = second * tl.load(cos + HALF, mask=fits, other=0.0) + first * tl.load(
        sin + HALF, mask=fits, other=0.0
    )
    tl.store(to, turned_first.to(query_out_ptr.dtype.element_ty), mask=inside)
    tl.store(to + HALF, turned_second.to(query_out_ptr.dtype.element_ty), mask=inside)


def launch_rotation(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    outs: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """See `specdec.ops.rotary.rotated`. outs: the rotated query and key, laid out in memory as [T, H, D]."""
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
        QUERY_HEADS=query_heads,
        KEY_HEADS=key_heads,
        HALF=dim // 2,
        BLOCK=triton.next_power_of_2(dim // 2),
        HEADS=_HEADS_A_PROGRAM,
        num_warps=4,
        **dependent_launch(query.device),
    )
