"""The first launch of the gated delta rule over one chunk: a triangular system of 16 x 16 a value head, without states.

`attention/recurrence/delta_kernel.py`, which launches the second, has the rule and the symbols. A program solves the
systems of a row's value heads of one key head, one after the other: they share the products of their keys and queries.
It also keeps the drafts' keys, gates and β in the ring.

Precision. All that goes into the state is as accurate as float32. The products of keys and queries in half precision
are float32 numbers; everything else is split into upper and lower bits, three products of TF32. Not by "tf32x3", which
looks for infinities in every operand: five instructions a number, and these kernels are limited by instructions.
Sums of gates between two tokens are added up for each pair: a difference of two long sums would have their error.

Letters in the kernel: C tokens of a row (16), K key dimension (a power of two). Imported on CUDA only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.kernels.launch import dependent_launch, wait_for_predecessor
from attention.recurrence.kernel_rows import precision_of, row_state, row_tokens
from attention.recurrence.state_cache import DeltaRing
from attention.recurrence.state_rows import StateRows

FACTS = tl.constexpr(2 * 256 + 4 * 16)
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
def times_exactly(x, y, total, EXACT_Y: tl.constexpr):  # type: ignore[no-untyped-def]
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
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]  # [16, 1], [1, 16]
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
def own_or_kept(own_at, ring_at, is_ring, mask, REPLAY: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a row's tokens have there, and replayed ones in the ring, of one dtype: one load; zeros elsewhere."""
    if REPLAY:
        own_at = tl.where(is_ring, ring_at, own_at)
    return tl.load(own_at, mask=mask, other=0.0)


@triton.jit
def _inverse_length(squares, NORMALIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of squares [C] -> 1 / length, or 1; same epsilon as transformers' `l2norm`."""
    if NORMALIZE:
        return tl.rsqrt(squares + 1e-6)
    else:  # noqa: RET505 - one of the two is compiled
        return tl.full(squares.shape, 1.0, tl.float32)


@triton.jit
def _solve_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, Hq, Dk]
    k_ptr,  # [T, Hq, Dk]
    g_ptr,  # [T, H] float32
    beta_ptr,  # [T, H]
    facts_ptr,  # [rows, H, FACTS] float32
    ring_k_ptr,  # [slots, R, Hk, Dk]
    ring_g_ptr,  # [slots, R, H] float32
    ring_beta_ptr,  # [slots, R, H] float32
    query_start_loc_ptr, slots_ptr, start_ptr, replay_ptr, num_new_ptr,
    scale, q_token, q_head, k_token, k_head, g_token, g_head, beta_token, beta_head, ring_k_slot, ring_g_slot,
    ring_beta_slot,
    RING_SIZE: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, RING_HEADS: tl.constexpr,
    DIM_K: tl.constexpr, WIDTH_K: tl.constexpr,
    GROUP: tl.constexpr,  # value heads of a program, of one key head
    AS_GIVEN: tl.constexpr,  # keys and queries are multiplied in their own dtype
    REPLAY: tl.constexpr, NORMALIZE: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
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
    raw_k = own_or_kept(k_at, ring_k_at, i < replay, (i < count) & in_k, REPLAY)  # [C, K]
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
        g = own_or_kept(g_at, ring_g_at, i < replay, i < count, REPLAY)  # [C, 1]
        beta_at = beta_ptr + (first * beta_token + head * beta_head) + (j - replay) * beta_token  # [1, C]
        ring_beta_at = ring_beta_ptr + slot * ring_beta_slot + (place_j * HEADS + head)  # [1, C]
        beta = tl.load(beta_at, mask=own_j, other=0.0).to(tl.float32)  # [1, C]
        if REPLAY:
            beta += tl.load(ring_beta_at, mask=j < replay, other=0.0)

        through = tl.where(i <= j, g, 0.0)  # [C, C]
        upper, after = upper_bits(through), (j > i).to(tl.float32)  # [C, C]
        between = tl.dot(after, through - upper, input_precision="tf32")
        between = tl.dot(after, upper, between, input_precision="tf32")  # [C, C] of tokens i to j
        decay = tl.exp(tl.minimum(between, 0.0)) * of_k[:, None]  # [C, C]
        A = tl.where(i < j, scores * decay * (of_k[None, :] * beta), 0.0)
        solved = unit_upper_inverse(A, count)  # [C, C]
        P = tl.where(i <= j, queries * decay * of_q[None, :], 0.0)
        since = tl.exp(tl.sum(through, 0))[None, :]  # [1, C] of the stored state, at each token
        left = tl.sum(tl.where((i > j) & (i < committed), g, 0.0), 0)[None, :]  # [1, C] to the last committed token
        kept = tl.sum(tl.where(i < committed, tl.broadcast_to(g, (CHUNK, CHUNK)), 0.0), 0)[None, :]  # [1, C] equal
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


def launch_solve(
    q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, scale: float, l2_normalize: bool,
    ring: DeltaRing, rows: StateRows,
) -> torch.Tensor:  # fmt: skip
    """-> [rows · H, FACTS] float32, for rows with up to 16 replayed and own tokens; of others it is undefined."""
    heads, count = beta.shape[1], len(rows.slots)
    key_heads, dim_k = k.shape[1:]
    facts = torch.empty(count * heads, FACTS.value, dtype=torch.float32, device=k.device)
    group = heads // max(key_heads, ring.k.shape[2]) if count * heads >= _GROUPED_UNITS else 1
    # as they are where they are halves; Triton's interpreter multiplies bfloat16 as if it were integers
    as_given = q.dtype == k.dtype and (k.dtype == torch.float16 or (k.dtype == torch.bfloat16 and k.is_cuda))
    replay = ring.k.shape[1] > 1  # of an engine with drafts: one kernel for all its rounds
    _solve_kernel[(heads // group, count)](
        q, k, g, beta, facts, ring.k, ring.g, ring.beta, rows.query_start_loc, rows.slots, rows.start, rows.replay,
        rows.num_new, scale, *q.stride()[:2], *k.stride()[:2], *g.stride(), *beta.stride(), ring.k.stride(0),
        ring.g.stride(0), ring.beta.stride(0), RING_SIZE=ring.k.shape[1], HEADS=heads, KEY_HEADS=key_heads,
        RING_HEADS=ring.k.shape[2], DIM_K=dim_k, WIDTH_K=max(16, triton.next_power_of_2(dim_k)), GROUP=group,
        AS_GIVEN=as_given, REPLAY=replay, NORMALIZE=l2_normalize, PRECISION=precision_of(k.dtype),
        num_warps=2 if count * heads <= _FEW_UNITS else 1, **dependent_launch(k.device),
    )  # fmt: skip
    return facts
