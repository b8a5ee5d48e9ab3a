"""The gated delta rule and Mamba2's scan in chunks of tokens, for prompts. Imported on CUDA only.

With Γ the sums of the gates within a chunk, and S the state before it, the u of all its tokens solve one triangular
system: (I + L) u = β (V - exp(Γ) K Sᵀ), L[i, j] = β_i exp(Γ_i - Γ_j) (k_i · k_j) below the diagonal. So

    W = (I + L)⁻¹ β exp(Γ) K       U = (I + L)⁻¹ β V       P[i, j] = scale exp(Γ_i - Γ_j) (q_i · k_j), j <= i

need no state: a first launch finds them for all chunks at once. The next one goes from chunk to chunk of a row:

    u = U - W Sᵀ       o = scale exp(Γ) Q Sᵀ + P u       S = exp(Γ_C) S + uᵀ exp(Γ_C - Γ) K

Mamba2's scan has u = β V (dt x), and needs no first launch: the other one finds P (DELTA false; see
`attention.recurrence.kernel_rows.Inputs` for its names).

Exponents are at most 0 wherever they are used, so nothing overflows.

Letters in the kernels: C tokens of a chunk, K key dimension (a power of two), V rows of the state of a program.

Source: Yang et al., "Parallelizing Linear Transformers with the Delta Rule", arXiv 2406.06484, section 3.2; "Gated
Delta Networks", arXiv 2412.06464, section 3.3; Dao, Gu, "Transformers are SSMs", arXiv 2405.21060, section 6.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from triton.language import constexpr

from attention.kernels.launch import wait_for_predecessor
from attention.kernels.tiles import load_float, load_where, sum_where
from attention.recurrence.kernel_rows import (
    Inputs,
    chunk_of_row,
    chunks_of_row,
    facts_of_row,
    precision_of,
    row_of_chunk,
    row_tokens,
    running_sums,
    square,
    stages,
    unit_lower_inverse,
)
from attention.recurrence.tokens_kernel import replayed

CHUNK, _SCAN_CHUNK, _SCAN_BLOCK_DV = 32, 64, 64
_PREPARE_WARPS = 2
"""Tokens of a chunk, and warps of what needs no state: the fastest of 17 forms on an H200 (heads of Qwen3-Next)."""
_MANY_UNITS = 96
"""Three rows of 32 heads take 0.80 ms in whole states and 1.27 in parts there, two rows 0.80 and 0.73."""


def delta_tiling(units: int, width: int, roomy: bool) -> tuple[int, int, int]:
    """Rows of a program's part of the state [width, K], its warps and pipeline stages, for `units`: rows of the launch
    times heads. roomy: whether shared memory holds two chunks of a state of 128 rows.

    Chunks follow one another, so few rows are faster in small parts: more programs run at once. Many rows are faster
    in whole states, as each part reads all keys.

    >>> delta_tiling(512, 128, True), delta_tiling(32, 128, True), delta_tiling(512, 16, True)
    ((128, 8, 2), (32, 4, 1), (16, 4, 1))
    """
    if roomy and units >= _MANY_UNITS and width % 128 == 0:
        return 128, 8, 2
    return min(32, width), 4, 1


def warps_of(block: int, width: int) -> int:
    """Warps of a program of Mamba2's scan that holds these rows and columns of a state.

    Eight only for a tile as large as 64 x 128: of a small one Triton 3.6 compiles a float32 sum among eight warps that
    reads shared memory which is not there (compute-sanitizer on an H200, 16 x 16).

    >>> warps_of(64, 128), warps_of(16, 16)
    (8, 4)
    """
    return 8 if block * width >= 8192 else 4


@triton.jit
def _unit_rows(x, NORMALIZE: constexpr):  # type: ignore[no-untyped-def]
    """x [C, K] -> float32, rows of length 1 where NORMALIZE."""
    x = x.to(tl.float32)
    if NORMALIZE:
        x = x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]
    return x


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    q, k, gates, VECTOR_GATE: constexpr, PRECISION: constexpr, CHUNK: constexpr
):
    """q, k [C, K] and gates Γ ([C, 1], or [C, K]) -> [C, C]: exp(Γ_i - Γ_j) (q_i · k_j) for j <= i, and the same of k
    with itself for j < i; zeros elsewhere."""
    i, j = square(CHUNK)  # [C, 1], [1, C]
    if VECTOR_GATE:  # the decay is within the sum over K, and its two factors alone would overflow
        queries = tl.zeros((CHUNK, CHUNK), tl.float32)
        keys = tl.zeros((CHUNK, CHUNK), tl.float32)
        for column in range(CHUNK):
            key = sum_where(k, i == column)[None, :]  # [1, K]
            gate = sum_where(gates, i == column)[None, :]  # [1, K]
            decayed = key * tl.exp(tl.minimum(gates - gate, 0.0))  # [C, K]
            queries = tl.where(j == column, tl.sum(q * decayed, 1)[:, None], queries)
            keys = tl.where(j == column, tl.sum(k * decayed, 1)[:, None], keys)
    else:
        decay = tl.exp(tl.minimum(gates - tl.trans(gates), 0.0))  # [C, C]
        queries = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay
        keys = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay
    return tl.where(i >= j, queries, 0.0), tl.where(i > j, keys, 0.0)


@triton.jit
def _gates(  # type: ignore[no-untyped-def]
    g_at, g_token, count, column, in_k, VECTOR_GATE: constexpr, CHUNK: constexpr
):
    """g_at: where the chunk's first gate is, of `count` tokens -> the sums Γ within the chunk, [C, 1] or [C, K], and
    the last one, [1, 1] or [1, K]."""
    i, j = square(CHUNK)  # [C, 1], [1, C]
    if VECTOR_GATE:
        g = load_where(g_at + (i * g_token + column), (i < count) & in_k)  # [C, K]
        return tl.cumsum(g, 0), tl.sum(g, 0)[None, :]
    else:  # noqa: RET505 - one of the two is compiled
        g = load_where(g_at + j * g_token, j < count)  # [1, C]
        return running_sums(g, CHUNK), tl.sum(g, 1)[:, None]


@triton.jit(do_not_specialize=["rows", "least_tokens"])
def _prepare_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, Hk, Dk]
    k_ptr,  # [T, Hk, Dk]
    v_ptr,  # [T, H, Dv]
    g_ptr,  # [T, H] or [T, H, Dk] float32
    beta_ptr,  # [T, H]
    w_ptr,  # [T, H, Dk] float32, contiguous as the next two
    u_ptr,  # [T, H, Dv] float32
    p_ptr,  # [T, H, C] float32
    query_start_loc_ptr, num_new_ptr,
    scale, rows, least_tokens, q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, beta_token,
    beta_head,
    RING_SIZE: constexpr, HEADS: constexpr, KEY_HEADS: constexpr, DIM_K: constexpr, DIM_V: constexpr,
    WIDTH_K: constexpr, BLOCK_V: constexpr, VECTOR_GATE: constexpr, NORMALIZE: constexpr,
    PRECISION: constexpr, CHUNK: constexpr, ROWS: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    head = tl.program_id(1)
    row, chunk = row_of_chunk(query_start_loc_ptr, num_new_ptr, rows, tl.program_id(0), least_tokens, CHUNK, ROWS)
    if row >= rows:
        return
    first, tokens = row_tokens(query_start_loc_ptr, row)
    begin, end = chunk_of_row(tokens, tl.load(num_new_ptr + row), chunk, CHUNK)
    i, j = square(CHUNK)  # [C, 1], [1, C]
    column = tl.arange(0, WIDTH_K)[None, :]  # [1, K]
    inside, in_k = i < end - begin, column < DIM_K
    at = first + begin  # offsets of 64 bits for the chunk, of 32 within it: half the registers
    own, key_head = at * HEADS + head, head // (HEADS // KEY_HEADS)
    q_at = q_ptr + (at * q_token + key_head * q_head)
    k_at = k_ptr + (at * k_token + key_head * k_head)
    q = _unit_rows(load_where(q_at + (i * q_token + column), inside & in_k), NORMALIZE)  # [C, K]
    k = _unit_rows(load_where(k_at + (i * k_token + column), inside & in_k), NORMALIZE)  # [C, K]
    beta_at = beta_ptr + (at * beta_token + head * beta_head)
    beta = load_float(beta_at + i * beta_token, inside)  # [C, 1]
    g_at = g_ptr + (at * g_token + head * g_head)
    gates, _ = _gates(g_at, g_token, end - begin, column, in_k, VECTOR_GATE, CHUNK)
    queries, keys = _scores(q, k, gates, VECTOR_GATE, PRECISION, CHUNK)
    tl.store(p_ptr + own * CHUNK + (i * (HEADS * CHUNK) + j), queries * scale, mask=inside)
    inverse = unit_lower_inverse(keys * beta, CHUNK)
    w = tl.dot(inverse, beta * tl.exp(gates) * k, input_precision=PRECISION)  # [C, K]
    tl.store(w_ptr + own * DIM_K + (i * (HEADS * DIM_K) + column), w, mask=inside & in_k)
    v_at = v_ptr + (at * v_token + head * v_head)
    for block in tl.static_range((DIM_V + BLOCK_V - 1) // BLOCK_V):
        dv = block * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]  # [1, V]
        in_v = inside & (dv < DIM_V)
        v = load_float(v_at + (i * v_token + dv), in_v)  # [C, V]
        u = tl.dot(inverse, beta * v, input_precision=PRECISION)
        tl.store(u_ptr + own * DIM_V + (i * (HEADS * DIM_V) + dv), u, mask=in_v)


@triton.jit(do_not_specialize=["least_tokens"])
def _chunks_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, Hk, Dk]
    k_ptr,  # [T, Hk, Dk]
    v_ptr,  # [T, H, Dv]
    g_ptr,  # [T, H] or [T, H, Dk] float32
    beta_ptr,  # [T, H]
    w_ptr,  # [T, H, Dk] float32; any pointer without DELTA, as the next two
    u_ptr,  # [T, H, Dv] float32
    p_ptr,  # [T, H, C] float32
    skip_ptr,  # [H], or any pointer
    out_ptr,  # [T, H, Dv] contiguous
    state_ptr,  # [slots, H, Dv, Dk] float32 or half precision
    ring_k_ptr,  # [slots, R, Hk, Dk]
    ring_v_ptr,  # [slots, R, H, Dv]
    ring_g_ptr,  # [slots, R, H] or [slots, R, H, Dk] float32; any pointer without DELTA
    ring_beta_ptr,  # [slots, R, H] float32
    query_start_loc_ptr, slots_ptr, start_ptr, replay_ptr, num_new_ptr,
    scale, least_tokens, q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, beta_token, beta_head,
    RING_SIZE: constexpr, HEADS: constexpr, KEY_HEADS: constexpr, DIM_K: constexpr, DIM_V: constexpr,
    WIDTH_K: constexpr, BLOCK_DV: constexpr, VECTOR_GATE: constexpr, NORMALIZE: constexpr,
    PRECISION: constexpr, CHUNK: constexpr, DELTA: constexpr, HAS_SKIP: constexpr,
    DEPENDENT: constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, tokens, slot, start, replay, num_new = facts_of_row(
        query_start_loc_ptr, slots_ptr, start_ptr, replay_ptr, num_new_ptr, row
    )
    if tokens < least_tokens:
        return
    key_head = head // (HEADS // KEY_HEADS)
    owns_key = (block == 0) & (head % (HEADS // KEY_HEADS) == 0)
    column, piece = tl.arange(0, WIDTH_K)[None, :], tl.arange(0, BLOCK_DV)  # [1, K], [V]
    dv = block * BLOCK_DV + piece[None, :]  # [1, V]
    in_k = column < DIM_K
    state_row = block * BLOCK_DV + piece[:, None]  # [V, 1]
    state_at = state_ptr + slot * (HEADS * DIM_V * DIM_K) + (head * DIM_V + state_row) * DIM_K + column  # [V, K]
    known = (state_row < DIM_V) & (column < tl.where(start > replay, DIM_K, 0))
    S = load_float(state_at, known)  # [V, K]
    S = replayed(
        S[None, :, :], g_ptr, ring_k_ptr, ring_v_ptr, ring_g_ptr, ring_beta_ptr, slot, start, replay, head,
        state_row[None, :, :], column[None, :, :], RING_SIZE, HEADS, KEY_HEADS, DIM_K, DIM_V, VECTOR_GATE, NORMALIZE,
        DELTA,
    )  # fmt: skip
    S = tl.reshape(S, (BLOCK_DV, WIDTH_K))
    committed, chunks = chunks_of_row(tokens, num_new, CHUNK)
    i, j = square(CHUNK)  # [C, 1], [1, C]
    for chunk in range(chunks):
        begin, end = chunk_of_row(tokens, num_new, chunk, CHUNK)
        inside = i < end - begin  # [C, 1]
        at = first + begin  # offsets of 64 bits for the chunk, of 32 within it: half the registers
        own = at * HEADS + head
        k_at = k_ptr + (at * k_token + key_head * k_head)
        q_at = q_ptr + (at * q_token + key_head * q_head)
        g_at = g_ptr + (at * g_token + head * g_head)
        v_at = v_ptr + (at * v_token + head * v_head) + (i * v_token + dv)
        beta_at = beta_ptr + (at * beta_token + head * beta_head)
        if DELTA:
            gates, last = _gates(g_at, g_token, end - begin, column, in_k, VECTOR_GATE, CHUNK)
        else:
            decay = load_where(beta_at + j * beta_token, j < end - begin) * tl.load(g_at)  # [1, C]
            gates, last = running_sums(decay, CHUNK), tl.sum(decay, 1)[:, None]  # [C, 1], [1, 1]
        before = tl.trans(S)  # [K, V]
        in_v = inside & (dv < DIM_V)  # [C, V]
        if DELTA:
            u = load_where(u_ptr + own * DIM_V + (i * (HEADS * DIM_V) + dv), in_v)  # [C, V]
            w = load_where(w_ptr + own * DIM_K + (i * (HEADS * DIM_K) + column), inside & in_k)  # [C, K]
            u -= tl.dot(w, before, input_precision=PRECISION)
        else:
            v = load_where(v_at, in_v)  # [C, V]
            u = v.to(tl.float32) * load_where(beta_at + i * beta_token, inside)  # [C, V]
        q = _unit_rows(load_where(q_at + (i * q_token + column), inside & in_k), NORMALIZE)  # [C, K]
        o = tl.dot(q * tl.exp(gates), before, input_precision=PRECISION)
        if DELTA:
            o *= scale
            p = load_where(p_ptr + own * CHUNK + (i * (HEADS * CHUNK) + j), inside)  # [C, C]
        else:
            raw_k = load_where(k_at + (i * k_token + column), inside & in_k)  # [C, K]
            p, _ = _scores(q, raw_k.to(tl.float32), gates, False, PRECISION, CHUNK)  # [C, C]
        o += tl.dot(p, u, input_precision=PRECISION)
        if HAS_SKIP:
            o += tl.load(skip_ptr + head).to(tl.float32) * v.to(tl.float32)
        out_at = out_ptr + own * DIM_V + (i * (HEADS * DIM_V) + dv)
        tl.store(out_at, o, mask=in_v)
        if DELTA:
            raw_k = load_where(k_at + (i * k_token + column), inside & in_k)  # [C, K]
            k = _unit_rows(raw_k, NORMALIZE) * tl.exp(last - gates)
            S = S * tl.exp(last) + tl.dot(tl.trans(u), k, input_precision=PRECISION)
        else:
            left = tl.trans(u * tl.exp(last - gates))  # [V, C]
            S = S * tl.exp(last) + tl.dot(left, raw_k.to(tl.float32), input_precision=PRECISION)
        if chunk == committed - 1:
            tl.store(state_at, S, mask=(state_row < DIM_V) & in_k)
        if chunk >= committed:
            ring, place = slot * RING_SIZE, (start + begin + i) % RING_SIZE  # scalar, [C, 1]
            ring_at = place * HEADS + head  # [C, 1]
            if DELTA:
                v = load_where(v_at, in_v)
            tl.store(ring_v_ptr + ring * (HEADS * DIM_V) + (ring_at * DIM_V + dv), v, mask=in_v)
            ring_k_at = ring_k_ptr + ring * (KEY_HEADS * DIM_K) + ((place * KEY_HEADS + key_head) * DIM_K + column)
            tl.store(ring_k_at, raw_k, mask=inside & (column < tl.where(owns_key, DIM_K, 0)))
            kept = i < tl.where(block == 0, end - begin, 0)  # [C, 1]
            beta = load_where(beta_at + i * beta_token, kept)
            tl.store(ring_beta_ptr + ring * HEADS + ring_at, beta, mask=kept)
            if VECTOR_GATE:
                g = load_where(g_at + (i * g_token + column), kept & in_k)
                tl.store(ring_g_ptr + ring * (HEADS * DIM_K) + (ring_at * DIM_K + column), g, mask=kept & in_k)
            elif DELTA:
                g = load_where(g_at + i * g_token, kept)
                tl.store(ring_g_ptr + ring * HEADS + ring_at, g, mask=kept)


def launch_chunks(call: Inputs, least_tokens: int) -> None:
    """The rows with at least `least_tokens` tokens; others stay as they are."""
    tokens, heads, dim_v = call.v.shape
    dim_k, count = call.k.shape[2], len(call.rows.slots)
    width_v, vector, precision = max(16, triton.next_power_of_2(dim_v)), call.g.dim() == 3, precision_of(call.v.dtype)
    constants = call.constants | {
        "VECTOR_GATE": vector,
        "NORMALIZE": call.normalize,
        "PRECISION": precision,
        "CHUNK": CHUNK if call.delta else _SCAN_CHUNK,
    }
    solved, block = (call.v,) * 3, min(_SCAN_BLOCK_DV, width_v)
    warps, staged = warps_of(block, constants["WIDTH_K"]), stages(call.v.device, constants["WIDTH_K"])
    if call.delta:
        small = precision == "tf32" and not vector  # what a program holds
        units = heads * max(1, tokens // call.rows.max_query_len)
        block, warps, staged = delta_tiling(units, width_v, small and staged == 2)
        make = partial(torch.empty, dtype=torch.float32, device=call.v.device)
        solved = (make(tokens, heads, dim_k), make(tokens, heads, dim_v), make(tokens, heads, CHUNK))
        _prepare_kernel[(tokens // CHUNK + 2 * count, heads)](  # at most so many chunks
            *call.tensors, *solved, call.rows.query_start_loc, call.rows.num_new, call.scale, count, least_tokens,
            *call.strides, BLOCK_V=min(64, width_v), ROWS=triton.next_power_of_2(count),
            num_warps=_PREPARE_WARPS if small else 2 * _PREPARE_WARPS, num_stages=1, **constants,
        )  # fmt: skip
    _chunks_kernel[(triton.cdiv(dim_v, block), heads, count)](
        *call.tensors, *solved, call.v if call.skip is None else call.skip, call.out, call.state, *call.ring,
        *call.rows.arrays, call.scale, least_tokens, *call.strides, BLOCK_DV=block, DELTA=call.delta,
        HAS_SKIP=call.skip is not None, num_warps=warps, num_stages=staged, **constants,
    )  # fmt: skip
