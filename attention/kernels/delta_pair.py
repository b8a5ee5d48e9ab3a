"""The gated delta rule of short rows as one chunk, in two launches: what depends on tokens alone, then the states.

The rule, the symbols and the precision are those of `attention/kernels/delta_short.py`, which does both in one launch:
there every warp that works on rows of a state solves the small triangular system of its head again, and that is most
of its instructions (some 3,000 of 3,400), more than the bytes of the state leave time for. Here one warp solves it for
a head of a row, once, and writes 16 x 16 numbers twice and a few vectors (`_FACTS`). The second launch is there before
the first one ends, reads the states, which the first does not write, multiplies them by the keys and queries, and only
then waits for the solutions: a state is read once, held in registers, and written once.

Letters in the kernels: C tokens of a row (16), B rows of the state of a program, L columns of a piece.

Imported on CUDA only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention.cache.state import DeltaRing
from attention.kernels.chunks import precision_of
from attention.kernels.delta_short import _inverse_length, _joined, _zeros_after_rows, upper_bits
from attention.kernels.pdl import dependent_launch, wait_for_predecessor
from attention.kernels.recurrent import check_launch, inner_rows, row_state, row_tokens
from attention.recurrence.rows import StateRows

_FACTS = tl.constexpr(2 * 256 + 4 * 16)
"""Numbers of a head of a row between the launches: (I + A)⁻¹ after β, P, and for each token what to multiply S k, S q
and u by, and the decay of the stored state up to the last committed token, 16 times."""


@dataclass(frozen=True)
class PairTiling:
    """Rows of the state a program holds, columns of a piece, warps, and registers a thread.

    stages: 0: all pieces are loaded at once into registers; else a loop over them with so many steps on their way.
    again: the state is read a second time to change it, from the L2 cache, rather than held; a loop always does.
    """

    block_dv: int
    piece: int
    warps: int
    registers: int | None = None
    stages: int = 0
    again: bool = False
    early: bool = True
    prepare_warps: int = 1
    group: bool = False
    prepare_registers: int | None = None


@triton.jit
def _either(own_at, ring_at, is_ring, mask, REPLAY: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a row's tokens have there, and replayed ones in the ring, of one dtype: one load; zeros elsewhere."""
    if REPLAY:
        own_at = tl.where(is_ring, ring_at, own_at)
    return tl.load(own_at, mask=mask, other=0.0)


@triton.jit
def _times(x, y, total, EXACT_Y: tl.constexpr):  # type: ignore[no-untyped-def]
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
    return _times(x, y, tl.zeros((16, 16), tl.float32), False)


@triton.jit
def _upper_inverse(A, count):  # type: ignore[no-untyped-def]
    """As `attention.kernels.delta_short.unit_upper_inverse`, of an A with `count` rows and columns that are not 0."""
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]  # [16, 1], [1, 16]
    one = (i == j).to(tl.float32)  # [16, 16]
    in_block = i // 4 == j // 4
    N = tl.where(in_block, A, 0.0)
    D = _product(one - N, one + _product(N, N))
    if count > 4:
        M = _product(D, tl.where(in_block, 0.0, A))
        right = D
        if count > 8:  # else M² = 0
            right = _product(one + _product(M, M), D)
        D = _product(one - M, right)
    return D


