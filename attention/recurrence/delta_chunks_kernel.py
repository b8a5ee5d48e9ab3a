"""The gated delta rule in chunks of tokens, for prompts: two launches.

With Γ the sums of the gates within a chunk, and S the state before it, the u of all its tokens solve one triangular
system: (I + L) u = β (V - exp(Γ) K Sᵀ), L[i, j] = β_i exp(Γ_i - Γ_j) (k_i · k_j) below the diagonal. So

    W = (I + L)⁻¹ β exp(Γ) K       U = (I + L)⁻¹ β V       P[i, j] = scale exp(Γ_i - Γ_j) (q_i · k_j), j <= i

need no state: the first launch finds them for all chunks at once. The second goes from chunk to chunk of a row:

    u = U - W Sᵀ       o = scale exp(Γ) Q Sᵀ + P u       S = exp(Γ_C) S + uᵀ exp(Γ_C - Γ) K

Exponents are at most 0 wherever they are used, so nothing overflows.

Letters in the kernels: C tokens of a chunk, K key dimension (a power of two), V rows of the state of a program.

Source: Yang et al., "Parallelizing Linear Transformers with the Delta Rule", arXiv 2406.06484, section 3.2; "Gated
Delta Networks", arXiv 2412.06464, section 3.3. Imported on CUDA only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.kernels.launch import dependent_launch, wait_for_predecessor
from attention.recurrence.delta_tokens_kernel import replayed
from attention.recurrence.kernel_rows import (
    CHUNK,
    check_launch,
    chunk_of_row,
    chunks_of_row,
    inner_rows,
    most_chunks,
    precision_of,
    row_of_chunk,
    row_state,
    row_tokens,
    running_sums,
    stages,
    unit_lower_inverse,
)
from attention.recurrence.state_cache import DeltaRing
from attention.recurrence.state_rows import StateRows

_BLOCK_DV, _WARPS = 32, 8


@triton.jit
def _unit_rows(x, NORMALIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """x [C, K] -> float32, rows of length 1 where NORMALIZE."""
    x = x.to(tl.float32)
    if NORMALIZE:
        x = x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]
    return x


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    q, k, gates, VECTOR_GATE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr
):
    """q, k [C, K] and gates Γ ([C, 1], or [C, K]) -> [C, C]: exp(Γ_i - Γ_j) (q_i · k_j) for j <= i, and the same of k
    with itself for j < i; zeros elsewhere."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]  # [C, 1], [1, C]
    if VECTOR_GATE:  # the decay is within the sum over K, and its two factors alone would overflow
        queries = tl.zeros((CHUNK, CHUNK), tl.float32)
        keys = tl.zeros((CHUNK, CHUNK), tl.float32)
        for column in range(CHUNK):
            key = tl.sum(tl.where(i == column, k, 0.0), 0)[None, :]  # [1, K]
            gate = tl.sum(tl.where(i == column, gates, 0.0), 0)[None, :]  # [1, K]
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
    g_at, g_token, count, column, in_k, VECTOR_GATE: tl.constexpr, CHUNK: tl.constexpr
):
    """g_at: where the chunk's first gate is, of `count` tokens -> the sums Γ within the chunk, [C, 1] or [C, K], and
    the last one, [1, 1] or [1, K]."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]  # [C, 1], [1, C]
    if VECTOR_GATE:
        g = tl.load(g_at + (i * g_token + column), mask=(i < count) & in_k, other=0.0)  # [C, K]
        return tl.cumsum(g, 0), tl.sum(g, 0)[None, :]
    else:  # noqa: RET505 - one of the two is compiled
        g = tl.load(g_at + j * g_token, mask=j < count, other=0.0)  # [1, C]
        return running_sums(g, CHUNK), tl.sum(g, 1)[:, None]


@triton.jit(do_not_specialize=["rows", "least_tokens"])
def _prepare_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, Hq, Dk]
    k_ptr,  # [T, Hq, Dk]
    v_ptr,  # [T, H, Dv]
    g_ptr,  # [T, H] or [T, H, Dk] float32
    beta_ptr,  # [T, H]
    w_ptr,  # [T, H, Dk] float32, contiguous as the next two
    u_ptr,  # [T, H, Dv] float32
    p_ptr,  # [T, H, C] float32
    query_start_loc_ptr, num_new_ptr,
    scale, rows, least_tokens, q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, beta_token,
    beta_head,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr, WIDTH_K: tl.constexpr,
    BLOCK_V: tl.constexpr, VECTOR_GATE: tl.constexpr, NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    head = tl.program_id(1)
    row, chunk = row_of_chunk(query_start_loc_ptr, num_new_ptr, rows, tl.program_id(0), least_tokens, CHUNK, ROWS)
    if row >= rows:
        return
    first, tokens = row_tokens(query_start_loc_ptr, row)
    begin, end = chunk_of_row(tokens, tl.load(num_new_ptr + row), chunk, CHUNK)
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]  # [C, 1], [1, C]
    column = tl.arange(0, WIDTH_K)[None, :]  # [1, K]
    inside, in_k = i < end - begin, column < DIM_K
    at = first + begin  # offsets of 64 bits for the chunk, of 32 within it: half the registers
    own, key_head = at * HEADS + head, head // (HEADS // KEY_HEADS)
    q_at = q_ptr + (at * q_token + key_head * q_head)
    k_at = k_ptr + (at * k_token + key_head * k_head)
    q = _unit_rows(tl.load(q_at + (i * q_token + column), mask=inside & in_k, other=0.0), NORMALIZE)  # [C, K]
    k = _unit_rows(tl.load(k_at + (i * k_token + column), mask=inside & in_k, other=0.0), NORMALIZE)  # [C, K]
    beta_at = beta_ptr + (at * beta_token + head * beta_head)
    beta = tl.load(beta_at + i * beta_token, mask=inside, other=0.0).to(tl.float32)  # [C, 1]
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
        v = tl.load(v_at + (i * v_token + dv), mask=in_v, other=0.0).to(tl.float32)  # [C, V]
        u = tl.dot(inverse, beta * v, input_precision=PRECISION)
        tl.store(u_ptr + own * DIM_V + (i * (HEADS * DIM_V) + dv), u, mask=in_v)


@triton.jit(do_not_specialize=["least_tokens"])
def _pass_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, Hq, Dk]
    k_ptr,  # [T, Hq, Dk]
    v_ptr,  # [T, H, Dv]
    g_ptr,  # [T, H] or [T, H, Dk] float32
    beta_ptr,  # [T, H]
    w_ptr,  # [T, H, Dk] float32
    u_ptr,  # [T, H, Dv] float32
    p_ptr,  # [T, H, C] float32
    out_ptr,  # [T, H, Dv] contiguous
    state_ptr,  # [slots, H, Dv, Dk] float32
    ring_k_ptr,  # [slots, R, Hk, Dk]
    ring_v_ptr,  # [slots, R, H, Dv]
    ring_g_ptr,  # [slots, R, H] or [slots, R, H, Dk] float32
    ring_beta_ptr,  # [slots, R, H] float32
    query_start_loc_ptr, slots_ptr, start_ptr, replay_ptr, num_new_ptr,
    scale, least_tokens, q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, beta_token, beta_head,
    state_slot, ring_k_slot, ring_v_slot, ring_g_slot, ring_beta_slot,
    RING_SIZE: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, RING_HEADS: tl.constexpr,
    DIM_K: tl.constexpr, DIM_V: tl.constexpr, WIDTH_K: tl.constexpr, BLOCK_DV: tl.constexpr, VECTOR_GATE: tl.constexpr,
    NORMALIZE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, tokens = row_tokens(query_start_loc_ptr, row)
    if tokens < least_tokens:
        return
    slot, start, replay, num_new = row_state(slots_ptr, start_ptr, replay_ptr, num_new_ptr, row)
    key_head, ring_head = head // (HEADS // KEY_HEADS), head // (HEADS // RING_HEADS)
    owns_key = (block == 0) & (head % (HEADS // RING_HEADS) == 0)
    column, piece = tl.arange(0, WIDTH_K)[None, :], tl.arange(0, BLOCK_DV)  # [1, K], [V]
    dv = block * BLOCK_DV + piece[None, :]  # [1, V]
    in_k = column < DIM_K
    state_row = block * BLOCK_DV + piece[:, None]  # [V, 1]
    state_at = state_ptr + slot * state_slot + (head * DIM_V + state_row) * DIM_K + column  # [V, K]
    in_state = (state_row < DIM_V) & in_k
    known = (state_row < DIM_V) & (column < tl.where(start > replay, DIM_K, 0))
    S = tl.load(state_at, mask=known, other=0.0)  # [V, K]
    S = replayed(
        S[None, :, :], ring_k_ptr, ring_v_ptr, ring_g_ptr, ring_beta_ptr, slot, start, replay, head,
        state_row[None, :, :], column[None, :, :], ring_k_slot, ring_v_slot, ring_g_slot, ring_beta_slot,
        RING_SIZE, HEADS, RING_HEADS, DIM_K, DIM_V, VECTOR_GATE, NORMALIZE,
    )  # fmt: skip
    S = tl.reshape(S, (BLOCK_DV, WIDTH_K))
    committed, chunks = chunks_of_row(tokens, num_new, CHUNK)
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]  # [C, 1], [1, C]
    for chunk in range(chunks):
        begin, end = chunk_of_row(tokens, num_new, chunk, CHUNK)
        inside = i < end - begin  # [C, 1]
        at = first + begin  # offsets of 64 bits for the chunk, of 32 within it: half the registers
        own = at * HEADS + head
        k_at = k_ptr + (at * k_token + key_head * k_head)
        q_at = q_ptr + (at * q_token + key_head * q_head)
        g_at = g_ptr + (at * g_token + head * g_head)
        gates, last = _gates(g_at, g_token, end - begin, column, in_k, VECTOR_GATE, CHUNK)
        before = tl.trans(S)  # [K, V]
        in_v = inside & (dv < DIM_V)  # [C, V]
        u = tl.load(u_ptr + own * DIM_V + (i * (HEADS * DIM_V) + dv), mask=in_v, other=0.0)  # [C, V]
        w = tl.load(w_ptr + own * DIM_K + (i * (HEADS * DIM_K) + column), mask=inside & in_k, other=0.0)  # [C, K]
        u -= tl.dot(w, before, input_precision=PRECISION)
        q = _unit_rows(tl.load(q_at + (i * q_token + column), mask=inside & in_k, other=0.0), NORMALIZE)  # [C, K]
        o = tl.dot(q * tl.exp(gates), before, input_precision=PRECISION) * scale
        p = tl.load(p_ptr + own * CHUNK + (i * (HEADS * CHUNK) + j), mask=inside, other=0.0)  # [C, C]
        o += tl.dot(p, u, input_precision=PRECISION)
        out_at = out_ptr + own * DIM_V + (i * (HEADS * DIM_V) + dv)
        tl.store(out_at, o.to(out_ptr.dtype.element_ty), mask=in_v)
        raw_k = tl.load(k_at + (i * k_token + column), mask=inside & in_k, other=0.0)  # [C, K]
        k = _unit_rows(raw_k, NORMALIZE) * tl.exp(last - gates)
        S = S * tl.exp(last) + tl.dot(tl.trans(u), k, input_precision=PRECISION)
        if chunk == committed - 1:
            tl.store(state_at, S, mask=in_state)
        if chunk >= committed:
            place = (start + begin + i) % RING_SIZE  # [C, 1]
            ring_at = place * HEADS + head  # [C, 1]
            v = tl.load(v_ptr + (at * v_token + head * v_head) + (i * v_token + dv), mask=in_v, other=0.0)
            tl.store(ring_v_ptr + slot * ring_v_slot + ring_at * DIM_V + dv, v, mask=in_v)
            ring_k_at = ring_k_ptr + slot * ring_k_slot + (place * RING_HEADS + ring_head) * DIM_K + column
            tl.store(ring_k_at, raw_k, mask=inside & (column < tl.where(owns_key, DIM_K, 0)))
            kept = i < tl.where(block == 0, end - begin, 0)  # [C, 1]
            beta_at = beta_ptr + (at * beta_token + head * beta_head) + i * beta_token
            beta = tl.load(beta_at, mask=kept, other=0.0)
            tl.store(ring_beta_ptr + slot * ring_beta_slot + ring_at, beta.to(tl.float32), mask=kept)
            if VECTOR_GATE:
                g = tl.load(g_at + (i * g_token + column), mask=kept & in_k, other=0.0)
                tl.store(ring_g_ptr + slot * ring_g_slot + ring_at * DIM_K + column, g, mask=kept & in_k)
            else:
                g = tl.load(g_at + i * g_token, mask=kept, other=0.0)
                tl.store(ring_g_ptr + slot * ring_g_slot + ring_at, g, mask=kept)


def launch_delta_chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, scale: float,
    l2_normalize: bool, state: torch.Tensor, ring: DeltaRing, rows: StateRows, out: torch.Tensor, least_tokens: int,
) -> None:  # fmt: skip
    """The rows with at least `least_tokens` tokens, into out [T, H, Dv], see `gated_delta`; others stay as they are."""
    tokens, heads, dim_v = v.shape
    key_heads, dim_k = k.shape[1:]
    check_launch(rows, state, ring, k=k, v=v, g=g)
    q, k, v, g = (inner_rows(x) for x in (q, k, v, g))
    w, u, p = (
        torch.empty((tokens, heads, width), dtype=torch.float32, device=v.device) for width in (dim_k, dim_v, CHUNK)
    )
    inputs, count = (q, k, v, g, beta), len(rows.slots)
    strides = [x.stride(i) for x in inputs for i in (0, 1)]
    width_v = max(16, triton.next_power_of_2(dim_v))
    constants = {
        "HEADS": heads,
        "KEY_HEADS": key_heads,
        "DIM_K": dim_k,
        "DIM_V": dim_v,
        "WIDTH_K": max(16, triton.next_power_of_2(dim_k)),
        "VECTOR_GATE": g.dim() == 3,
        "NORMALIZE": l2_normalize,
        "PRECISION": precision_of(v.dtype),
        "CHUNK": CHUNK,
        **dependent_launch(v.device),
    }
    _prepare_kernel[(most_chunks(tokens, count), heads)](
        *inputs, w, u, p, rows.query_start_loc, rows.num_new, scale, count, least_tokens, *strides,
        BLOCK_V=min(64, width_v), ROWS=triton.next_power_of_2(count), num_warps=_WARPS, num_stages=1, **constants,
    )  # fmt: skip
    # one stage where gates have all dimensions: they take as much shared memory again
    _pass_kernel[(triton.cdiv(dim_v, min(_BLOCK_DV, width_v)), heads, count)](
        *inputs, w, u, p, out, state, ring.k, ring.v, ring.g, ring.beta, rows.query_start_loc, rows.slots, rows.start,
        rows.replay, rows.num_new, scale, least_tokens, *strides, state.stride(0), ring.k.stride(0), ring.v.stride(0),
        ring.g.stride(0), ring.beta.stride(0), RING_SIZE=ring.k.shape[1], RING_HEADS=ring.k.shape[2],
        BLOCK_DV=min(_BLOCK_DV, width_v), num_warps=_WARPS, num_stages=1 if g.dim() == 3 else stages(v.device, dim_k),
        **constants,
    )  # fmt: skip
