"""A Triton kernel for recurrent layers' short causal convolution with silu, which also keeps the ring of last inputs.

A token needs its k - 1 predecessors. They are among the launch's tokens, or, before a row's first token, in the row's
ring: position p at p mod R. A rejected draft's input lies where the next launch writes the token that takes its
position, so a rollback only needs `start`. The programs of a row's first tokens read the ring, then they alone write
it; so a prompt of any length is one launch. Imported on CUDA only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from attention.errors import InvalidInputError
from attention.kernels.launch import dependent_launch, wait_for_predecessor
from attention.kernels.tiles import block_of, load_float, load_where
from attention.recurrence.kernel_rows import check_launch, inner_rows, row_of_block, row_tokens, zero_padding
from attention.recurrence.state_rows import StateRows

_WARPS = 4
_SHORT, _LONG = (8, 128), (32, 128)
"""Tokens and channels of a program: if all rows have at most this many tokens, and otherwise."""


# Not specialised: Triton would compile variants for 1 and for multiples of 16, in the middle of serving.
@triton.jit(do_not_specialize=["rows", "total_tokens"])
def _conv_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, C]
    weight_ptr,  # [C, k] contiguous
    bias_ptr,  # [C], or any pointer
    ring_ptr,  # [slots, R, C]
    out_ptr,  # [T, C] contiguous
    query_start_loc_ptr, slots_ptr, start_ptr,
    rows,
    total_tokens,  # T
    x_token,
    CHANNELS: constexpr,
    TAPS: constexpr,  # k
    RING_SIZE: constexpr, RING_BLOCK: constexpr, HAS_BIAS: constexpr, SILU: constexpr,
    ONE_BLOCK: constexpr,  # every row fits into one block of tokens
    BLOCK_T: constexpr, BLOCK_C: constexpr, ROWS: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    channel = block_of(tl.program_id(1), BLOCK_C)[None, :]  # [1, C]
    inside = channel < CHANNELS
    if tl.program_id(0) == tl.num_programs(0) - 1:  # tokens of no row
        zero_padding(out_ptr + channel, query_start_loc_ptr + rows, total_tokens, CHANNELS, inside)
        return
    if ONE_BLOCK:
        row, block = tl.program_id(0), 0
    else:
        row, block = row_of_block(query_start_loc_ptr, rows, tl.program_id(0), BLOCK_T, ROWS)
        if row >= rows:
            return
    first, tokens = row_tokens(query_start_loc_ptr, row)
    if tokens == 0:
        return
    slot, start = tl.load(slots_ptr + row).to(tl.int64), tl.load(start_ptr + row)
    offset = block_of(block, BLOCK_T)[:, None]  # [B, 1] of the row's tokens
    x_at = x_ptr + first * x_token + channel  # [1, C]
    ring_at = ring_ptr + slot * (RING_SIZE * CHANNELS) + channel  # [1, C]
    own = (offset < tokens) & inside  # [B, C]
    total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for tap in tl.static_range(TAPS):
        source = offset + (tap - TAPS + 1)  # [B, 1] of the row's tokens; below 0 in the ring
        x = load_where(x_at + source.to(tl.int64) * x_token, own & (source >= 0))  # [B, C]
        weight = load_float(weight_ptr + channel * TAPS + tap, inside)
        total += x.to(tl.float32) * weight
        if tap < TAPS - 1:
            position = start + source  # [B, 1]; nothing is before position 0
            in_ring = (source < 0) & (position >= 0) & own  # [B, C]
            place = tl.maximum(position, 0) % RING_SIZE
            x = load_where(ring_at + place * CHANNELS, in_ring)  # [B, C]
            total += x.to(tl.float32) * weight
    if HAS_BIAS:
        total += load_float(bias_ptr + channel, inside)
    dtype: constexpr = out_ptr.dtype.element_ty
    if SILU:
        rounded = total.to(dtype).to(tl.float32)  # as torch, which has it in memory between the two
        total = rounded / (1 + tl.exp(-rounded))
    tl.store(out_ptr + (first + offset) * CHANNELS + channel, total.to(dtype), mask=own)
    if block == 0:
        tl.debug_barrier()  # every thread has read the ring before one of them writes it
        behind = tl.arange(0, RING_BLOCK)[:, None]  # [R, 1] tokens before the last one
        last = tokens - 1 - behind  # [R, 1]
        keep = (behind < RING_SIZE) & (last >= 0) & inside  # [R, C]
        kept = load_where(x_at + last.to(tl.int64) * x_token, keep)  # [R, C]
        tl.store(ring_at + (start + tl.maximum(last, 0)) % RING_SIZE * CHANNELS, kept, mask=keep)


def short_conv(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, ring: Tensor, rows: StateRows) -> Tensor:
    """Causal convolution of every channel over a row's positions: [T, C] in x's dtype; `ring` is written.

    Args:
        x: [T, C]; weight: [C, k], tap k - 1 is the token's own; bias: [C].
        silu: apply it to the result.
        ring: [slots, R, C] in x's dtype, R at least k - 1 plus the row's most drafts plus 1.
        rows: no row reaches beyond T. Outputs of tokens of no row, after the last one, are zeros.

    Raises:
        InvalidInputError: the ring has another dtype than x: rounding there would change a later token; or too many
            taps.
    """
    taps, (tokens, channels), size = weight.shape[1], x.shape, ring.shape[1]
    if ring.dtype != x.dtype:
        raise InvalidInputError(f"inputs in {x.dtype} and a ring in {ring.dtype}: give the ring the inputs' dtype")
    if taps - 1 > _LONG[0]:  # only the first block of a row's tokens may reach before them
        raise InvalidInputError(f"{taps} taps: at most {_LONG[0] + 1} can be served")
    check_launch(rows, ring)
    x, weight = inner_rows(x), inner_rows(weight, 2)
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    one_block = rows.max_query_len <= _SHORT[0]
    block_t, block_c = _SHORT if one_block else _LONG
    count = len(rows.slots)
    _conv_kernel[(1 + count + (0 if one_block else tokens // block_t), triton.cdiv(channels, block_c))](
        x, weight, x if bias is None else bias, ring, out, rows.query_start_loc, rows.slots, rows.start, count, tokens,
        x.stride(0), CHANNELS=channels, TAPS=taps, RING_SIZE=size,
        RING_BLOCK=triton.next_power_of_2(size), HAS_BIAS=bias is not None, SILU=silu, ONE_BLOCK=one_block,
        BLOCK_T=block_t, BLOCK_C=block_c, ROWS=triton.next_power_of_2(count), num_warps=_WARPS,
        **dependent_launch(x.device),
    )  # fmt: skip
    return out