@triton.jit
def _prepare_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, Hq, Dk]
    k_ptr,  # [T, Hq, Dk]
    g_ptr,  # [T, H] float32
    beta_ptr,  # [T, H]
    facts_ptr,  # [rows, H, FACTS] float32
    ring_k_ptr,  # [slots, R, Hk, Dk]
    ring_g_ptr,  # [slots, R, H] float32
    ring_beta_ptr,  # [slots, R, H] float32
    query_start_loc_ptr,
    slots_ptr,
    start_ptr,
    replay_ptr,
    num_new_ptr,
    scale,
    q_token,
    q_head,
    k_token,
    k_head,
    g_token,
    g_head,
    beta_token,
    beta_head,
    ring_k_slot,
    ring_g_slot,
    ring_beta_slot,
    RING_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    RING_HEADS: tl.constexpr,
    DIM_K: tl.constexpr,
    WIDTH_K: tl.constexpr,
    GROUP: tl.constexpr,  # value heads of a program, of one key head
    AS_GIVEN: tl.constexpr,  # keys and queries are multiplied in their own dtype
    REPLAY: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    CHUNK: tl.constexpr = 16
    wait_for_predecessor(DEPENDENT)
    first_head, row = tl.program_id(0) * GROUP, tl.program_id(1)
    first, tokens = row_tokens(query_start_loc_ptr, row)
    slot, start, replay, num_new = row_state(slots_ptr, start_ptr, replay_ptr, num_new_ptr, row)
    count, committed = replay + tokens, replay + num_new
    if (tokens == 0) | (count > CHUNK):
        return
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]  # [C, 1], [1, C]
    column = tl.arange(0, WIDTH_K)[None, :]  # [1, K]
    in_k = column < DIM_K
    key_head, ring_head = first_head // (HEADS // KEY_HEADS), first_head // (HEADS // RING_HEADS)
    own_i, own_j = (i >= replay) & (i < count), (j >= replay) & (j < count)
    place_i, place_j = (start - replay + i) % RING_SIZE, (start - replay + j) % RING_SIZE
    k_at = k_ptr + (first * k_token + key_head * k_head) + ((i - replay) * k_token + column)  # [C, K]
    q_at = q_ptr + (first * q_token + key_head * q_head) + ((i - replay) * q_token + column)  # [C, K]
    ring_k_at = ring_k_ptr + slot * ring_k_slot + ((place_i * RING_HEADS + ring_head) * DIM_K + column)  # [C, K]
    raw_k = _either(k_at, ring_k_at, i < replay, (i < count) & in_k, REPLAY)  # [C, K]
    raw_q = tl.load(q_at, mask=own_i & in_k, other=0.0)  # [C, K]
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
    owned = tl.where(first_head % (HEADS // RING_HEADS) == 0, DIM_K, 0)  # by one program of a key head
    tl.store(ring_k_at, raw_k, mask=draft_i & (column < owned))
    for head in range(first_head, first_head + GROUP):
        g_at = g_ptr + (first * g_token + head * g_head) + (i - replay) * g_token  # [C, 1]
        ring_g_at = ring_g_ptr + slot * ring_g_slot + (place_i * HEADS + head)  # [C, 1]
        g = _either(g_at, ring_g_at, i < replay, i < count, REPLAY)  # [C, 1]
        beta_at = beta_ptr + (first * beta_token + head * beta_head) + (j - replay) * beta_token  # [1, C]
        ring_beta_at = ring_beta_ptr + slot * ring_beta_slot + (place_j * HEADS + head)  # [1, C]
        beta = _joined(beta_at, own_j, ring_beta_at, j < replay, REPLAY).to(tl.float32)  # [1, C]

        through = tl.where(i <= j, g, 0.0)  # [C, C]
        upper, after = upper_bits(through), (j > i).to(tl.float32)
        between = tl.dot(after, through - upper, input_precision="tf32")
        between = tl.dot(after, upper, between, input_precision="tf32")  # [C, C] of tokens i to j
        decay = tl.exp(tl.minimum(between, 0.0)) * of_k[:, None]  # [C, C]
        solved = _upper_inverse(tl.where(i < j, scores * decay * (of_k[None, :] * beta), 0.0), count)  # [C, C]
        P = tl.where(i <= j, queries * decay * of_q[None, :], 0.0)
        since = tl.exp(tl.sum(through, 0))[None, :]  # [1, C] of the stored state, at each token
        left = tl.exp(tl.sum(tl.where((i > j) & (i < committed), g, 0.0), 0))[
            None, :
        ]  # [1, C] at the last committed token
        kept = tl.exp(tl.sum(tl.where(i < committed, tl.broadcast_to(g, (CHUNK, CHUNK)), 0.0), 0))[
            None, :
        ]  # [1, C] equal
        beta_i = tl.sum(tl.where(i == j, beta, 0.0), 1)[:, None]  # [C, 1]

        facts = facts_ptr + (row * HEADS + head).to(tl.int64) * _FACTS
        tl.store(facts + (i * CHUNK + j), beta_i * solved)
        tl.store(facts + (256 + i * CHUNK + j), P)
        tl.store(facts + (512 + j), since * of_k[None, :])
        tl.store(facts + (528 + j), since * of_q[None, :])
        tl.store(facts + (544 + j), tl.where(j < committed, left * of_k[None, :], 0.0))
        tl.store(facts + (560 + j), kept)
        tl.store(ring_g_at, g, mask=draft_i)
        tl.store(ring_beta_at, beta, mask=draft_j)


@triton.jit(do_not_specialize=["total_tokens"])
def _apply_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, Hq, Dk]
    k_ptr,  # [T, Hq, Dk]
    v_ptr,  # [T, H, Dv]
    facts_ptr,  # [rows, H, FACTS] float32
    out_ptr,  # [T, H, Dv] contiguous
    state_ptr,  # [slots, H, Dv, Dk] float32
    ring_k_ptr,  # [slots, R, Hk, Dk]
    ring_v_ptr,  # [slots, R, H, Dv]
    query_start_loc_ptr,
    slots_ptr,
    start_ptr,
    replay_ptr,
    num_new_ptr,
    total_tokens,  # T
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    state_slot,
    ring_k_slot,
    ring_v_slot,
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
    AGAIN: tl.constexpr,  # the state is read again where it is changed
    EARLY: tl.constexpr,  # the state is read before the predecessor is complete
    REPLAY: tl.constexpr,  # whether a row may replay
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    CHUNK: tl.constexpr = 16
    PIECES: tl.constexpr = WIDTH_K // PIECE
    EXACT: tl.constexpr = PRECISION == "tf32"  # keys and queries are TF32 numbers
    if not EARLY:
        wait_for_predecessor(DEPENDENT)
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dv = block * BLOCK_DV + tl.arange(0, BLOCK_DV)[:, None]  # [B, 1]
    if row == tl.num_programs(2) - 1:
        _zeros_after_rows(out_ptr, tl.load(query_start_loc_ptr + row), total_tokens, head, dv, HEADS, DIM_V)
        if EARLY:
            wait_for_predecessor(DEPENDENT)
        return
    first, tokens = row_tokens(query_start_loc_ptr, row)
    slot, start, replay, num_new = row_state(slots_ptr, start_ptr, replay_ptr, num_new_ptr, row)
    count, committed = replay + tokens, replay + num_new
    if (tokens == 0) | (count > CHUNK):
        if EARLY:
            wait_for_predecessor(DEPENDENT)
        return
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]  # [C, 1], [1, C]
    lane = tl.arange(0, PIECE)[None, :]  # [1, L]
    in_v, known = dv < DIM_V, tl.where(start > replay, DIM_K, 0)
    state_at = state_ptr + slot * state_slot + ((head * DIM_V + dv) * DIM_K + lane)  # [B, L]
    key_head, ring_head = head // (HEADS // KEY_HEADS), head // (HEADS // RING_HEADS)
    own_i, own_j = (i >= replay) & (i < count), (j >= replay) & (j < count)
    place_i, place_j = (start - replay + i) % RING_SIZE, (start - replay + j) % RING_SIZE
    q_at = q_ptr + (first * q_token + key_head * q_head) + ((i - replay) * q_token + lane)  # [C, L]
    k_at = k_ptr + (first * k_token + key_head * k_head) + ((i - replay) * k_token + lane)  # [C, L]
    ring_k_at = ring_k_ptr + slot * ring_k_slot + ((place_i * RING_HEADS + ring_head) * DIM_K + lane)  # [C, L]
    v_at = v_ptr + (first * v_token + head * v_head) + ((j - replay) * v_token + dv)  # [B, C]
    ring_v_at = ring_v_ptr + slot * ring_v_slot + ((place_j * HEADS + head) * DIM_V + dv)  # [B, C]
    raw_v = _either(v_at, ring_v_at, j < replay, (j < count) & in_v, REPLAY)  # [B, C]
    read, o = tl.zeros((BLOCK_DV, CHUNK), tl.float32), tl.zeros((BLOCK_DV, CHUNK), tl.float32)
    if STAGES > 0:
        for piece in tl.range(0, PIECES, num_stages=STAGES):
            begin = piece * PIECE
            in_k = begin + lane < DIM_K
            S = tl.load(state_at + begin, mask=in_v & (begin + lane < known), other=0.0)  # [B, L]
            k = _either(k_at + begin, ring_k_at + begin, i < replay, (i < count) & in_k, REPLAY)  # [C, L]
            q = tl.load(q_at + begin, mask=own_i & in_k, other=0.0)  # [C, L]
            keys, queries = tl.trans(k.to(tl.float32)), tl.trans(q.to(tl.float32))  # [L, C]
            read = _times(S, keys, read, EXACT)
            if EXACT:
                o = tl.dot(upper_bits(S), queries, o, input_precision="tf32")
            else:
                o = _times(S, queries, o, False)
    else:
        S = ()
        for piece in tl.static_range(PIECES):
            in_state = in_v & (piece * PIECE + lane < known)
            S = S + (tl.load(state_at + piece * PIECE, mask=in_state, other=0.0),)  # noqa: RUF005
        ks, qs = (), ()
        for piece in tl.static_range(PIECES):
            begin = piece * PIECE
            in_k = begin + lane < DIM_K
            ks = ks + (_either(k_at + begin, ring_k_at + begin, i < replay, (i < count) & in_k, REPLAY),)  # noqa: RUF005
            qs = qs + (tl.load(q_at + begin, mask=own_i & in_k, other=0.0),)  # noqa: RUF005
        for piece in tl.static_range(PIECES):
            keys, queries = tl.trans(ks[piece].to(tl.float32)), tl.trans(qs[piece].to(tl.float32))  # [L, C]
            read = _times(S[piece], keys, read, EXACT)
            if EXACT:
                o = tl.dot(upper_bits(S[piece]), queries, o, input_precision="tf32")
            else:
                o = _times(S[piece], queries, o, False)
    if EARLY:
        wait_for_predecessor(DEPENDENT)

    facts = facts_ptr + (row * HEADS + head).to(tl.int64) * _FACTS
    solved = tl.load(facts + (i * CHUNK + j))  # [C, C]
    P = tl.load(facts + (256 + i * CHUNK + j))  # [C, C]
    of_read, of_o = tl.load(facts + (512 + j)), tl.load(facts + (528 + j))  # [1, C]
    of_u, kept = tl.load(facts + (544 + j)), tl.load(facts + 560)  # [1, C], scalar
    u = _times(raw_v.to(tl.float32) - read * of_read, solved, tl.zeros((BLOCK_DV, CHUNK), tl.float32), False)  # [B, C]
    if EXACT:
        o = tl.dot(u, P, o * of_o, input_precision="tf32")
    else:
        o = _times(u, P, o * of_o, False)
    u *= of_u
    stored = tl.where((num_new > 0) & (num_new <= tokens), DIM_K, 0)
    if STAGES > 0:
        for piece in tl.range(0, PIECES, num_stages=STAGES):
            begin = piece * PIECE
            in_k = begin + lane < DIM_K
            before = tl.load(state_at + begin, mask=in_v & (begin + lane < known), other=0.0)  # [B, L]
            k = _either(k_at + begin, ring_k_at + begin, i < replay, (i < count) & in_k, REPLAY)  # [C, L]
            update = _times(u, k.to(tl.float32), tl.zeros((BLOCK_DV, PIECE), tl.float32), EXACT)
            after = tl.fma(before, tl.broadcast_to(kept, before.shape), update)
            tl.store(state_at + begin, after, mask=in_v & (begin + lane < stored))
    else:
        for piece in tl.static_range(PIECES):
            begin = piece * PIECE
            if AGAIN:
                before = tl.load(state_at + begin, mask=in_v & (begin + lane < known), other=0.0)  # [B, L]
            else:
                before = S[piece]
            # by fma: as the sum of a matmul, the state would lose its last bits downward, tensor cores do not round
            update = _times(u, ks[piece].to(tl.float32), tl.zeros((BLOCK_DV, PIECE), tl.float32), EXACT)
            after = tl.fma(before, tl.broadcast_to(kept, before.shape), update)
            tl.store(state_at + begin, after, mask=in_v & (begin + lane < stored))
    out_at = out_ptr + (first * HEADS + head) * DIM_V + ((j - replay) * (HEADS * DIM_V) + dv)  # [B, C]
    tl.store(out_at, o.to(out_ptr.dtype.element_ty), mask=own_j & in_v)
    tl.store(ring_v_at, raw_v, mask=(j >= committed) & (j < count) & in_v)


