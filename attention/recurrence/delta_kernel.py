"""The gated delta rule on a GPU: which kernel serves which rows, and the kernel of short rows. Imported on CUDA only.

    a gate of a head            2 to 16 tokens, the replayed ones counted: one chunk    (here)
    one token and no replay,    up to 16 new tokens: token by token                     (tokens_kernel)
    more replayed, or a gate    more: in chunks of 64                                   (chunks_kernel)
    of every key dimension

The device decides for each row, by its lengths; the host launches the kernels that the longest row may need, the same
for every replay of a CUDA graph.

One chunk: terms that depend only on tokens are solved for all of them first, by matmuls of 16 x 16, and the state takes
part in three matmuls, for any number of tokens (32 rows of Qwen3.5-9B on an H200: 52 to 54 µs; token by token 13 µs for
each). With Γ the sums of the gates, K, Q, V the row's keys, queries and values as columns, and S the stored state:

    u (I + A) = β (V - exp(Γ) S K)       A[i, j] = β_j exp(Γ_j - Γ_i) (k_i · k_j), i < j
    o = scale (exp(Γ) S Q + u P)         P[i, j] = exp(Γ_j - Γ_i) (k_i · q_j), i <= j
    S = exp(Γ_c) S + u exp(Γ_c - Γ) Kᵀ   of the first c tokens only, those that are committed

Two launches: the first solves once a head what every warp of the state would else solve again. A program of it solves
the systems of a row's value heads of one key head, one after the other: they share the products of their keys and
queries. It also keeps the drafts' keys, gates and β in the ring. The second is a dependent launch: it loads states,
which the first does not write, multiplies them by keys and queries, and only then waits. Rows whose states stay as they
are (num_new = 0, see `attention.recurrence.index.FoldRule`) skip the last step.

Precision: all that goes into the state is as accurate as float32. In the first launch the products of keys and queries
in half precision are float32 numbers; everything else is split into upper and lower bits, three products of TF32. Sums
of gates between two tokens are added up for each pair: a difference of two long sums would have their error. Keys and
queries in half precision are TF32 numbers before they are divided by their lengths. So the state times the keys is two
products of TF32 (the state's upper and lower bits); the state times the queries is one, as the output is rounded to
half precision. Inputs in float32: three each. Columns are read in pieces, twice: to read the state, and to change it,
from the L2 cache.

Letters in the kernels: C tokens of a row (16), K key dimension (a power of two), B rows of the state of a program, L
columns of a piece.

Source: Yang et al., "Gated Delta Networks", arXiv 2412.06464, section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from attention.kernels.launch import wait_for_predecessor
from attention.kernels.tiles import block_of, load_float, load_where, sum_where
from attention.recurrence.chunks_kernel import launch_chunks
from attention.recurrence.index import MOST_INPUTS
from attention.recurrence.kernel_rows import (
    TOKENS_OF_SHORT_ROWS,
    Inputs,
    check_launch,
    facts_of_row,
    inner_rows,
    precision_of,
    square,
    zero_padding,
)
from attention.recurrence.state_rows import StateRows
from attention.recurrence.states import DeltaRing
from attention.recurrence.tokens_kernel import launch_tokens

FACTS = constexpr(2 * 256 + 4 * 16)
"""Numbers of a head of a row between the launches: β times (I + A)⁻¹ and P, each 16 x 16; then of each token what to
multiply S k, S q and u by; then, 16 times, the decay of the stored state up to the last committed token."""
_FEW_UNITS, _GROUPED_UNITS = 128, 2048
"""Value heads of all rows: up to the first, two warps a program, so that each is done sooner; from the second on a
program takes all value heads of a key head. µs of both launches on an H200 at 1, 8, 32 and 128 rows of 32 value heads
and K = 3: 8.3, 18.8, 57.6 and 212.0 with two warps; 8.5, 18.1, 54.1 and 205.7 with one; 10.0, 19.2, 56.6 and 205.3 with
one for two heads."""


@triton.jit
def upper_bits(x):  # type: ignore[no-untyped-def]
    """x float32 -> the nearest TF32 numbers, as float32."""
    bits = (x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def times_exactly(x, y, total, EXACT_Y: constexpr):  # type: ignore[no-untyped-def]
    """total + x @ y as accurate as float32, as two or three products of TF32; EXACT_Y: y has TF32 numbers only.

    Not by "tf32x3", which looks for infinities in every operand, five instructions a number.
    """
    upper = upper_bits(x)
    if EXACT_Y:
        return tl.dot(upper, y, tl.dot(x - upper, y, total, input_precision="tf32"), input_precision="tf32")
    else:  # noqa: RET505 - one of the two is compiled
        most = upper_bits(y)
        total = tl.dot(upper, y - most, tl.dot(x - upper, most, total, input_precision="tf32"), input_precision="tf32")
        return tl.dot(upper, most, total, input_precision="tf32")


@triton.jit
def _product(x, y):  # type: ignore[no-untyped-def]
    """x @ y of [16, 16] float32."""
    return times_exactly(x, y, tl.zeros((16, 16), tl.float32), False)


@triton.jit
def unit_upper_inverse(A, count):  # type: ignore[no-untyped-def]
    """(I + A)⁻¹ of a strictly upper triangular A [16, 16] float32, in which rows and columns from `count` on are zeros.

    The blocks of 4 on the diagonal first, N⁴ = 0; then, with D their inverses and M = D times the rest, (I + M)⁻¹ D, in
    which M⁴ = 0, and M² = 0 of two blocks. Powers of A itself would grow to thousands where keys repeat, and their
    difference is 1.
    """
    i, j = square(16)  # [16, 1], [1, 16]
    one = (i == j).to(tl.float32)  # [16, 16]
    in_block = i // 4 == j // 4
    N = tl.where(in_block, A, 0.0)
    D = _product(one - N, one + _product(N, N))
    if count > 4:
        M = _product(D, tl.where(in_block, 0.0, A))
        right = D
        if count > 8:
            right = _product(one + _product(M, M), D)
        D = _product(one - M, right)
    return D


@triton.jit
def own_or_kept(own_at, ring_at, is_ring, mask, REPLAY: constexpr):  # type: ignore[no-untyped-def]
    """What a row's tokens have there, and replayed ones in the ring, of one dtype: one load; zeros elsewhere."""
    if REPLAY:
        own_at = tl.where(is_ring, ring_at, own_at)
    return load_where(own_at, mask)


