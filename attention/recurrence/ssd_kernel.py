"""Mamba2's scan on a GPU: short rows token by token, long ones in chunks. Imported on CUDA only.

Chunks: with Γ the sums of dt A within a chunk, and S the state before it:

    y = M dt x + exp(Γ) C Sᵀ + D x, M[i, j] = exp(Γ_i - Γ_j) (C_i · B_j) for j <= i
    S = exp(Γ_C) S + (exp(Γ_C - Γ) dt x)ᵀ B

A program goes from chunk to chunk of a row, with BLOCK_P rows of one head's state. Exponents are at most 0 wherever
they are used.

Letters in the kernel: C tokens of a chunk, P rows of the state of a program, N its columns (a power of two).

Source: Dao, Gu, "Transformers are SSMs", arXiv 2405.21060, section 6.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.kernels.launch import dependent_launch, wait_for_predecessor
from attention.recurrence.kernel_rows import (
    CHUNK,
    TOKENS_OF_SHORT_ROWS,
    check_launch,
    chunk_of_row,
    chunks_of_row,
    inner_rows,
    precision_of,
    row_state,
    row_tokens,
    running_sums,
    stages,
)
from attention.recurrence.scan_kernel import launch_ssd, taken_in
from attention.recurrence.state_cache import ScanRing
from attention.recurrence.state_rows import StateRows

_MOST_P = 64


def warps_of(block_p: int, width: int) -> int:
    """Warps of a program that holds these rows and columns of a state.

    Eight only for a tile as large as 64 x 128: of a small one Triton 3.6 compiles a float32 sum among eight warps that
    reads shared memory which is not there (compute-sanitizer on an H200, 16 x 16).

    >>> warps_of(64, 128), warps_of(16, 16)
    (8, 4)
    """
    return 8 if block_p * width >= 8192 else 4


@triton.jit(do_not_specialize=["least_tokens"])
def _ssd_chunks_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, H, P]
    dt_ptr,  # [T, H] float32
    A_ptr,  # [H] float32
    B_ptr,  # [T, G, N]
    C_ptr,  # [T, G, N]
    D_ptr,  # [H], or any pointer
    out_ptr,  # [T, H, P] contiguous
    state_ptr,  # [slots, H, P, N] float32
    ring_x_ptr,  # [slots, R, H, P]
    ring_B_ptr,  # [slots, R, G, N]
    ring_dt_ptr,  # [slots, R, H] float32
    query_start_loc_ptr, slots_ptr, start_ptr, replay_ptr, num_new_ptr,
    least_tokens, x_token, x_head, dt_token, dt_head, B_token, B_group, C_token, C_group, state_slot, ring_x_slot,
    ring_B_slot, ring_dt_slot,
    RING_SIZE: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM_P: tl.constexpr, STATES: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_P: tl.constexpr, HAS_D: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = head // (HEADS // GROUPS)
    first, tokens = row_tokens(query_start_loc_ptr, row)
    if tokens < least_tokens:
        return
    slot, start, replay, num_new = row_state(slots_ptr, start_ptr, replay_ptr, num_new_ptr, row)
    piece, column = block * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, WIDTH)[None, :]  # [P], [1, N]
    p, state_row, in_n = piece[None, :], piece[:, None], column < STATES  # [1, P], [P, 1], [1, N]
    state_at = state_ptr + slot * state_slot + (head * DIM_P + state_row) * STATES + column  # [P, N]
    in_state = (state_row < DIM_P) & in_n
    known = (state_row < DIM_P) & (column < tl.where(start > replay, STATES, 0))
    S = tl.load(state_at, mask=known, other=0.0)  # [P, N]
    A = tl.load(A_ptr + head)
    ring_x_at = ring_x_ptr + slot * ring_x_slot + head * DIM_P
    ring_B_at = ring_B_ptr + slot * ring_B_slot + group * STATES + column  # [1, N]
    ring_dt_at = ring_dt_ptr + slot * ring_dt_slot + head
    for back in range(replay):
        place = (start - replay + back) % RING_SIZE
        ring_x = tl.load(ring_x_at + place * (HEADS * DIM_P) + state_row, mask=state_row < DIM_P, other=0.0)  # [P, 1]
        ring_B = tl.load(ring_B_at + place * (GROUPS * STATES), mask=in_n, other=0.0)  # [1, N]
        S = taken_in(S, ring_x.to(tl.float32), tl.load(ring_dt_at + place * HEADS), A, ring_B.to(tl.float32))
    committed, chunks = chunks_of_row(tokens, num_new, CHUNK)
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]  # [C, 1], [1, C]
    for chunk in range(chunks):
        begin, end = chunk_of_row(tokens, num_new, chunk, CHUNK)
        inside = i < end - begin  # [C, 1]
        at = first + begin  # offsets of 64 bits for the chunk, of 32 within it: half the registers
        in_p = inside & (p < DIM_P)  # [C, P]
        dt = tl.load(dt_ptr + (at * dt_token + head * dt_head) + i * dt_token, mask=inside, other=0.0)  # [C, 1]
        dt_at = dt_ptr + (at * dt_token + head * dt_head)
        decay = tl.load(dt_at + j * dt_token, mask=j < end - begin, other=0.0) * A  # [1, C]
        gates, last = running_sums(decay, CHUNK), tl.sum(decay, 1)[:, None]  # [C, 1], [1, 1]
        B_at = B_ptr + (at * B_token + group * B_group) + (i * B_token + column)
        C_at = C_ptr + (at * C_token + group * C_group) + (i * C_token + column)
        raw_B = tl.load(B_at, mask=inside & in_n, other=0.0)  # [C, N]
        B = raw_B.to(tl.float32)
        C = tl.load(C_at, mask=inside & in_n, other=0.0).to(tl.float32)  # [C, N]
        scores = tl.dot(C, tl.trans(B), input_precision=PRECISION)  # [C, C]
        scores = tl.where(i >= j, scores * tl.exp(tl.minimum(gates - tl.trans(gates), 0.0)), 0.0)
        x = tl.load(x_ptr + (at * x_token + head * x_head) + (i * x_token + p), mask=in_p, other=0.0)  # [C, P]
        step = x.to(tl.float32) * dt  # [C, P]
        y = tl.dot(scores, step, input_precision=PRECISION)
        y += tl.dot(C * tl.exp(gates), tl.trans(S), input_precision=PRECISION)
        if HAS_D:
            y += tl.load(D_ptr + head).to(tl.float32) * x.to(tl.float32)
        out_at = out_ptr + (at * HEADS + head) * DIM_P + (i * (HEADS * DIM_P) + p)
        tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=in_p)
        S = S * tl.exp(last) + tl.dot(tl.trans(step * tl.exp(last - gates)), B, input_precision=PRECISION)
        if chunk == committed - 1:
            tl.store(state_at, S, mask=in_state)
        if chunk >= committed:
            places = (start + begin + i) % RING_SIZE  # [C, 1]
            tl.store(ring_x_at + places * (HEADS * DIM_P) + p, x, mask=in_p)
            owns_group = (block == 0) & (head % (HEADS // GROUPS) == 0)
            in_ring = inside & (column < tl.where(owns_group, STATES, 0))
            tl.store(ring_B_at + places * (GROUPS * STATES), raw_B, mask=in_ring)
            kept = i < tl.where(block == 0, end - begin, 0)
            tl.store(ring_dt_at + places * HEADS, dt, mask=kept)


def launch_ssd_chunks(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor | None,
    state: torch.Tensor, ring: ScanRing, rows: StateRows, out: torch.Tensor, least_tokens: int,
) -> None:  # fmt: skip
    """The rows with at least `least_tokens` tokens, into out [T, H, P], see `ssd_scan`; others stay as they are."""
    _, heads, dim_p = x.shape
    groups, states = B.shape[1:]
    check_launch(rows, state, ring, x=x, B=B, dt=dt)
    x, B, C = (inner_rows(each) for each in (x, B, C))
    width = max(16, triton.next_power_of_2(states))
    block_p = min(_MOST_P, max(16, triton.next_power_of_2(dim_p)))
    _ssd_chunks_kernel[(triton.cdiv(dim_p, block_p), heads, len(rows.slots))](
        x, dt, A, B, C, x if D is None else D, out, state, ring.x, ring.B, ring.dt, rows.query_start_loc, rows.slots,
        rows.start, rows.replay, rows.num_new, least_tokens, *x.stride()[:2], *dt.stride(), *B.stride()[:2],
        *C.stride()[:2], state.stride(0), ring.x.stride(0), ring.B.stride(0), ring.dt.stride(0),
        RING_SIZE=ring.x.shape[1], HEADS=heads, GROUPS=groups, DIM_P=dim_p, STATES=states, WIDTH=width, BLOCK_P=block_p,
        HAS_D=D is not None, PRECISION=precision_of(x.dtype), CHUNK=CHUNK, num_warps=warps_of(block_p, width),
        num_stages=stages(x.device, width), **dependent_launch(x.device),
    )  # fmt: skip


def ssd_scan(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor | None,
    state: torch.Tensor, ring: ScanRing, rows: StateRows,
) -> torch.Tensor:  # fmt: skip
    """The outputs of Mamba2's scan, [T, H, P] in float32; `state` and `ring` are written.

    Per token: S = S exp(dt A) + dt x Bᵀ; y = S C + D x. Short rows are read token by token, in one launch, longer ones
    in chunks.

    Args:
        x: [T, H, P]; dt: float32 [T, H], after softplus and limits; A: float32 [H], negative.
        B, C: [T, G, N], each group of them for H / G heads in turn; D: [H] or None.
        state: float32 [slots, H, P, N]; ring: has the same slots.
        rows: no row reaches beyond T. Outputs of tokens of no row, after the last one, are zeros.
    """
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    inputs = (x, dt, A, B, C, D, state, ring, rows, out)
    launch_ssd(*inputs, most_tokens=TOKENS_OF_SHORT_ROWS)
    if rows.max_query_len > TOKENS_OF_SHORT_ROWS:
        launch_ssd_chunks(*inputs, least_tokens=TOKENS_OF_SHORT_ROWS + 1)
    return out
