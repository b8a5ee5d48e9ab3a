"""The gated delta rule and Mamba2's scan, token by token: accepted drafts replayed, new tokens absorbed, drafts
verified, in one launch.

A program holds BLOCK_DV rows of the state of one value head of one row in registers: it reads them once, and stores
them once. So what a launch costs is the bytes of the states, read and written. The order of the sums does not depend on
how tokens are divided into launches: a replayed token changes the state by the same bits as when it was verified.

Mamba2's scan is the rule without a correction by what the state knows (DELTA false): its C are queries, B keys, x
values and dt β, and a gate is dt A (see `attention.recurrence.kernel_rows.Inputs`).

Letters in the kernel: B rows of the state (BLOCK_DV), J · L its columns (Dk): see `kernel_rows`.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464, equation 10; Kimi Linear, arXiv 2510.26692,
for a gate of every key dimension; Dao, Gu, "Transformers are SSMs", arXiv 2405.21060, equation 1 with a scalar A. The
ring of inputs in place of a state for every draft: see `attention/recurrence/kernel_rows.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from attention.kernels.launch import wait_for_predecessor
from attention.kernels.tiles import load_float, load_where
from attention.recurrence.kernel_rows import Inputs, facts_of_row, state_tiling, times, zero_padding


@triton.jit
def inverse_length(S, x, NORMALIZE: constexpr):  # type: ignore[no-untyped-def]
    """1 / |x| of x [J, 1, L] float32, or 1 -> [1, B, 1]: the same for every row of S [J, B, L], in the layout of the
    threads that use it; same epsilon as transformers' `l2norm`."""
    if NORMALIZE:
        squares = tl.broadcast_to(x * x, S.shape)
        return tl.rsqrt(tl.sum(tl.sum(squares, 0, keep_dims=True), 2, keep_dims=True) + 1e-6)
    else:  # noqa: RET505 - one of the two is compiled
        return tl.full((1, 1, 1), 1.0, tl.float32)


@triton.jit
def absorbed(S, k, v, g, beta, NORMALIZE: constexpr, DELTA: constexpr):  # type: ignore[no-untyped-def]
    """The state S [J, B, L] after a token: k [J, 1, L], v [1, B, 1], g scalar or [J, 1, L], beta scalar; float32."""
    if DELTA:
        inverse = inverse_length(S, k, NORMALIZE)  # [1, B, 1]
        S = S * tl.exp(g)
        return S + (beta * (v - times(S, k) * inverse) * inverse) * k
    else:  # noqa: RET505 - one of the two is compiled
        kept = tl.broadcast_to(tl.exp(g * beta), S.shape)
        return tl.fma(S, kept, (beta * v) * k)  # see `scan_kernel.taken_in`


@triton.jit
def replayed(  # type: ignore[no-untyped-def]
    S,  # [J, B, L]
    g_ptr, ring_k_ptr, ring_v_ptr, ring_g_ptr, ring_beta_ptr,
    slot, start, replay, head,
    dv,  # [1, B, 1]
    column,  # [J, 1, L]
    RING_SIZE: constexpr, HEADS: constexpr, KEY_HEADS: constexpr, DIM_K: constexpr, DIM_V: constexpr,
    VECTOR_GATE: constexpr, NORMALIZE: constexpr, DELTA: constexpr,
):  # fmt: skip
    """The state after the positions start - replay to start - 1, from the row's ring. g_ptr: read without DELTA, the
    same gate for every token."""
    key_head = head // (HEADS // KEY_HEADS)
    for i in range(replay):
        place = slot * RING_SIZE + (start - replay + i) % RING_SIZE
        at = place * HEADS + head
        k_at = ring_k_ptr + (place * KEY_HEADS + key_head) * DIM_K + column  # [J, 1, L]
        k = load_where(k_at, column < DIM_K)  # [J, 1, L]
        v = load_where(ring_v_ptr + at * DIM_V + dv, dv < DIM_V)  # [1, B, 1]
        if VECTOR_GATE:
            g = load_where(ring_g_ptr + at * DIM_K + column, column < DIM_K)
        else:
            g = tl.load(ring_g_ptr + at if DELTA else g_ptr + head)
        S = absorbed(S, k.to(tl.float32), v.to(tl.float32), g, tl.load(ring_beta_ptr + at), NORMALIZE, DELTA)
    return S