@triton.jit
def _inverse_length(squares, NORMALIZE: constexpr):  # type: ignore[no-untyped-def]
    """Sums of squares [C] -> 1 / length, or 1; same epsilon as transformers' `l2norm`."""
    if NORMALIZE:
        return tl.rsqrt(squares + 1e-6)
    else:  # noqa: RET505 - one of the two is compiled
        return tl.full(squares.shape, 1.0, tl.float32)


@triton.jit
def _solve_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, Hk, Dk]
    k_ptr,  # [T, Hk, Dk]
    g_ptr,  # [T, H] float32
    beta_ptr,  # [T, H]
    facts_ptr,  # [rows, H, FACTS] float32
    ring_k_ptr,  # [slots, R, Hk, Dk]
    ring_g_ptr,  # [slots, R, H] float32
    ring_beta_ptr,  # [slots, R, H] float32
    query_start_loc_ptr, slots_ptr, start_ptr, replay_ptr, num_new_ptr,
    scale, q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, beta_token, beta_head,
    RING_SIZE: constexpr, HEADS: constexpr, KEY_HEADS: constexpr, DIM_K: constexpr, DIM_V: constexpr,
    WIDTH_K: constexpr,
    GROUP: constexpr,  # value heads of a program, of one key head
    AS_GIVEN: constexpr,  # keys and queries are multiplied in their own dtype
    REPLAY: constexpr, NORMALIZE: constexpr, PRECISION: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    CHUNK: constexpr = 16
    wait_for_predecessor(DEPENDENT)
    first_head, row = tl.program_id(0) * GROUP, tl.program_id(1)
    first, tokens, slot, start, replay, num_new = facts_of_row(
        query_start_loc_ptr, slots_ptr, start_ptr, replay_ptr, num_new_ptr, row
    )
    count, committed = replay + tokens, replay + num_new
    if (tokens == 0) | (count > CHUNK):
        return
    i, j = square(CHUNK)  # [C, 1], [1, C]
    column = tl.arange(0, WIDTH_K)[None, :]  # [1, K]
    in_k = column < DIM_K
    key_head, ring = first_head // (HEADS // KEY_HEADS), slot * RING_SIZE
    own_i, own_j = (i >= replay) & (i < count), (j >= replay) & (j < count)
    place_i, place_j = (start - replay + i) % RING_SIZE, (start - replay + j) % RING_SIZE
    k_at = k_ptr + (first * k_token + key_head * k_head) + ((i - replay) * k_token + column)  # [C, K]
    q_at = q_ptr + (first * q_token + key_head * q_head) + ((i - replay) * q_token + column)  # [C, K]
    ring_k_at = ring_k_ptr + ring * (KEY_HEADS * DIM_K) + ((place_i * KEY_HEADS + key_head) * DIM_K + column)  # [C, K]
    raw_k = own_or_kept(k_at, ring_k_at, i < replay, (i < count) & in_k, REPLAY)  # [C, K]
    raw_q = load_where(q_at, own_i & in_k)  # [C, K]
    k, q = raw_k.to(tl.float32), raw_q.to(tl.float32)
    of_k = _inverse_length(tl.sum(k * k, 1), NORMALIZE)  # [C]
    of_q = _inverse_length(tl.sum(q * q, 1), NORMALIZE) * scale  # [C]
    if AS_GIVEN:  # their products are float32 numbers
        scores = tl.dot(raw_k, tl.trans(raw_k))  # [C, C]
        queries = tl.dot(raw_k, tl.trans(raw_q))
    else:
        scores = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        queries = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    draft_i, draft_j = (i >= committed) & (i < count), (j >= committed) & (j < count)
    owned = tl.where(first_head % (HEADS // KEY_HEADS) == 0, DIM_K, 0)  # by one program of a key head
    tl.store(ring_k_at, raw_k, mask=draft_i & (column < owned))
    for head in range(first_head, first_head + GROUP):
        g_at = g_ptr + (first * g_token + head * g_head) + (i - replay) * g_token  # [C, 1]
        ring_g_at = ring_g_ptr + ring * HEADS + (place_i * HEADS + head)  # [C, 1]
        g = own_or_kept(g_at, ring_g_at, i < replay, i < count, REPLAY)  # [C, 1]
        beta_at = beta_ptr + (first * beta_token + head * beta_head) + (j - replay) * beta_token  # [1, C]
        ring_beta_at = ring_beta_ptr + ring * HEADS + (place_j * HEADS + head)  # [1, C]
        beta = load_float(beta_at, own_j)  # [1, C]
        if REPLAY:
            beta += load_where(ring_beta_at, j < replay)

        through = tl.where(i <= j, g, 0.0)  # [C, C]
        upper, after = upper_bits(through), (j > i).to(tl.float32)  # [C, C]
        between = tl.dot(after, through - upper, input_precision="tf32")
        between = tl.dot(after, upper, between, input_precision="tf32")  # [C, C] of tokens i to j
        decay = tl.exp(tl.minimum(between, 0.0)) * of_k[:, None]  # [C, C]
        A = tl.where(i < j, scores * decay * (of_k[None, :] * beta), 0.0)
        solved = unit_upper_inverse(A, count)  # [C, C]
        P = tl.where(i <= j, queries * decay * of_q[None, :], 0.0)
        since = tl.exp(tl.sum(through, 0))[None, :]  # [1, C] of the stored state, at each token
        left = sum_where(g, (i > j) & (i < committed))[None, :]  # [1, C] to the last committed token
        kept = sum_where(tl.broadcast_to(g, (CHUNK, CHUNK)), i < committed)[None, :]  # [1, C] equal
        beta_i = tl.sum(tl.where(i == j, beta, 0.0), 1)[:, None]  # [C, 1]

        facts = facts_ptr + (row * HEADS + head).to(tl.int64) * FACTS
        tl.store(facts + (i * CHUNK + j), beta_i * solved)
        tl.store(facts + (256 + i * CHUNK + j), P)
        tl.store(facts + (512 + j), since * of_k[None, :])
        tl.store(facts + (528 + j), since * of_q[None, :])
        tl.store(facts + (544 + j), tl.where(j < committed, tl.exp(left) * of_k[None, :], 0.0))
        tl.store(facts + (560 + j), tl.exp(kept))
        tl.store(ring_g_at, g, mask=draft_i)
        tl.store(ring_beta_at, beta, mask=draft_j)


def launch_solve(call: Inputs) -> Tensor:
    """-> [rows · H, FACTS] float32, for rows with up to 16 replayed and own tokens; of others it is undefined."""
    q, k, _, g, beta = call.tensors
    ring_k, _, ring_g, ring_beta = call.ring
    heads, count = beta.shape[1], len(call.rows.slots)
    facts = torch.empty(count * heads, FACTS.value, dtype=torch.float32, device=k.device)
    group = heads // k.shape[1] if count * heads >= _GROUPED_UNITS else 1
    # as they are where they are halves; Triton's interpreter multiplies bfloat16 as if it were integers
    as_given = q.dtype == k.dtype and (k.dtype == torch.float16 or (k.dtype == torch.bfloat16 and k.is_cuda))
    replay = ring_k.shape[1] > 1  # of an engine with drafts: one kernel for all its rounds
    _solve_kernel[(heads // group, count)](
        q, k, g, beta, facts, ring_k, ring_g, ring_beta, *call.rows.arrays, call.scale, *call.strides, GROUP=group,
        AS_GIVEN=as_given, REPLAY=replay, NORMALIZE=call.normalize, PRECISION=precision_of(k.dtype),
        num_warps=2 if count * heads <= _FEW_UNITS else 1, **call.constants,
    )  # fmt: skip
    return facts


@dataclass(frozen=True)
class ShortTiling:
    """Rows of the state a program works on, columns of a piece, pieces in flight (to read, to change it), warps."""

    block_dv: int
    piece: int
    stages: tuple[int, int]
    warps: int


def short_tiling(dim_v: int) -> ShortTiling:
    """The tiling for this many rows of a head's state: 32 x 32 with 3 pieces in flight, the best of eight tilings.

    On an H200 at 1, 8, 32 and 128 rows (K = 3, Qwen3.5-9B's heads, a third of the rows storing their states) both
    launches took 7.6, 15.4, 39.6 and 138.7 µs; with 2 pieces 7.9, 16.4, 43.3, 155.0; with 4 warps 7.9, 19.9, 55.4,
    206.1. Registers (96 a thread) allow 10 programs a multiprocessor, which decides.
    """
    return ShortTiling(min(32, max(16, triton.next_power_of_2(dim_v))), 32, (3, 3), 2)


@triton.jit(do_not_specialize=["total_tokens"])
def _short_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, Hk, Dk]
    k_ptr,  # [T, Hk, Dk]
    v_ptr,  # [T, H, Dv]
    facts_ptr,  # [rows, H, FACTS] float32
    out_ptr,  # [T, H, Dv] contiguous
    state_ptr,  # [slots, H, Dv, Dk] float32 or half precision
    ring_k_ptr,  # [slots, R, Hk, Dk]
    ring_v_ptr,  # [slots, R, H, Dv]
    query_start_loc_ptr, slots_ptr, start_ptr, replay_ptr, num_new_ptr,
    total_tokens,  # T
    q_token, q_head, k_token, k_head, v_token, v_head,
    RING_SIZE: constexpr, HEADS: constexpr, KEY_HEADS: constexpr, DIM_K: constexpr, DIM_V: constexpr,
    WIDTH_K: constexpr, BLOCK_DV: constexpr, PIECE: constexpr,
    READ_STAGES: constexpr, CHANGE_STAGES: constexpr,
    REPLAY: constexpr,  # whether a row may replay
    PRECISION: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    CHUNK: constexpr = 16
    PIECES: constexpr = WIDTH_K // PIECE
    EXACT: constexpr = PRECISION == "tf32"  # keys and queries are TF32 numbers
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dv = block_of(block, BLOCK_DV)[:, None]  # [B, 1]
    if row == tl.num_programs(2) - 1:
        wait_for_predecessor(DEPENDENT)
        zero_padding(out_ptr + head * DIM_V + dv, query_start_loc_ptr + row, total_tokens, HEADS * DIM_V, dv < DIM_V)
        return
    first, tokens, slot, start, replay, num_new = facts_of_row(
        query_start_loc_ptr, slots_ptr, start_ptr, replay_ptr, num_new_ptr, row
    )
    count, committed = replay + tokens, replay + num_new
    if (tokens == 0) | (count > CHUNK):
        wait_for_predecessor(DEPENDENT)
        return
    i, j = square(CHUNK)  # [C, 1], [1, C]
    lane = tl.arange(0, PIECE)[None, :]  # [1, L]
    in_v, known = dv < DIM_V, tl.where(start > replay, DIM_K, 0)
    state_at = state_ptr + slot * (HEADS * DIM_V * DIM_K) + ((head * DIM_V + dv) * DIM_K + lane)  # [B, L]
    key_head, ring = head // (HEADS // KEY_HEADS), slot * RING_SIZE
    of_ring, own_i, own_j = i < replay, (i >= replay) & (i < count), (j >= replay) & (j < count)
    place_i, place_j = (start - replay + i) % RING_SIZE, (start - replay + j) % RING_SIZE
    q_at = q_ptr + (first * q_token + key_head * q_head) + ((i - replay) * q_token + lane)  # [C, L]
    k_at = k_ptr + (first * k_token + key_head * k_head) + ((i - replay) * k_token + lane)  # [C, L]
    ring_k_at = ring_k_ptr + ring * (KEY_HEADS * DIM_K) + ((place_i * KEY_HEADS + key_head) * DIM_K + lane)  # [C, L]
    v_at = v_ptr + (first * v_token + head * v_head) + ((j - replay) * v_token + dv)  # [B, C]
    ring_v_at = ring_v_ptr + ring * (HEADS * DIM_V) + ((place_j * HEADS + head) * DIM_V + dv)  # [B, C]
    raw_v = own_or_kept(v_at, ring_v_at, j < replay, (j < count) & in_v, REPLAY)  # [B, C]
    read, o = tl.zeros((BLOCK_DV, CHUNK), tl.float32), tl.zeros((BLOCK_DV, CHUNK), tl.float32)
    for piece in tl.range(0, PIECES, num_stages=READ_STAGES):
        begin = piece * PIECE
        in_k = begin + lane < DIM_K
        S = load_float(state_at + begin, in_v & (begin + lane < known))  # [B, L]
        k = own_or_kept(k_at + begin, ring_k_at + begin, of_ring, (i < count) & in_k, REPLAY)  # [C, L]
        read = times_exactly(S, tl.trans(k.to(tl.float32)), read, EXACT)
        queries = tl.trans(load_float(q_at + begin, own_i & in_k))  # [L, C]
        if EXACT:
            o = tl.dot(upper_bits(S), queries, o, input_precision="tf32")
        else:
            o = times_exactly(S, queries, o, False)
    wait_for_predecessor(DEPENDENT)
    facts = facts_ptr + (row * HEADS + head).to(tl.int64) * FACTS
    solved = tl.load(facts + (i * CHUNK + j))  # [C, C]
    P = tl.load(facts + (256 + i * CHUNK + j))  # [C, C]
    of_read, of_o = tl.load(facts + (512 + j)), tl.load(facts + (528 + j))  # [1, C]
    of_u, kept = tl.load(facts + (544 + j)), tl.load(facts + 560)  # [1, C], scalar
    u = times_exactly(
        raw_v.to(tl.float32) - read * of_read, solved, tl.zeros((BLOCK_DV, CHUNK), tl.float32), False
    )  # [B, C]
    if EXACT:
        o = tl.dot(u, P, o * of_o, input_precision="tf32")
    else:
        o = times_exactly(u, P, o * of_o, False)
    u *= of_u
    if (num_new > 0) & (num_new <= tokens):
        for piece in tl.range(0, PIECES, num_stages=CHANGE_STAGES):
            begin = piece * PIECE
            in_k = begin + lane < DIM_K
            before = load_float(state_at + begin, in_v & (begin + lane < known))  # [B, L]
            k = own_or_kept(k_at + begin, ring_k_at + begin, of_ring, (i < count) & in_k, REPLAY)  # [C, L]
            # by fma: as a matmul's accumulator the state would lose its last bits, because tensor cores truncate
            update = times_exactly(u, k.to(tl.float32), tl.zeros((BLOCK_DV, PIECE), tl.float32), EXACT)
            after = tl.fma(before, tl.broadcast_to(kept, before.shape), update)
            tl.store(state_at + begin, after, mask=in_v & in_k)
    out_at = out_ptr + (first * HEADS + head) * DIM_V + ((j - replay) * (HEADS * DIM_V) + dv)  # [B, C]
    tl.store(out_at, o, mask=own_j & in_v)
    tl.store(ring_v_at, raw_v, mask=(j >= committed) & (j < count) & in_v)


def launch_delta_short(call: Inputs) -> None:
    """Rows with up to MOST_INPUTS replayed and own tokens, and zeros for tokens of no row; other rows are left as they
    are. Gates of a head only."""
    _, heads, dim_v = call.v.shape
    tiles = short_tiling(dim_v)
    constants, rows = call.constants, call.rows
    facts = launch_solve(call)
    _short_kernel[(triton.cdiv(dim_v, tiles.block_dv), heads, len(rows.slots) + 1)](
        call.q, call.k, call.v, facts, call.out, call.state, *call.ring[:2], *rows.arrays, len(call.v),
        *call.strides[:6], BLOCK_DV=tiles.block_dv, PIECE=min(tiles.piece, constants["WIDTH_K"]),
        READ_STAGES=tiles.stages[0], CHANGE_STAGES=tiles.stages[1], REPLAY=constants["RING_SIZE"] > 1,
        PRECISION=precision_of(call.k.dtype), num_warps=tiles.warps, num_stages=1, **constants,
    )  # fmt: skip


ONE_CHUNK = True
"""False: short rows token by token, all of them, to compare the two."""


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float,
    l2_normalize: bool, state: Tensor, ring: DeltaRing, rows: StateRows, in_order: bool = False,
) -> Tensor:  # fmt: skip
    """The outputs of the gated delta rule, [T, H, Dv] in v's dtype; `state` and `ring` are written.

    Per token: S *= exp(g); u = beta (v - S k); S += u kᵀ; o = S (q scale); q and k divided by their lengths before,
    where `l2_normalize`.

    Args:
        q, k: [T, Hk, Dk], each head of them for H / Hk value heads in turn; v: [T, H, Dv].
        g: float32, [T, H] or [T, H, Dk] (a gate of every key dimension), at most 0. beta: [T, H].
        state: [slots, H, Dv, Dk], of any float dtype; ring: has the same slots.
        rows: no row reaches beyond T. Outputs of tokens of no row, after the last one, are zeros.
        in_order: read all rows token by token.
    """
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    check_launch(rows, state, ring, k=k, v=v, g=g)
    q, k, v, g = (inner_rows(x) for x in (q, k, v, g))
    kept = (ring.k, ring.v, ring.g, ring.beta)
    call = Inputs(q, k, v, g, beta, scale, l2_normalize, state, kept, rows, out)
    if in_order:
        launch_tokens(call, None)
        return out
    most = rows.max_replay + min(rows.max_query_len, TOKENS_OF_SHORT_ROWS)
    one_chunk = ONE_CHUNK and g.dim() == 2 and most > 1
    if one_chunk:
        launch_delta_short(call)
    if not one_chunk or most > MOST_INPUTS:
        least = MOST_INPUTS + 1 if one_chunk else 0
        launch_tokens(call, TOKENS_OF_SHORT_ROWS, least_inputs=least)
    if rows.max_query_len > TOKENS_OF_SHORT_ROWS:
        launch_chunks(call, TOKENS_OF_SHORT_ROWS + 1)
    return out
