"""The gated delta rule of short rows as one chunk: replayed, new and draft tokens of a row, 16 together, in one launch.

Token by token every token passes over the whole state, and from 8 rows on these instructions take longer than the bytes
of the state (13 µs a token of 32 rows on an H200, where reading and storing the states takes 32). Here what depends on
tokens alone is solved for all of them first, by matmuls of 16 x 16, and the state takes part in three matmuls on tensor
cores, however many tokens there are. With Γ the sums of the gates, K, Q, V the row's keys, queries and values as
columns, and S the stored state:

    u (I + A) = β (V - exp(Γ) S K)       A[i, j] = β_j exp(Γ_j - Γ_i) (k_i · k_j), i < j
    o = scale (exp(Γ) S Q + u P)         P[i, j] = exp(Γ_j - Γ_i) (k_i · q_j), i <= j
    S = exp(Γ_c) S + u exp(Γ_c - Γ) Kᵀ   of the first c tokens only, those that are committed

It is the rule of `attention/kernels/delta_chunks.py`, transposed, so that u lies as the state's rows do. Sums of gates
between two tokens are added up for each pair: a difference of two long sums would have their error.

Precision. All that goes into the state is as accurate as float32: the state comes back every round. Keys and queries in
half precision are TF32 numbers as they are, before they are divided by their lengths. So the state times the keys is
two products of TF32 (the state's upper and lower bits), and the scores are one. The state times the queries is one, of
the upper bits: it goes into the output only, which is rounded to half precision. Inputs in float32: three each.

A program goes over its rows of the state in pieces of columns, twice: for what is read from the state, and to change
it, when they still lie in a cache. Whole rows of 128 columns would not fit the registers of the matmuls.

Letters in the kernel: C tokens of a row (16), B rows of the state of a program, L columns of a piece.

Source: Yang et al., "Gated Delta Networks", arXiv 2412.06464, section 3.3. Imported on CUDA only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention.cache.state import DeltaRing
from attention.kernels.chunks import precision_of
from attention.kernels.pdl import dependent_launch, wait_for_predecessor
from attention.kernels.recurrent import check_launch, inner_rows, row_state, row_tokens
from attention.recurrence.rows import StateRows

INPUTS_OF_ONE_CHUNK = 16
"""Replayed and own tokens of a row that are read as one chunk."""


@dataclass(frozen=True)
class ShortTiling:
    """Rows of the state a program works on, columns of a piece, pieces in flight, and warps."""

    block_dv: int
    piece: int
    stages: int
    warps: int


_FEW_UNITS = 64
"""Value heads of all rows up to which a program has half as many rows of the state, so that programs are enough."""


def short_tiling(units: int, dim_v: int) -> ShortTiling:
    """The tiling for so many rows times value heads: the fastest of 40 on an H200 at K = 1, 3 and 5.

    Two warps, many of them at once, with four pieces of 16 columns in flight: at 32 rows 75 µs, where one piece of 32
    columns and four warps take 96. Never eight warps: of tiles of 16 x 16 Triton 3.6 compiles sums among eight that
    read shared memory which is not there (`attention.kernels.ssd_chunks.warps_of`).
    """
    return ShortTiling(min(32 if units <= _FEW_UNITS else 64, max(16, triton.next_power_of_2(dim_v))), 16, 4, 2)


@triton.jit
def unit_upper_inverse(A):  # type: ignore[no-untyped-def]
    """(I + A)⁻¹ of a strictly upper triangular A [16, 16] float32.

    The blocks of 4 on the diagonal first, N⁴ = 0; then, with D their inverses and M = D times the rest, (I + M)⁻¹ D, in
    which M⁴ = 0. Powers of A itself would grow to thousands where keys repeat, and their difference is 1.
    """
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]  # [16, 1], [1, 16]
    one = (i == j).to(tl.float32)  # [16, 16]
    in_block = i // 4 == j // 4
    N = tl.where(in_block, A, 0.0)
    D = tl.dot(one - N, one + tl.dot(N, N, input_precision="tf32x3"), input_precision="tf32x3")
    M = tl.dot(D, tl.where(in_block, 0.0, A), input_precision="tf32x3")
    right = tl.dot(one + tl.dot(M, M, input_precision="tf32x3"), D, input_precision="tf32x3")
    return tl.dot(one - M, right, input_precision="tf32x3")


@triton.jit
def upper_bits(x):  # type: ignore[no-untyped-def]
    """x float32 -> the nearest TF32 numbers, as float32."""
    bits = (x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _exact_times(x, y, total, EXACT_Y: tl.constexpr):  # type: ignore[no-untyped-def]
    """total + x @ y as accurate as float32; EXACT_Y: y has TF32 numbers only."""
    if EXACT_Y:
        upper = upper_bits(x)
        return tl.dot(upper, y, tl.dot(x - upper, y, total, input_precision="tf32"), input_precision="tf32")
    else:  # noqa: RET505 - one of the two is compiled
        return tl.dot(x, y, total, input_precision="tf32x3")


@triton.jit
def _joined(own_at, is_own, ring_at, is_ring, REPLAY: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a row's tokens have there, and replayed ones in the ring; zeros elsewhere."""
    x = tl.load(own_at, mask=is_own, other=0.0)
    if REPLAY:
        kept = tl.load(ring_at, mask=is_ring, other=0.0)
        x = tl.where(is_ring, kept, x.to(kept.dtype))
    return x


