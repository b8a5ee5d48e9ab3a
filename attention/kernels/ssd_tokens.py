"""Mamba2's scan, token by token: accepted drafts replayed, new tokens absorbed, drafts verified, in one launch.

A program holds BLOCK_P rows of the state of one head of one row in registers, reads and stores them once; as
`attention/kernels/delta_tokens.py`, in everything but what a token does to the state.

Letters in the kernel: B rows of the state (BLOCK_P of P), J · L its columns (N): see `attention/kernels/recurrent.py`.

Source: Dao, Gu, "Transformers are SSMs", arXiv 2405.21060, equation 1 with a scalar A. Imported on CUDA only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention.cache.state import SsdRing
from attention.kernels.pdl import dependent_launch, wait_for_predecessor
from attention.kernels.recurrent import check_launch, inner_rows, row_state, row_tokens, times
from attention.recurrence.rows import StateRows


@dataclass(frozen=True)
class SsdTiling:
    """Rows of the state a program holds, columns in a piece of it (L), its warps, and registers a thread."""

    block_p: int
    piece: int
    warps: int
    registers: int | None = None


def ssd_tiling(units: int, dim_p: int, states: int) -> SsdTiling:
    """The tiling for so many rows times heads: see `delta_tiling`."""
    width = triton.next_power_of_2(states)
    block = min(32 if units <= 256 else 64, triton.next_power_of_2(dim_p))
    return SsdTiling(block, min(32, width), 8 if width <= 128 else 16, 80 if width <= 128 else None)


@triton.jit
def taken_in(S, x, dt, A, B):  # type: ignore[no-untyped-def]
    """The state S [J, B, L] after a token: x [1, B, 1], B [J, 1, L] (or [P, 1], [1, N]), dt and A scalar; float32."""
    return S * tl.exp(dt * A) + (dt * x) * B


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
    query_start_loc_ptr,
    slots_ptr,
    start_ptr,
    replay_ptr,
    num_new_ptr,
    total_tokens,  # T
    most_tokens,  # of a row; longer ones are left to another launch
    x_token,
    x_head,
    dt_token,
    dt_head,
    B_token,
    B_group,
    C_token,
    C_group,
    state_slot,
    ring_x_slot,
    ring_B_slot,
    ring_dt_slot,
    RING_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM_P: tl.constexpr,
    STATES: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HAS_D: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_predecessor(DEPENDENT)
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = head // (HEADS // GROUPS)
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)[None, :, None]  # [1, B, 1]
    in_p = p < DIM_P
    if row == tl.num_programs(2) - 1:  # tokens of no row
        zeros = tl.zeros((1, BLOCK_P, 1), out_ptr.dtype.element_ty)
        end = tl.load(query_start_loc_ptr + row)
        padding_at = out_ptr + (end.to(tl.int64) * HEADS + head) * DIM_P + p
        for _ in range(total_tokens - end):
            tl.store(padding_at, zeros, mask=in_p)
            padding_at += HEADS * DIM_P
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
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    state: torch.Tensor,
    ring: SsdRing,
    rows: StateRows,
    out: torch.Tensor,
    most_tokens: int,
    tiling: SsdTiling | None = None,
) -> None:
    """Rows with up to `most_tokens` tokens, into out [T, H, P], and zeros for tokens of no row; other rows are left as
    they are. See `ssd_scan`."""
    _, heads, dim_p = x.shape
    groups, states = B.shape[1:]
    tiles = ssd_tiling(heads * len(rows.slots), dim_p, states) if tiling is None else tiling
    parts = {"state": state, "ring.x": ring.x, "ring.B": ring.B, "ring.dt": ring.dt}
    check_launch(rows, len(state), parts, {"x": (x, ring.x), "B": (B, ring.B), "dt": (dt, ring.dt)})
    x, B, C = (inner_rows(each) for each in (x, B, C))
    _ssd_kernel[(triton.cdiv(dim_p, tiles.block_p), heads, len(rows.slots) + 1)](
        x,
        dt,
        A,
        B,
        C,
        x if D is None else D,
        out,
        state,
        ring.x,
        ring.B,
        ring.dt,
        rows.query_start_loc,
        rows.slots,
        rows.start,
        rows.replay,
        rows.num_new,
        len(x),
        most_tokens,
        *x.stride()[:2],
        *dt.stride(),
        *B.stride()[:2],
        *C.stride()[:2],
        state.stride(0),
        ring.x.stride(0),
        ring.B.stride(0),
        ring.dt.stride(0),
        RING_SIZE=ring.x.shape[1],
        HEADS=heads,
        GROUPS=groups,
        DIM_P=dim_p,
        STATES=states,
        WIDTH=max(tiles.piece, triton.next_power_of_2(states)),
        PIECE=tiles.piece,
        BLOCK_P=tiles.block_p,
        HAS_D=D is not None,
        num_warps=tiles.warps,
        maxnreg=tiles.registers,
        **dependent_launch(x.device),
    )
