"""The gated delta rule, token by token: accepted drafts replayed, new tokens absorbed, drafts verified, in one launch.

A program holds BLOCK_DV rows of the state of one value head of one row in registers: it reads them once, and stores
them once. So what a launch costs is the bytes of the states, read and written. The order of the sums does not depend on
how tokens are divided into launches: a replayed token changes the state by the same bits as when it was verified.

Letters in the kernel: B rows of the state (BLOCK_DV), J · L its columns (Dk): see `kernel_rows`.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464, equation 10; Kimi Linear, arXiv 2510.26692,
for a gate of every key dimension. The ring of inputs in place of a state for every draft: see
`attention/recurrence/kernel_rows.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.kernels.launch import dependent_launch, wait_for_predecessor
from attention.recurrence.kernel_rows import (
    StateTiling,
    check_launch,
    inner_rows,
    row_state,
    row_tokens,
    state_tiling,
    times,
    zeros_from,
)
from attention.recurrence.state_cache import DeltaRing
from attention.recurrence.state_rows import StateRows


@triton.jit
def inverse_length(S, x, NORMALIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 / |x| of x [J, 1, L] float32, or 1 -> [1, B, 1]: the same for every row of S [J, B, L], in the layout of the
    threads that use it; same epsilon as transformers' `l2norm`."""
    if NORMALIZE:
        squares = tl.broadcast_to(x * x, S.shape)
        return tl.rsqrt(tl.sum(tl.sum(squares, 0, keep_dims=True), 2, keep_dims=True) + 1e-6)
    else:  # noqa: RET505 - one of the two is compiled
        return tl.full((1, 1, 1), 1.0, tl.float32)


