"""The gated delta rule on a GPU: which kernel serves which rows, and the kernel of short rows. Imported on CUDA only.

    a gate of a head            2 to 16 tokens, the replayed ones counted: one chunk    (here, with delta_solve_kernel)
    one token and no replay,    up to 16 new tokens: token by token                     (delta_tokens_kernel)
    more replayed, or a gate    more: in chunks of 64                                   (delta_chunks_kernel)
    of every key dimension

The device decides for each row, by its lengths; the host launches the kernels that the longest row may need, the same
for every replay of a CUDA graph.

One chunk: terms that depend only on tokens are solved for all of them first, by matmuls of 16 x 16, and the state takes
part in three matmuls, for any number of tokens (32 rows of Qwen3.5-9B on an H200: 52 to 54 µs; token by token 13 µs for
each). With Γ the sums of the gates, K, Q, V the row's keys, queries and values as columns, and S the stored state:

    u (I + A) = β (V - exp(Γ) S K)       A[i, j] = β_j exp(Γ_j - Γ_i) (k_i · k_j), i < j
    o = scale (exp(Γ) S Q + u P)         P[i, j] = exp(Γ_j - Γ_i) (k_i · q_j), i <= j
    S = exp(Γ_c) S + u exp(Γ_c - Γ) Kᵀ   of the first c tokens only, those that are committed

Two launches: `delta_solve_kernel` solves once a head what every warp of the state would else solve again. The second is
a dependent launch: it loads states, which the first does not write, multiplies them by keys and queries, and only then
waits. Rows whose states stay as they are (num_new = 0, see `attention.recurrence.index.FoldRule`) skip the last step.

Precision: all that goes into the state is as accurate as float32. Keys and queries in half precision are TF32 numbers
before they are divided by their lengths. So the state times the keys is two products of TF32 (the state's upper and
lower bits); the state times the queries is one, as the output is rounded to half precision. Inputs in float32: three
each. Columns are read in pieces, twice: to read the state, and to change it, from the L2 cache.

Letters in the kernel: C tokens of a row (16), B rows of the state of a program, L columns of a piece.

Source: Yang et al., "Gated Delta Networks", arXiv 2412.06464, section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention.kernels.launch import dependent_launch, wait_for_predecessor
from attention.recurrence.delta_chunks_kernel import launch_delta_chunks
from attention.recurrence.delta_solve_kernel import FACTS, launch_solve, own_or_kept, times_exactly, upper_bits
from attention.recurrence.delta_tokens_kernel import launch_delta
from attention.recurrence.index import MOST_INPUTS
from attention.recurrence.kernel_rows import (
    TOKENS_OF_SHORT_ROWS,
    check_launch,
    inner_rows,
    precision_of,
    row_state,
    row_tokens,
    zeros_from,
)
from attention.recurrence.state_cache import DeltaRing
from attention.recurrence.state_rows import StateRows


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
    q_ptr,  # [T, Hq, Dk]
    k_ptr,  # [T, Hq, Dk]
    v_ptr,  # [T, H, Dv]
    facts_ptr,  # [rows, H, FACTS] float32
    out_ptr,  # [T, H, Dv] contiguous
    state_ptr,  # [slots, H, Dv, Dk] float32
    ring_k_ptr,  # [slots, R, Hk, Dk]
    ring_v_ptr,  # [slots, R, H, Dv]
    query_start_loc_ptr, slots_ptr, start_ptr, replay_ptr, num_new_ptr,
    total_tokens,  # T
    q_token, q_head, k_token, k_head, v_token, v_head, state_slot, ring_k_slot, ring_v_slot,
    RING_SIZE: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, RING_HEADS: tl.constexpr,
    DIM_K: tl.constexpr, DIM_V: tl.constexpr, WIDTH_K: tl.constexpr, BLOCK_DV: tl.constexpr, PIECE: tl.constexpr,
    READ_STAGES: tl.constexpr, CHANGE_STAGES: tl.constexpr,
    REPLAY: tl.constexpr,  # whether a row may replay
    PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    CHUNK: tl.constexpr = 16
    PIECES: tl.constexpr = WIDTH_K // PIECE
    EXACT: tl.constexpr = PRECISION == "tf32"  # keys and queries are TF32 numbers
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dv = block * BLOCK_DV + tl.arange(0, BLOCK_DV)[:, None]  # [B, 1]
    if row == tl.num_programs(2) - 1:
        wait_for_predecessor(DEPENDENT)
        end = tl.load(query_start_loc_ptr + row)
        padding_at = out_ptr + (end.to(tl.int64) * HEADS + head) * DIM_V + dv
        zeros_from(padding_at, total_tokens - end, HEADS * DIM_V, dv < DIM_V, out_ptr.dtype.element_ty)
        return
    first, tokens = row_tokens(query_start_loc_ptr, row)
    slot, start, replay, num_new = row_state(slots_ptr, start_ptr, replay_ptr, num_new_ptr, row)
    count, committed = replay + tokens, replay + num_new
    if (tokens == 0) | (count > CHUNK):
        wait_for_predecessor(DEPENDENT)
        return
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]  # [C, 1], [1, C]
    lane = tl.arange(0, PIECE)[None, :]  # [1, L]
    in_v, known = dv < DIM_V, tl.where(start > replay, DIM_K, 0)
    state_at = state_ptr + slot * state_slot + ((head * DIM_V + dv) * DIM_K + lane)  # [B, L]
    key_head, ring_head = head // (HEADS // KEY_HEADS), head // (HEADS // RING_HEADS)
    of_ring, own_i, own_j = i < replay, (i >= replay) & (i < count), (j >= replay) & (j < count)
    place_i, place_j = (start - replay + i) % RING_SIZE, (start - replay + j) % RING_SIZE
    q_at = q_ptr + (first * q_token + key_head * q_head) + ((i - replay) * q_token + lane)  # [C, L]
    k_at = k_ptr + (first * k_token + key_head * k_head) + ((i - replay) * k_token + lane)  # [C, L]
    ring_k_at = ring_k_ptr + slot * ring_k_slot + ((place_i * RING_HEADS + ring_head) * DIM_K + lane)  # [C, L]
    v_at = v_ptr + (first * v_token + head * v_head) + ((j - replay) * v_token + dv)  # [B, C]
    ring_v_at = ring_v_ptr + slot * ring_v_slot + ((place_j * HEADS + head) * DIM_V + dv)  # [B, C]
    raw_v = own_or_kept(v_at, ring_v_at, j < replay, (j < count) & in_v, REPLAY)  # [B, C]
    read, o = tl.zeros((BLOCK_DV, CHUNK), tl.float32), tl.zeros((BLOCK_DV, CHUNK), tl.float32)
    for piece in tl.range(0, PIECES, num_stages=READ_STAGES):
        begin = piece * PIECE
        in_k = begin + lane < DIM_K
        S = tl.load(state_at + begin, mask=in_v & (begin + lane < known), other=0.0)  # [B, L]
        k = own_or_kept(k_at + begin, ring_k_at + begin, of_ring, (i < count) & in_k, REPLAY)  # [C, L]
        read = times_exactly(S, tl.trans(k.to(tl.float32)), read, EXACT)
        queries = tl.trans(tl.load(q_at + begin, mask=own_i & in_k, other=0.0).to(tl.float32))  # [L, C]
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
            before = tl.load(state_at + begin, mask=in_v & (begin + lane < known), other=0.0)  # [B, L]
            k = own_or_kept(k_at + begin, ring_k_at + begin, of_ring, (i < count) & in_k, REPLAY)  # [C, L]
            # by fma: as a matmul's accumulator the state would lose its last bits, because tensor cores truncate
            update = times_exactly(u, k.to(tl.float32), tl.zeros((BLOCK_DV, PIECE), tl.float32), EXACT)
            after = tl.fma(before, tl.broadcast_to(kept, before.shape), update)
            tl.store(state_at + begin, after, mask=in_v & in_k)
    out_at = out_ptr + (first * HEADS + head) * DIM_V + ((j - replay) * (HEADS * DIM_V) + dv)  # [B, C]
    tl.store(out_at, o.to(out_ptr.dtype.element_ty), mask=own_j & in_v)
    tl.store(ring_v_at, raw_v, mask=(j >= committed) & (j < count) & in_v)


def launch_delta_short(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, scale: float,
    l2_normalize: bool, state: torch.Tensor, ring: DeltaRing, rows: StateRows, out: torch.Tensor,
    tiling: ShortTiling | None = None,
) -> None:  # fmt: skip
    """Rows with up to MOST_INPUTS replayed and own tokens, into out [T, H, Dv], and zeros for tokens of no row;
    other rows are left as they are. g: [T, H]. See `gated_delta`."""
    _, heads, dim_v = v.shape
    key_heads, dim_k = k.shape[1:]
    tiles = short_tiling(dim_v) if tiling is None else tiling
    check_launch(rows, state, ring, k=k, v=v, g=g)
    q, k, v = (inner_rows(x) for x in (q, k, v))
    width_k = max(16, triton.next_power_of_2(dim_k))
    facts = launch_solve(q, k, g, beta, scale, l2_normalize, ring, rows)
    _short_kernel[(triton.cdiv(dim_v, tiles.block_dv), heads, len(rows.slots) + 1)](
        q, k, v, facts, out, state, ring.k, ring.v, rows.query_start_loc, rows.slots, rows.start, rows.replay,
        rows.num_new, len(v), *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], state.stride(0), ring.k.stride(0),
        ring.v.stride(0), RING_SIZE=ring.k.shape[1], HEADS=heads, KEY_HEADS=key_heads, RING_HEADS=ring.k.shape[2],
        DIM_K=dim_k, DIM_V=dim_v, WIDTH_K=width_k, BLOCK_DV=tiles.block_dv, PIECE=min(tiles.piece, width_k),
        READ_STAGES=tiles.stages[0], CHANGE_STAGES=tiles.stages[1], REPLAY=ring.k.shape[1] > 1,
        PRECISION=precision_of(k.dtype), num_warps=tiles.warps, num_stages=1, **dependent_launch(v.device),
    )  # fmt: skip


ONE_CHUNK = True
"""False: short rows token by token, all of them, to compare the two."""


def gated_delta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, scale: float,
    l2_normalize: bool, state: torch.Tensor, ring: DeltaRing, rows: StateRows,
) -> torch.Tensor:  # fmt: skip
    """The outputs of the gated delta rule, [T, H, Dv] in v's dtype; `state` and `ring` are written.

    Per token: S *= exp(g); u = beta (v - S k); S += u kᵀ; o = S (q scale); q and k divided by their lengths before,
    where `l2_normalize`.

    Args:
        q, k: [T, Hk, Dk], each head of them for H / Hk value heads in turn; v: [T, H, Dv].
        g: float32, [T, H] or [T, H, Dk] (a gate of every key dimension), at most 0. beta: [T, H].
        state: float32 [slots, H, Dv, Dk]; ring: has the same slots.
        rows: no row reaches beyond T. Outputs of tokens of no row, after the last one, are zeros.
    """
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    inputs = (q, k, v, g, beta, scale, l2_normalize, state, ring, rows, out)
    most = rows.max_replay + min(rows.max_query_len, TOKENS_OF_SHORT_ROWS)
    one_chunk = ONE_CHUNK and g.dim() == 2 and most > 1
    if one_chunk:
        launch_delta_short(*inputs)
    if not one_chunk or most > MOST_INPUTS:
        least = MOST_INPUTS + 1 if one_chunk else 0
        launch_delta(*inputs, most_tokens=TOKENS_OF_SHORT_ROWS, least_inputs=least)
    if rows.max_query_len > TOKENS_OF_SHORT_ROWS:
        launch_delta_chunks(*inputs, least_tokens=TOKENS_OF_SHORT_ROWS + 1)
    return out
