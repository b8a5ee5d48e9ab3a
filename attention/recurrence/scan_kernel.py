"""Mamba's selective scan token by token as a Triton kernel. Imported on CUDA only.

A program holds the states of BLOCK channels of one row in registers, reads and stores them once.

Letters in the kernel: C channels (BLOCK), N states of a channel (WIDTH, a power of two).

Source: Gu, Dao, "Mamba", arXiv 2312.00752, algorithm 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from attention.kernels.launch import dependent_launch, wait_for_predecessor
from attention.kernels.tiles import block_of, load_float, load_where
from attention.recurrence.kernel_rows import check_launch, facts_of_row, inner_rows, zero_padding
from attention.recurrence.state_rows import StateRows
from attention.recurrence.states import ScanRing

_BLOCK, _WARPS = 32, 4
"""Channels of a program: 8,192 channels are 256 programs a row, each thread has four states."""


@triton.jit
def taken_in(S, x, dt, A, B):  # type: ignore[no-untyped-def]
    """The state S [C, N] after a token, all float32: A [C, N], x, dt [C, 1], B [1, N].

    By fma, because the compiler could fuse either product with the sum, and in replayed tokens the other one.
    """
    return tl.fma(S, tl.exp(dt * A), (dt * x) * B)


@triton.jit(do_not_specialize=["total_tokens"])
def _scan_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, C]
    dt_ptr,  # [T, C] float32
    A_ptr,  # [C, N] contiguous float32
    B_ptr,  # [T, N]
    C_ptr,  # [T, N]
    D_ptr,  # [C], or any pointer
    out_ptr,  # [T, C] contiguous
    state_ptr,  # [slots, C, N] float32 or half precision
    ring_x_ptr,  # [slots, R, C]
    ring_B_ptr,  # [slots, R, N]
    ring_dt_ptr,  # [slots, R, C] float32
    query_start_loc_ptr, slots_ptr, start_ptr, replay_ptr, num_new_ptr,
    total_tokens,  # T
    x_token, dt_token, B_token, C_token,
    RING_SIZE: constexpr, CHANNELS: constexpr, STATES: constexpr, WIDTH: constexpr, BLOCK: constexpr,
    HAS_D: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    block, row = tl.program_id(0), tl.program_id(1)
    channel, n = block_of(block, BLOCK)[:, None], tl.arange(0, WIDTH)[None, :]  # [C, 1], [1, N]
    in_c, in_n = channel < CHANNELS, n < STATES
    if row == tl.num_programs(1) - 1:
        zero_padding(out_ptr + channel, query_start_loc_ptr + row, total_tokens, CHANNELS, in_c)
        return
    first, tokens, slot, start, replay, num_new = facts_of_row(
        query_start_loc_ptr, slots_ptr, start_ptr, replay_ptr, num_new_ptr, row
    )
    if tokens == 0:
        return
    state_at = state_ptr + (slot * CHANNELS + channel) * STATES + n  # [C, N]
    S = load_float(state_at, (n < tl.where(start > replay, STATES, 0)) & in_c)  # [C, N]
    A = load_where(A_ptr + channel * STATES + n, in_c & in_n)  # [C, N]
    ring_x_at, ring_dt_at, ring_B_at = ring_x_ptr + channel, ring_dt_ptr + channel, ring_B_ptr + n
    for i in range(replay):
        place = slot * RING_SIZE + (start - replay + i) % RING_SIZE
        x = load_where(ring_x_at + place * CHANNELS, in_c)  # [C, 1]
        dt = load_where(ring_dt_at + place * CHANNELS, in_c)  # [C, 1]
        B = load_where(ring_B_at + place * STATES, in_n)  # [1, N]
        S = taken_in(S, x.to(tl.float32), dt, A, B.to(tl.float32))
    x_at, dt_at = x_ptr + first * x_token + channel, dt_ptr + first * dt_token + channel  # [C, 1]
    B_at, C_at = B_ptr + first * B_token + n, C_ptr + first * C_token + n  # [1, N]
    out_at = out_ptr + first * CHANNELS + channel  # [C, 1]
    # The next token's inputs are on their way while this one's are used: a prompt is one long loop.
    next_x, next_dt = load_where(x_at, in_c), load_where(dt_at, in_c)
    next_B, next_C = load_where(B_at, in_n), load_where(C_at, in_n)
    for token in range(tokens):
        x, dt, B, C = next_x, next_dt, next_B, next_C
        x_at, dt_at, B_at, C_at = x_at + x_token, dt_at + dt_token, B_at + B_token, C_at + C_token
        more = token + 1 < tokens
        next_in_c, next_in_n = channel < tl.where(more, CHANNELS, 0), n < tl.where(more, STATES, 0)
        next_x, next_dt = load_where(x_at, next_in_c), load_where(dt_at, next_in_c)
        next_B, next_C = load_where(B_at, next_in_n), load_where(C_at, next_in_n)
        S = taken_in(S, x.to(tl.float32), dt, A, B.to(tl.float32))
        y = tl.sum(S * C.to(tl.float32), 1, keep_dims=True)  # [C, 1]
        if HAS_D:
            y += load_float(D_ptr + channel, in_c) * x.to(tl.float32)
        tl.store(out_at, y, mask=in_c)
        out_at += CHANNELS
        if token == num_new - 1:
            tl.store(state_at, S, mask=in_c & in_n)
        if token >= num_new:
            ring_place = slot * RING_SIZE + (start + token) % RING_SIZE
            tl.store(ring_x_at + ring_place * CHANNELS, x, mask=in_c)
            tl.store(ring_dt_at + ring_place * CHANNELS, dt, mask=in_c)
            tl.store(ring_B_at + ring_place * STATES, B, mask=n < tl.where(block == 0, STATES, 0))


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    state: Tensor, ring: ScanRing, rows: StateRows,
) -> Tensor:  # fmt: skip
    """The outputs of Mamba1's scan, [T, C] in float32; `state` and `ring` are written.

    Per token and channel: S = S exp(dt A) + dt x B; y = S · C + D x.

    Args:
        x: [T, C]; dt: float32 [T, C], after softplus; A: float32 [C, N], negative; B, C: [T, N]; D: [C] or None.
        state: [slots, C, N], of any float dtype; ring: has the same slots.
        rows: no row reaches beyond T. Outputs of tokens of no row, after the last one, are zeros.
    """
    (tokens, channels), states = x.shape, A.shape[1]
    check_launch(rows, state, ring, x=x, B=B, dt=dt)
    x, dt, B, C = (inner_rows(each) for each in (x, dt, B, C))
    out = torch.empty((tokens, channels), dtype=torch.float32, device=x.device)
    _scan_kernel[(triton.cdiv(channels, _BLOCK), len(rows.slots) + 1)](
        x, dt, inner_rows(A, 2), B, C, x if D is None else D, out, state, ring.x, ring.B, ring.dt, *rows.arrays, tokens,
        x.stride(0), dt.stride(0), B.stride(0), C.stride(0), RING_SIZE=ring.x.shape[1], CHANNELS=channels,
        STATES=states, WIDTH=triton.next_power_of_2(states), BLOCK=_BLOCK, HAS_D=D is not None, num_warps=_WARPS,
        **dependent_launch(x.device),
    )  # fmt: skip
    return out