def launch_delta_pair(
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
    tiling: PairTiling,
) -> None:
    """As `attention.kernels.delta_short.launch_delta_short`."""
    _, heads, dim_v = v.shape
    key_heads, dim_k = k.shape[1:]
    count = len(rows.slots)
    parts = {"state": state, "ring.k": ring.k, "ring.v": ring.v, "ring.g": ring.g, "ring.beta": ring.beta}
    check_launch(rows, len(state), parts, {"k": (k, ring.k), "v": (v, ring.v), "g": (g, ring.g)})
    q, k, v = (inner_rows(x) for x in (q, k, v))
    width_k = max(16, triton.next_power_of_2(dim_k))
    facts = torch.empty(count * heads, _FACTS.value, dtype=torch.float32, device=v.device)
    dependent = dependent_launch(v.device)
    lengths = (rows.query_start_loc, rows.slots, rows.start, rows.replay, rows.num_new)
    sizes = {"RING_SIZE": ring.k.shape[1], "HEADS": heads, "KEY_HEADS": key_heads, "RING_HEADS": ring.k.shape[2]}
    sizes |= {"DIM_K": dim_k, "WIDTH_K": width_k}
    # a ring of 2K + 1 places: one kernel for all rounds of an engine
    how = {"REPLAY": ring.k.shape[1] > 1, "PRECISION": precision_of(k.dtype), "num_stages": 1} | dependent
    group = heads // max(key_heads, ring.k.shape[2]) if tiling.group else 1
    # Triton's interpreter multiplies bfloat16 as if it were integers
    as_given = k.dtype == torch.float16 or (k.dtype == torch.bfloat16 and k.is_cuda)
    _prepare_kernel[(heads // group, count)](
        q,
        k,
        g,
        beta,
        facts,
        ring.k,
        ring.g,
        ring.beta,
        *lengths,
        scale,
        *q.stride()[:2],
        *k.stride()[:2],
        *g.stride(),
        *beta.stride(),
        ring.k.stride(0),
        ring.g.stride(0),
        ring.beta.stride(0),
        GROUP=group,
        AS_GIVEN=as_given and q.dtype == k.dtype,
        NORMALIZE=l2_normalize,
        num_warps=tiling.prepare_warps,
        maxnreg=tiling.prepare_registers,
        **sizes,
        **how,
    )
    _apply_kernel[(triton.cdiv(dim_v, tiling.block_dv), heads, count + 1)](
        q,
        k,
        v,
        facts,
        out,
        state,
        ring.k,
        ring.v,
        *lengths,
        len(v),
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        state.stride(0),
        ring.k.stride(0),
        ring.v.stride(0),
        DIM_V=dim_v,
        BLOCK_DV=tiling.block_dv,
        PIECE=min(tiling.piece, width_k),
        STAGES=tiling.stages,
        AGAIN=tiling.again,
        EARLY=tiling.early,
        num_warps=tiling.warps,
        maxnreg=tiling.registers,
        **sizes,
        **how,
    )