# Not specialised: Triton would compile variants for 1 and for multiples of 16, in the middle of serving.
@triton.jit(do_not_specialize=["total_tokens", "most_tokens", "least_inputs"])
def _tokens_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, Hk, Dk]
    k_ptr,  # [T, Hk, Dk]
    v_ptr,  # [T, H, Dv]
    g_ptr,  # [T, H] or [T, H, Dk] float32
    beta_ptr,  # [T, H]
    skip_ptr,  # [H], or any pointer
    out_ptr,  # [T, H, Dv] contiguous
    state_ptr,  # [slots, H, Dv, Dk] float32 or half precision
    ring_k_ptr,  # [slots, R, Hk, Dk]
    ring_v_ptr,  # [slots, R, H, Dv]
    ring_g_ptr,  # [slots, R, H] or [slots, R, H, Dk] float32; any pointer without DELTA
    ring_beta_ptr,  # [slots, R, H] float32
    query_start_loc_ptr, slots_ptr, start_ptr, replay_ptr, num_new_ptr,
    scale,
    total_tokens,  # T
    most_tokens,  # of a row; longer ones are left to another launch
    least_inputs,  # replayed and own tokens of a row; rows with fewer are left to another launch
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, beta_token, beta_head,
    RING_SIZE: constexpr, HEADS: constexpr, KEY_HEADS: constexpr, DIM_K: constexpr, DIM_V: constexpr,
    WIDTH_K: constexpr, PIECE: constexpr, BLOCK_DV: constexpr, VECTOR_GATE: constexpr,
    NORMALIZE: constexpr, DELTA: constexpr, HAS_SKIP: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dv = block * BLOCK_DV + tl.arange(0, BLOCK_DV)[None, :, None]  # [1, B, 1]
    in_v = dv < DIM_V
    if row == tl.num_programs(2) - 1:
        zero_padding(out_ptr + head * DIM_V + dv, query_start_loc_ptr + row, total_tokens, HEADS * DIM_V, in_v)
        return
    first, tokens, slot, start, replay, num_new = facts_of_row(
        query_start_loc_ptr, slots_ptr, start_ptr, replay_ptr, num_new_ptr, row
    )
    if (tokens == 0) | (tokens > most_tokens) | (replay + tokens < least_inputs):
        return
    piece, lane = tl.arange(0, WIDTH_K // PIECE), tl.arange(0, PIECE)
    column = piece[:, None, None] * PIECE + lane[None, None, :]  # [J, 1, L]
    in_k = column < DIM_K
    state_at = state_ptr + slot * (HEADS * DIM_V * DIM_K) + (head * DIM_V + dv) * DIM_K + column  # [J, B, L]
    S = load_float(state_at, (column < tl.where(start > replay, DIM_K, 0)) & in_v)  # [J, B, L]
    S = replayed(
        S, g_ptr, ring_k_ptr, ring_v_ptr, ring_g_ptr, ring_beta_ptr, slot, start, replay, head, dv, column,
        RING_SIZE, HEADS, KEY_HEADS, DIM_K, DIM_V, VECTOR_GATE, NORMALIZE, DELTA,
    )  # fmt: skip
    key_head = head // (HEADS // KEY_HEADS)
    owns_key = (block == 0) & (head % (HEADS // KEY_HEADS) == 0)
    for token in range(tokens):
        at = first + token
        k = load_where(k_ptr + (at * k_token + key_head * k_head) + column, in_k)  # [J, 1, L]
        q = load_where(q_ptr + (at * q_token + key_head * q_head) + column, in_k)  # [J, 1, L]
        v = load_where(v_ptr + (at * v_token + head * v_head) + dv, in_v)  # [1, B, 1]
        beta = tl.load(beta_ptr + at * beta_token + head * beta_head)
        g_at = g_ptr + (at * g_token + head * g_head)
        if VECTOR_GATE:
            g = load_where(g_at + column, in_k)  # [J, 1, L]
        else:
            g = tl.load(g_at)
        S = absorbed(S, k.to(tl.float32), v.to(tl.float32), g, beta.to(tl.float32), NORMALIZE, DELTA)
        query = q.to(tl.float32)  # [J, 1, L]
        o = times(S, query)  # [1, B, 1]
        if DELTA:
            o *= inverse_length(S, query, NORMALIZE) * scale
        if HAS_SKIP:
            o += tl.load(skip_ptr + head).to(tl.float32) * v.to(tl.float32)
        tl.store(out_ptr + (at * HEADS + head) * DIM_V + dv, o, mask=in_v)
        if token == num_new - 1:
            tl.store(state_at, S, mask=in_k & in_v)
        if token >= num_new:
            place = slot * RING_SIZE + (start + token) % RING_SIZE
            ring_at = place * HEADS + head
            tl.store(ring_v_ptr + ring_at * DIM_V + dv, v, mask=in_v)
            ring_k_at = ring_k_ptr + (place * KEY_HEADS + key_head) * DIM_K + column
            tl.store(ring_k_at, k, mask=column < tl.where(owns_key, DIM_K, 0))
            tl.store(ring_beta_ptr + ring_at, beta, mask=block == 0)
            if VECTOR_GATE:
                tl.store(ring_g_ptr + ring_at * DIM_K + column, g, mask=column < tl.where(block == 0, DIM_K, 0))
            elif DELTA:
                tl.store(ring_g_ptr + ring_at, g, mask=block == 0)


def launch_tokens(call: Inputs, most_tokens: int | None, least_inputs: int = 0) -> None:
    """Rows with up to `most_tokens` tokens, and at least `least_inputs` with the replayed ones, and zeros for tokens of
    no row; other rows are left as they are. None: rows of any length, by one tiling for any number of rows."""
    _, heads, dim_v = call.v.shape
    rows = len(call.rows.slots)
    tiles = state_tiling(0 if most_tokens is None else heads * rows, dim_v, call.k.shape[2])
    skip: Tensor = call.v if call.skip is None else call.skip
    _tokens_kernel[(triton.cdiv(dim_v, tiles.block), heads, rows + 1)](
        *call.tensors, skip, call.out, call.state, *call.ring, *call.rows.arrays, call.scale, len(call.v),
        len(call.v) if most_tokens is None else most_tokens, least_inputs, *call.strides, PIECE=tiles.piece,
        BLOCK_DV=tiles.block, VECTOR_GATE=call.g.dim() == 3, NORMALIZE=call.normalize, DELTA=call.delta,
        HAS_SKIP=call.skip is not None, num_warps=tiles.warps, maxnreg=tiles.registers, **call.constants,
    )  # fmt: skip