@triton.jit
def absorbed(S, k, v, g, beta, NORMALIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The state S [J, B, L] after a token: k [J, 1, L], v [1, B, 1], g scalar or [J, 1, L], beta scalar; float32."""
    inverse = inverse_length(S, k, NORMALIZE)  # [1, B, 1]
    S = S * tl.exp(g)
    return S + (beta * (v - times(S, k) * inverse) * inverse) * k


@triton.jit
def replayed(  # type: ignore[no-untyped-def]
    S,  # [J, B, L]
    ring_k_ptr, ring_v_ptr, ring_g_ptr, ring_beta_ptr,
    slot, start, replay, head,
    dv,  # [1, B, 1]
    column,  # [J, 1, L]
    ring_k_slot, ring_v_slot, ring_g_slot, ring_beta_slot,
    RING_SIZE: tl.constexpr, HEADS: tl.constexpr, RING_HEADS: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr,
    VECTOR_GATE: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """The state after the positions start - replay to start - 1, from the row's ring."""
    ring_head = head // (HEADS // RING_HEADS)
    for i in range(replay):
        place = (start - replay + i) % RING_SIZE
        at = place * HEADS + head
        k_at = slot * ring_k_slot + (place * RING_HEADS + ring_head) * DIM_K
        k = tl.load(ring_k_ptr + k_at + column, mask=column < DIM_K, other=0.0)  # [J, 1, L]
        v = tl.load(ring_v_ptr + slot * ring_v_slot + at * DIM_V + dv, mask=dv < DIM_V, other=0.0)  # [1, B, 1]
        beta = tl.load(ring_beta_ptr + slot * ring_beta_slot + at)
        if VECTOR_GATE:
            g = tl.load(ring_g_ptr + slot * ring_g_slot + at * DIM_K + column, mask=column < DIM_K, other=0.0)
        else:
            g = tl.load(ring_g_ptr + slot * ring_g_slot + at)
        S = absorbed(S, k.to(tl.float32), v.to(tl.float32), g, beta, NORMALIZE)
    return S


# Not specialised: Triton would compile variants for 1 and for multiples of 16, in the middle of serving.
@triton.jit(do_not_specialize=["total_tokens", "most_tokens", "least_inputs"])
def _delta_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, Hq, Dk]
    k_ptr,  # [T, Hq, Dk]
    v_ptr,  # [T, H, Dv]
    g_ptr,  # [T, H] or [T, H, Dk] float32
    beta_ptr,  # [T, H]
    out_ptr,  # [T, H, Dv] contiguous
    state_ptr,  # [slots, H, Dv, Dk] float32
    ring_k_ptr,  # [slots, R, Hk, Dk]
    ring_v_ptr,  # [slots, R, H, Dv]
    ring_g_ptr,  # [slots, R, H] or [slots, R, H, Dk] float32
    ring_beta_ptr,  # [slots, R, H] float32
    query_start_loc_ptr, slots_ptr, start_ptr, replay_ptr, num_new_ptr,
    scale,
    total_tokens,  # T
    most_tokens,  # of a row; longer ones are left to another launch
    least_inputs,  # replayed and own tokens of a row; rows with fewer are left to another launch
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, beta_token, beta_head, state_slot, ring_k_slot,
    ring_v_slot, ring_g_slot, ring_beta_slot,
    RING_SIZE: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, RING_HEADS: tl.constexpr,
    DIM_K: tl.constexpr, DIM_V: tl.constexpr, WIDTH_K: tl.constexpr, PIECE: tl.constexpr, BLOCK_DV: tl.constexpr,
    VECTOR_GATE: tl.constexpr, NORMALIZE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dv = block * BLOCK_DV + tl.arange(0, BLOCK_DV)[None, :, None]  # [1, B, 1]
    in_v = dv < DIM_V
    if row == tl.num_programs(2) - 1:  # tokens of no row
        end = tl.load(query_start_loc_ptr + row)
        padding_at = out_ptr + (end.to(tl.int64) * HEADS + head) * DIM_V + dv
        zeros_from(padding_at, total_tokens - end, HEADS * DIM_V, in_v, out_ptr.dtype.element_ty)
        return
    first, tokens = row_tokens(query_start_loc_ptr, row)
    slot, start, replay, num_new = row_state(slots_ptr, start_ptr, replay_ptr, num_new_ptr, row)
    if (tokens == 0) | (tokens > most_tokens) | (replay + tokens < least_inputs):
        return
    piece, lane = tl.arange(0, WIDTH_K // PIECE), tl.arange(0, PIECE)
    column = piece[:, None, None] * PIECE + lane[None, None, :]  # [J, 1, L]
    in_k = column < DIM_K
    state_at = state_ptr + slot * state_slot + (head * DIM_V + dv) * DIM_K + column  # [J, B, L]
    in_state = in_k & in_v
    S = tl.load(state_at, mask=(column < tl.where(start > replay, DIM_K, 0)) & in_v, other=0.0)  # [J, B, L]
    S = replayed(
        S, ring_k_ptr, ring_v_ptr, ring_g_ptr, ring_beta_ptr, slot, start, replay, head, dv, column,
        ring_k_slot, ring_v_slot, ring_g_slot, ring_beta_slot,
        RING_SIZE, HEADS, RING_HEADS, DIM_K, DIM_V, VECTOR_GATE, NORMALIZE,
    )  # fmt: skip
    key_head, ring_head = head // (HEADS // KEY_HEADS), head // (HEADS // RING_HEADS)
    owns_key = (block == 0) & (head % (HEADS // RING_HEADS) == 0)
    for token in range(tokens):
        at = first + token
        k = tl.load(k_ptr + (at * k_token + key_head * k_head) + column, mask=in_k, other=0.0)  # [J, 1, L]
        q = tl.load(q_ptr + (at * q_token + key_head * q_head) + column, mask=in_k, other=0.0)  # [J, 1, L]
        v = tl.load(v_ptr + (at * v_token + head * v_head) + dv, mask=in_v, other=0.0)  # [1, B, 1]
        beta = tl.load(beta_ptr + at * beta_token + head * beta_head)
        g_at = g_ptr + (at * g_token + head * g_head)
        if VECTOR_GATE:
            g = tl.load(g_at + column, mask=in_k, other=0.0)  # [J, 1, L]
        else:
            g = tl.load(g_at)
        S = absorbed(S, k.to(tl.float32), v.to(tl.float32), g, beta.to(tl.float32), NORMALIZE)
        query = q.to(tl.float32)  # [J, 1, L]
        o = times(S, query) * (inverse_length(S, query, NORMALIZE) * scale)  # [1, B, 1]
        tl.store(out_ptr + (at * HEADS + head) * DIM_V + dv, o.to(out_ptr.dtype.element_ty), mask=in_v)
        if token == num_new - 1:
            tl.store(state_at, S, mask=in_state)
        if token >= num_new:
            place = (start + token) % RING_SIZE
            ring_at = place * HEADS + head
            tl.store(ring_v_ptr + slot * ring_v_slot + ring_at * DIM_V + dv, v, mask=in_v)
            ring_k_at = ring_k_ptr + slot * ring_k_slot + (place * RING_HEADS + ring_head) * DIM_K
            tl.store(ring_k_at + column, k, mask=column < tl.where(owns_key, DIM_K, 0))
            tl.store(ring_beta_ptr + slot * ring_beta_slot + ring_at, beta.to(tl.float32), mask=block == 0)
            if VECTOR_GATE:
                ring_g_at = ring_g_ptr + slot * ring_g_slot + ring_at * DIM_K + column
                tl.store(ring_g_at, g, mask=column < tl.where(block == 0, DIM_K, 0))
            else:
                tl.store(ring_g_ptr + slot * ring_g_slot + ring_at, g, mask=block == 0)


def launch_delta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, scale: float,
    l2_normalize: bool, state: torch.Tensor, ring: DeltaRing, rows: StateRows, out: torch.Tensor, most_tokens: int,
    tiling: StateTiling | None = None, least_inputs: int = 0,
) -> None:  # fmt: skip
    """Rows with up to `most_tokens` tokens, and at least `least_inputs` with the replayed ones, into out [T, H, Dv],
    and zeros for tokens of no row; other rows are left as they are. See `gated_delta`."""
    _, heads, dim_v = v.shape
    key_heads, dim_k = k.shape[1:]
    tiles = state_tiling(heads * len(rows.slots), dim_v, dim_k) if tiling is None else tiling
    check_launch(rows, state, ring, k=k, v=v, g=g)
    q, k, v, g = (inner_rows(x) for x in (q, k, v, g))
    _delta_kernel[(triton.cdiv(dim_v, tiles.block), heads, len(rows.slots) + 1)](
        q, k, v, g, beta, out, state, ring.k, ring.v, ring.g, ring.beta, rows.query_start_loc, rows.slots, rows.start,
        rows.replay, rows.num_new, scale, len(v), most_tokens, least_inputs, *q.stride()[:2], *k.stride()[:2],
        *v.stride()[:2], *g.stride()[:2], *beta.stride(), state.stride(0), ring.k.stride(0), ring.v.stride(0),
        ring.g.stride(0), ring.beta.stride(0), RING_SIZE=ring.k.shape[1], HEADS=heads, KEY_HEADS=key_heads,
        RING_HEADS=ring.k.shape[2], DIM_K=dim_k, DIM_V=dim_v, WIDTH_K=max(tiles.piece, triton.next_power_of_2(dim_k)),
        PIECE=tiles.piece, BLOCK_DV=tiles.block, VECTOR_GATE=g.dim() == 3, NORMALIZE=l2_normalize,
        num_warps=tiles.warps, maxnreg=tiles.registers, **dependent_launch(v.device),
    )  # fmt: skip