@triton.jit
def _inverse_length(squares, NORMALIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of squares [C] -> 1 / length, or 1; the epsilon is that of transformers' `l2norm`."""
    if NORMALIZE:
        return tl.rsqrt(squares + 1e-6)
    else:  # noqa: RET505 - one of the two is compiled
        return tl.full(squares.shape, 1.0, tl.float32)


@triton.jit
def _zeros_after_rows(out_ptr, end, total_tokens, head, dv, HEADS: tl.constexpr, DIM_V: tl.constexpr):  # type: ignore[no-untyped-def]
    """Outputs of tokens of no row; dv [B, 1]."""
    at = out_ptr + (end.to(tl.int64) * HEADS + head) * DIM_V + dv
    for _ in range(total_tokens - end):
        tl.store(at, tl.zeros(dv.shape, out_ptr.dtype.element_ty), mask=dv < DIM_V)
        at += HEADS * DIM_V


@triton.jit(do_not_specialize=["total_tokens"])
def _short_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, Hq, Dk]
    k_ptr,  # [T, Hq, Dk]
    v_ptr,  # [T, H, Dv]
    g_ptr,  # [T, H] float32
    beta_ptr,  # [T, H]
    out_ptr,  # [T, H, Dv] contiguous
    state_ptr,  # [slots, H, Dv, Dk] float32
    ring_k_ptr,  # [slots, R, Hk, Dk]
    ring_v_ptr,  # [slots, R, H, Dv]
    ring_g_ptr,  # [slots, R, H] float32
    ring_beta_ptr,  # [slots, R, H] float32
    query_start_loc_ptr,
    slots_ptr,
    start_ptr,
    replay_ptr,
    num_new_ptr,
    scale,
    total_tokens,  # T
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    g_token,
    g_head,
    beta_token,
    beta_head,
    state_slot,
    ring_k_slot,
    ring_v_slot,
    ring_g_slot,
    ring_beta_slot,
    RING_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    RING_HEADS: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    WIDTH_K: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    REPLAY: tl.constexpr,  # whether a row may replay
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    CHUNK: tl.constexpr = 16
    EXACT: tl.constexpr = PRECISION == "tf32"  # keys and queries are TF32 numbers
    wait_for_predecessor(DEPENDENT)
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dv = block * BLOCK_DV + tl.arange(0, BLOCK_DV)[:, None]  # [B, 1]
    if row == tl.num_programs(2) - 1:
        _zeros_after_rows(out_ptr, tl.load(query_start_loc_ptr + row), total_tokens, head, dv, HEADS, DIM_V)
        return
    first, tokens = row_tokens(query_start_loc_ptr, row)
    slot, start, replay, num_new = row_state(slots_ptr, start_ptr, replay_ptr, num_new_ptr, row)
    count, committed = replay + tokens, replay + num_new
    if (tokens == 0) | (count > CHUNK):
        return
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]  # [C, 1], [1, C]
    lane = tl.arange(0, PIECE)[None, :]  # [1, L]
    in_v, known = dv < DIM_V, tl.where(start > replay, DIM_K, 0)
    key_head, ring_head = head // (HEADS // KEY_HEADS), head // (HEADS // RING_HEADS)
    own_i, own_j = (i >= replay) & (i < count), (j >= replay) & (j < count)
    place_i, place_j = (start - replay + i) % RING_SIZE, (start - replay + j) % RING_SIZE
    state_at = state_ptr + slot * state_slot + ((head * DIM_V + dv) * DIM_K + lane)  # [B, L]
    q_at = q_ptr + (first * q_token + key_head * q_head) + ((i - replay) * q_token + lane)  # [C, L]
    k_at = k_ptr + (first * k_token + key_head * k_head) + ((i - replay) * k_token + lane)  # [C, L]
    ring_k_at = ring_k_ptr + slot * ring_k_slot + ((place_i * RING_HEADS + ring_head) * DIM_K + lane)  # [C, L]
    v_at = v_ptr + (first * v_token + head * v_head) + ((j - replay) * v_token + dv)  # [B, C]
    ring_v_at = ring_v_ptr + slot * ring_v_slot + ((place_j * HEADS + head) * DIM_V + dv)  # [B, C]
    raw_v = _joined(v_at, own_j & in_v, ring_v_at, (j < replay) & in_v, REPLAY)  # [B, C]
    g_at = g_ptr + (first * g_token + head * g_head) + (i - replay) * g_token  # [C, 1]
    ring_g_at = ring_g_ptr + slot * ring_g_slot + (place_i * HEADS + head)  # [C, 1]
    g = _joined(g_at, own_i, ring_g_at, i < replay, REPLAY)  # [C, 1]
    beta_at = beta_ptr + (first * beta_token + head * beta_head) + (j - replay) * beta_token  # [1, C]
    ring_beta_at = ring_beta_ptr + slot * ring_beta_slot + (place_j * HEADS + head)  # [1, C]
    beta = _joined(beta_at, own_j, ring_beta_at, j < replay, REPLAY).to(tl.float32)  # [1, C]

    A, P = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    of_k, of_q = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
    read, o = tl.zeros((BLOCK_DV, CHUNK), tl.float32), tl.zeros((BLOCK_DV, CHUNK), tl.float32)
    for piece in tl.range(0, WIDTH_K // PIECE, num_stages=STAGES):
        begin = piece * PIECE
        in_k = begin + lane < DIM_K
        S = tl.load(state_at + begin, mask=in_v & (begin + lane < known), other=0.0)  # [B, L]
        k = _joined(k_at + begin, own_i & in_k, ring_k_at + begin, (i < replay) & in_k, REPLAY).to(tl.float32)  # [C, L]
        q = tl.load(q_at + begin, mask=own_i & in_k, other=0.0).to(tl.float32)  # [C, L]
        keys, queries = tl.trans(k), tl.trans(q)  # [L, C]
        of_k, of_q = of_k + tl.sum(k * k, 1), of_q + tl.sum(q * q, 1)
        A = tl.dot(k, keys, A, input_precision=PRECISION)
        P = tl.dot(k, queries, P, input_precision=PRECISION)
        read = _exact_times(S, keys, read, EXACT)
        if EXACT:
            o = tl.dot(upper_bits(S), queries, o, input_precision="tf32")
        else:
            o = tl.dot(S, queries, o, input_precision="tf32x3")

    of_k, of_q = _inverse_length(of_k, NORMALIZE), _inverse_length(of_q, NORMALIZE) * scale  # [C]
    between = tl.dot((j > i).to(tl.float32), tl.where(i <= j, g, 0.0), input_precision="tf32x3")  # of tokens i to j
    decay = tl.exp(tl.minimum(between, 0.0)) * of_k[:, None]  # [C, C]
    solved = unit_upper_inverse(tl.where(i < j, A * decay * (of_k[None, :] * beta), 0.0))  # [C, C]
    since = tl.exp(tl.sum(tl.where(i <= j, g, 0.0), 0))[None, :]  # [1, C] of the stored state, at each token
    read *= since * of_k[None, :]
    u = tl.dot(beta * (raw_v.to(tl.float32) - read), solved, input_precision="tf32x3")  # [B, C]
    P = tl.where(i <= j, P * decay * of_q[None, :], 0.0)
    o = o * (since * of_q[None, :]) + tl.dot(u, P, input_precision=PRECISION)
    out_at = out_ptr + (first * HEADS + head) * DIM_V + ((j - replay) * (HEADS * DIM_V) + dv)  # [B, C]
    tl.store(out_at, o.to(out_ptr.dtype.element_ty), mask=own_j & in_v)

    left = tl.exp(tl.sum(tl.where((i > j) & (i < committed), g, 0.0), 0))[None, :]  # [1, C] at the last committed token
    u = tl.where(j < committed, u * (left * of_k[None, :]), 0.0)
    kept = tl.exp(tl.sum(tl.sum(tl.where(i < committed, g, 0.0), 0, keep_dims=True), 1, keep_dims=True))  # [1, 1]
    stored = tl.where((num_new > 0) & (num_new <= tokens), DIM_K, 0)
    draft_i, draft_j = (i >= committed) & (i < count), (j >= committed) & (j < count)
    owned = tl.where((block == 0) & (head % (HEADS // RING_HEADS) == 0), DIM_K, 0)  # by one program of a key head
    for piece in tl.range(0, WIDTH_K // PIECE, num_stages=STAGES):
        begin = piece * PIECE
        in_k = begin + lane < DIM_K
        S = tl.load(state_at + begin, mask=in_v & (begin + lane < known), other=0.0)  # [B, L]
        raw_k = _joined(k_at + begin, own_i & in_k, ring_k_at + begin, (i < replay) & in_k, REPLAY)  # [C, L]
        # by fma: as the sum of a matmul, the state would lose its last bits downward, tensor cores do not round
        update = _exact_times(u, raw_k.to(tl.float32), tl.zeros(S.shape, tl.float32), EXACT)
        S = tl.fma(S, tl.broadcast_to(kept, S.shape), update)
        tl.store(state_at + begin, S, mask=in_v & (begin + lane < stored))
        tl.store(ring_k_at + begin, raw_k, mask=draft_i & (begin + lane < owned))
    tl.store(ring_v_at, raw_v, mask=draft_j & in_v)
    last = tl.where(block == 0, count, 0)
    tl.store(ring_g_at, g, mask=draft_i & (i < last))
    tl.store(ring_beta_at, beta, mask=draft_j & (j < last))


def launch_delta_short(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    l2_normalize: bool,
    state: torch.Tensor,
    ring: DeltaRing,
    rows: StateRows,
    out: torch.Tensor,
    tiling: ShortTiling | None = None,
) -> None:
    """Rows with up to INPUTS_OF_ONE_CHUNK replayed and own tokens, into out [T, H, Dv], and zeros for tokens of no row;
    other rows are left as they are. g: [T, H]. See `attention.kernels.delta.gated_delta`."""
    _, heads, dim_v = v.shape
    key_heads, dim_k = k.shape[1:]
    tiles = short_tiling(heads * len(rows.slots), dim_v) if tiling is None else tiling
    parts = {"state": state, "ring.k": ring.k, "ring.v": ring.v, "ring.g": ring.g, "ring.beta": ring.beta}
    check_launch(rows, len(state), parts, {"k": (k, ring.k), "v": (v, ring.v), "g": (g, ring.g)})
    q, k, v = (inner_rows(x) for x in (q, k, v))
    _short_kernel[(triton.cdiv(dim_v, tiles.block_dv), heads, len(rows.slots) + 1)](
        q,
        k,
        v,
        g,
        beta,
        out,
        state,
        ring.k,
        ring.v,
        ring.g,
        ring.beta,
        rows.query_start_loc,
        rows.slots,
        rows.start,
        rows.replay,
        rows.num_new,
        scale,
        len(v),
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *g.stride(),
        *beta.stride(),
        state.stride(0),
        ring.k.stride(0),
        ring.v.stride(0),
        ring.g.stride(0),
        ring.beta.stride(0),
        RING_SIZE=ring.k.shape[1],
        HEADS=heads,
        KEY_HEADS=key_heads,
        RING_HEADS=ring.k.shape[2],
        DIM_K=dim_k,
        DIM_V=dim_v,
        WIDTH_K=max(16, triton.next_power_of_2(dim_k)),
        BLOCK_DV=tiles.block_dv,
        PIECE=min(tiles.piece, max(16, triton.next_power_of_2(dim_k))),
        STAGES=tiles.stages,
        REPLAY=ring.k.shape[1] > 1,  # a ring of 2K + 1 places: one kernel for all rounds of an engine
        NORMALIZE=l2_normalize,
        PRECISION=precision_of(k.dtype),
        num_warps=tiles.warps,
        num_stages=1,
        **dependent_launch(v.device),
    )
