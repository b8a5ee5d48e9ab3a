"""Selective scans token by token as Triton kernels: Mamba's, and Mamba2's of short rows. Imported on CUDA only.

Mamba: a program holds the states of BLOCK channels of one row in registers, reads and stores them once.

Letters in the kernel: C channels (BLOCK), N states of a channel (WIDTH, a power of two).

Source: Gu, Dao, "Mamba", arXiv 2312.00752, algorithm 2.

Mamba2: a program holds BLOCK_P rows of the state of one head of one row in registers, reads and stores them once; as
`delta_tokens_kernel`, in everything but what a token does to the state.

Letters in the kernel: B rows of the state (BLOCK_P of P), J · L its columns (N): see `kernel_rows`.

Source: Dao, Gu, "Transformers are SSMs", arXiv 2405.21060, equation 1 with a scalar A.
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
from attention.recurrence.state_cache import ScanRing
from attention.recurrence.state_rows import StateRows

_BLOCK, _WARPS = 32, 4
"""Channels of a program: 8,192 channels are 256 programs a row, each thread has four states."""


@triton.jit
def taken_in(S, x, dt, A, B):  # type: ignore[no-untyped-def]
    """The state S after a token, all float32 and broadcast together.

    Mamba: S, A [C, N], x, dt [C, 1], B [1, N]. Mamba2: S [J, B, L], x [1, B, 1], B [J, 1, L] (or [P, N], [P, 1],
    [1, N]), dt and A scalar.
    """
    return S * tl.exp(dt * A) + (dt * x) * B


@triton.jit(do_not_specialize=["total_tokens"])
def _scan_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, C]
    dt_ptr,  # [T, C] float32
    A_ptr,  # [C, N] contiguous float32
    B_ptr,  # [T, N]
    C_ptr,  # [T, N]
    D_ptr,  # [C], or any pointer
    out_ptr,  # [T, C] contiguous
    state_ptr,  # [slots, C, N] float32
    ring_x_ptr,  # [slots, R, C]
    ring_B_ptr,  # [slots, R, N]
    ring_dt_ptr,  # [slots, R, C] float32
    query_start_loc_ptr, slots_ptr, start_ptr, replay_ptr, num_new_ptr,
    total_tokens,  # T
    x_token, dt_token, B_token, C_token, state_slot, ring_x_slot, ring_B_slot, ring_dt_slot,
    RING_SIZE: tl.constexpr, CHANNELS: tl.constexpr, STATES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    HAS_D: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    block, row = tl.program_id(0), tl.program_id(1)
    channel, n = block * BLOCK + tl.arange(0, BLOCK)[:, None], tl.arange(0, WIDTH)[None, :]  # [C, 1], [1, N]
    in_c, in_n = channel < CHANNELS, n < STATES
    if row == tl.num_programs(1) - 1:  # tokens of no row
        end = tl.load(query_start_loc_ptr + row)
        padding_at = out_ptr + end.to(tl.int64) * CHANNELS + channel
        zeros_from(padding_at, total_tokens - end, CHANNELS, in_c, out_ptr.dtype.element_ty)
        return
    first, tokens = row_tokens(query_start_loc_ptr, row)
    if tokens == 0:
        return
    slot, start, replay, num_new = row_state(slots_ptr, start_ptr, replay_ptr, num_new_ptr, row)
    state_at = state_ptr + slot * state_slot + channel * STATES + n  # [C, N]
    S = tl.load(state_at, mask=(n < tl.where(start > replay, STATES, 0)) & in_c, other=0.0)  # [C, N]
    A = tl.load(A_ptr + channel * STATES + n, mask=in_c & in_n, other=0.0)  # [C, N]
    ring_x_at, ring_dt_at = ring_x_ptr + slot * ring_x_slot + channel, ring_dt_ptr + slot * ring_dt_slot + channel
    ring_B_at = ring_B_ptr + slot * ring_B_slot + n  # [1, N]
    for i in range(replay):
        place = (start - replay + i) % RING_SIZE
        x = tl.load(ring_x_at + place * CHANNELS, mask=in_c, other=0.0)  # [C, 1]
        dt = tl.load(ring_dt_at + place * CHANNELS, mask=in_c, other=0.0)  # [C, 1]
        B = tl.load(ring_B_at + place * STATES, mask=in_n, other=0.0)  # [1, N]
        S = taken_in(S, x.to(tl.float32), dt, A, B.to(tl.float32))
    x_at, dt_at = x_ptr + first * x_token + channel, dt_ptr + first * dt_token + channel  # [C, 1]
    B_at, C_at = B_ptr + first * B_token + n, C_ptr + first * C_token + n  # [1, N]
    out_at = out_ptr + first * CHANNELS + channel  # [C, 1]
    # The next token's inputs are on their way while this one's are used: a prompt is one long loop.
    next_x, next_dt = tl.load(x_at, mask=in_c, other=0.0), tl.load(dt_at, mask=in_c, other=0.0)
    next_B, next_C = tl.load(B_at, mask=in_n, other=0.0), tl.load(C_at, mask=in_n, other=0.0)
    for token in range(tokens):
        x, dt, B, C = next_x, next_dt, next_B, next_C
        x_at, dt_at, B_at, C_at = x_at + x_token, dt_at + dt_token, B_at + B_token, C_at + C_token
        more = token + 1 < tokens
        next_in_c, next_in_n = channel < tl.where(more, CHANNELS, 0), n < tl.where(more, STATES, 0)
        next_x, next_dt = tl.load(x_at, mask=next_in_c, other=0.0), tl.load(dt_at, mask=next_in_c, other=0.0)
        next_B, next_C = tl.load(B_at, mask=next_in_n, other=0.0), tl.load(C_at, mask=next_in_n, other=0.0)
        S = taken_in(S, x.to(tl.float32), dt, A, B.to(tl.float32))
        y = tl.sum(S * C.to(tl.float32), 1, keep_dims=True)  # [C, 1]
        if HAS_D:
            y += tl.load(D_ptr + channel, mask=in_c, other=0.0).to(tl.float32) * x.to(tl.float32)
        tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=in_c)
        out_at += CHANNELS
        if token == num_new - 1:
            tl.store(state_at, S, mask=in_c & in_n)
        if token >= num_new:
            ring_place = (start + token) % RING_SIZE
            tl.store(ring_x_at + ring_place * CHANNELS, x, mask=in_c)
            tl.store(ring_dt_at + ring_place * CHANNELS, dt, mask=in_c)
            tl.store(ring_B_at + ring_place * STATES, B, mask=n < tl.where(block == 0, STATES, 0))


def selective_scan(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor | None,
    state: torch.Tensor, ring: ScanRing, rows: StateRows,
) -> torch.Tensor:  # fmt: skip
    """The outputs of Mamba1's scan, [T, C] in float32; `state` and `ring` are written.

    Per token and channel: S = S exp(dt A) + dt x B; y = S · C + D x.

    Args:
        x: [T, C]; dt: float32 [T, C], after softplus; A: float32 [C, N], negative; B, C: [T, N]; D: [C] or None.
        state: float32 [slots, C, N]; ring: has the same slots.
        rows: no row reaches beyond T. Outputs of tokens of no row, after the last one, are zeros.
    """
    (tokens, channels), states = x.shape, A.shape[1]
    check_launch(rows, state, ring, x=x, B=B, dt=dt)
    x, dt, B, C = (inner_rows(each) for each in (x, dt, B, C))
    out = torch.empty((tokens, channels), dtype=torch.float32, device=x.device)
    _scan_kernel[(triton.cdiv(channels, _BLOCK), len(rows.slots) + 1)](
        x, dt, inner_rows(A, 2), B, C, x if D is None else D, out, state, ring.x, ring.B, ring.dt, rows.query_start_loc,
        rows.slots, rows.start, rows.replay, rows.num_new, tokens, x.stride(0), dt.stride(0), B.stride(0), C.stride(0),
        state.stride(0), ring.x.stride(0), ring.B.stride(0), ring.dt.stride(0), RING_SIZE=ring.x.shape[1],
        CHANNELS=channels, STATES=states, WIDTH=triton.next_power_of_2(states), BLOCK=_BLOCK, HAS_D=D is not None,
        num_warps=_WARPS, **dependent_launch(x.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["total_tokens", "most_tokens"])
def _ssd_kernel(  # type: ignore[no-untyped-def]
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
    total_tokens,  # T
    most_tokens,  # of a row; longer ones are left to another launch
    x_token, x_head, dt_token, dt_head, B_token, B_group, C_token, C_group, state_slot, ring_x_slot, ring_B_slot,
    ring_dt_slot,
    RING_SIZE: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM_P: tl.constexpr, STATES: tl.constexpr,
    WIDTH: tl.constexpr, PIECE: tl.constexpr, BLOCK_P: tl.constexpr, HAS_D: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = head // (HEADS // GROUPS)
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)[None, :, None]  # [1, B, 1]
    in_p = p < DIM_P
    if row == tl.num_programs(2) - 1:  # tokens of no row
        end = tl.load(query_start_loc_ptr + row)
        padding_at = out_ptr + (end.to(tl.int64) * HEADS + head) * DIM_P + p
        zeros_from(padding_at, total_tokens - end, HEADS * DIM_P, in_p, out_ptr.dtype.element_ty)
        return
    first, tokens = row_tokens(query_start_loc_ptr, row)
    if (tokens == 0) | (tokens > most_tokens):
        return
    slot, start, replay, num_new = row_state(slots_ptr, start_ptr, replay_ptr, num_new_ptr, row)
    piece, lane = tl.arange(0, WIDTH // PIECE), tl.arange(0, PIECE)
    column = piece[:, None, None] * PIECE + lane[None, None, :]  # [J, 1, L]
    in_n = column < STATES
    state_at = state_ptr + slot * state_slot + (head * DIM_P + p) * STATES + column  # [J, B, L]
    S = tl.load(state_at, mask=(column < tl.where(start > replay, STATES, 0)) & in_p, other=0.0)  # [J, B, L]
    A = tl.load(A_ptr + head)
    ring_x_at = ring_x_ptr + slot * ring_x_slot + head * DIM_P + p  # [1, B, 1]
    ring_B_at = ring_B_ptr + slot * ring_B_slot + group * STATES
    ring_dt_at = ring_dt_ptr + slot * ring_dt_slot + head
    for i in range(replay):
        place = (start - replay + i) % RING_SIZE
        x = tl.load(ring_x_at + place * (HEADS * DIM_P), mask=in_p, other=0.0)  # [1, B, 1]
        B = tl.load(ring_B_at + place * (GROUPS * STATES) + column, mask=in_n, other=0.0)  # [J, 1, L]
        dt = tl.load(ring_dt_at + place * HEADS)
        S = taken_in(S, x.to(tl.float32), dt, A, B.to(tl.float32))
    owns_group = (block == 0) & (head % (HEADS // GROUPS) == 0)
    for token in range(tokens):
        at = first + token
        x = tl.load(x_ptr + (at * x_token + head * x_head) + p, mask=in_p, other=0.0)  # [1, B, 1]
        B = tl.load(B_ptr + (at * B_token + group * B_group) + column, mask=in_n, other=0.0)  # [J, 1, L]
        C = tl.load(C_ptr + (at * C_token + group * C_group) + column, mask=in_n, other=0.0)  # [J, 1, L]
        dt = tl.load(dt_ptr + at * dt_token + head * dt_head)
        S = taken_in(S, x.to(tl.float32), dt, A, B.to(tl.float32))
        y = times(S, C.to(tl.float32))  # [1, B, 1]
        if HAS_D:
            y += tl.load(D_ptr + head).to(tl.float32) * x.to(tl.float32)
        tl.store(out_ptr + (at * HEADS + head) * DIM_P + p, y.to(out_ptr.dtype.element_ty), mask=in_p)
        if token == num_new - 1:
            tl.store(state_at, S, mask=in_n & in_p)
        if token >= num_new:
            ring_place = (start + token) % RING_SIZE
            tl.store(ring_x_at + ring_place * (HEADS * DIM_P), x, mask=in_p)
            in_ring = column < tl.where(owns_group, STATES, 0)
            tl.store(ring_B_at + ring_place * (GROUPS * STATES) + column, B, mask=in_ring)
            tl.store(ring_dt_at + ring_place * HEADS, dt, mask=block == 0)


def launch_ssd(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor | None,
    state: torch.Tensor, ring: ScanRing, rows: StateRows, out: torch.Tensor, most_tokens: int,
    tiling: StateTiling | None = None,
) -> None:  # fmt: skip
    """The rows with up to `most_tokens` tokens, into out [T, H, P], see `ssd_scan`; zeros for tokens of no row."""
    _, heads, dim_p = x.shape
    groups, states = B.shape[1:]
    tiles = state_tiling(heads * len(rows.slots), dim_p, states) if tiling is None else tiling
    check_launch(rows, state, ring, x=x, B=B, dt=dt)
    x, B, C = (inner_rows(each) for each in (x, B, C))
    _ssd_kernel[(triton.cdiv(dim_p, tiles.block), heads, len(rows.slots) + 1)](
        x, dt, A, B, C, x if D is None else D, out, state, ring.x, ring.B, ring.dt, rows.query_start_loc, rows.slots,
        rows.start, rows.replay, rows.num_new, len(x), most_tokens, *x.stride()[:2], *dt.stride(), *B.stride()[:2],
        *C.stride()[:2], state.stride(0), ring.x.stride(0), ring.B.stride(0), ring.dt.stride(0),
        RING_SIZE=ring.x.shape[1], HEADS=heads, GROUPS=groups, DIM_P=dim_p, STATES=states,
        WIDTH=max(tiles.piece, triton.next_power_of_2(states)), PIECE=tiles.piece, BLOCK_P=tiles.block,
        HAS_D=D is not None, num_warps=tiles.warps, maxnreg=tiles.registers, **dependent_launch(x.device),
    )  # fmt: skip
