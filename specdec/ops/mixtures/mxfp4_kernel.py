"""Experts in MXFP4. For few tokens in Gluon, Triton's language of layouts: a weight goes from memory through registers
into the product. For many all weights are dequantised into memory. Imported on CUDA only.

In the kernel for few, where each number lies is chosen so that nothing is exchanged between threads, and no program
waits for another warp. The sum of a product may take its columns in any order, so a thread unpacks the words that it
has read (a block of 32 numbers of a row) into the places where the tensor core takes its columns from, and reads the
same columns of x.

The numbers are described in `specdec.ops.mixtures.routed`. Source: NVIDIA's PTX ISA, "Matrix Fragments for
mma.m16n8k16 with floating point type", for which numbers a thread holds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language import constexpr

from attention.kernels.launch import dependent_launch
from specdec.ops.mixtures import Gating

_KEEP_NAN = constexpr(tl.PropagateNan.ALL)
"""NaN handling of a minimum or a maximum, as in torch."""


@triton.jit
def activated(gate, up, alpha, limit, CLAMPED: constexpr):  # type: ignore[no-untyped-def]
    """See `specdec.ops.mixtures.routed.activated`."""
    if CLAMPED:
        gate = tl.minimum(gate, limit, _KEEP_NAN)
        up = tl.minimum(tl.maximum(up, -limit, _KEEP_NAN), limit, _KEEP_NAN)
        found = (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))
    else:
        found = gate / (1.0 + tl.exp(-gate)) * up
    return found


_activated = gluon.jit(activated.fn)


@gluon.jit
def _placed(words, PLACE: constexpr):  # type: ignore[no-untyped-def]
    """Numbers PLACE and PLACE + 4 of every word where bfloat16 has its sign, exponent and mantissa: 2^-126 times them,
    the first in the low half."""
    if PLACE == 0:
        both = ((words << 6) & 0x01C001C0) | ((words << 12) & 0x80008000)
    elif PLACE == 1:
        both = ((words << 2) & 0x01C001C0) | ((words << 8) & 0x80008000)
    elif PLACE == 2:
        both = ((words >> 2) & 0x01C001C0) | ((words << 4) & 0x80008000)
    else:
        both = ((words >> 6) & 0x01C001C0) | (words & 0x80008000)
    return both


@gluon.jit
def _halves(both):  # type: ignore[no-untyped-def]
    """The two bfloat16 of every word, the low half first."""
    return both.to(gl.uint16).to(gl.bfloat16, bitcast=True), (both >> 16).to(gl.uint16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def _numbers(words, scale, PLACE: constexpr):  # type: ignore[no-untyped-def]
    """Numbers PLACE and PLACE + 4 of every word; exact: numbers of two bits are multiplied by powers of two."""
    low, high = _halves(_placed(words, PLACE))
    unit = gl.full(words.shape, 85070591730234615865843651857942052864.0, gl.bfloat16, layout=words.type.layout)
    return gl.join(low * unit * scale, high * unit * scale)


@gluon.jit
def _weights(words, scale, factor: constexpr):  # type: ignore[no-untyped-def]
    """words: [N, 4, 4], a row's blocks and words. Returns [N, 128] bfloat16 as a factor."""
    n0, n1 = _numbers(words, scale, 0), _numbers(words, scale, 1)
    n2, n3 = _numbers(words, scale, 2), _numbers(words, scale, 3)
    found = gl.join(gl.join(n0, n1), gl.join(n2, n3))  # row, block, word, which half, place % 2, place // 2
    return gl.convert_layout(gl.reshape(gl.permute(found, (0, 2, 5, 4, 1, 3)), (words.shape[0], 128)), factor)


@gluon.jit
def _columns(x, factor: constexpr, READY: constexpr):  # type: ignore[no-untyped-def]
    """x: [M, 4, 4, 4] uint32, a row's blocks, words of weights, and pairs of numbers: in order, or READY: numbers p and
    p + 4 next to each other. Returns [128, M] bfloat16 as a factor, with columns as `_weights` has them."""
    x = gl.reshape(x, (x.shape[0], 4, 4, 2, 2))
    if not READY:
        first, second = gl.split(gl.permute(x, (0, 1, 2, 4, 3)))
        x = gl.join((first & 0xFFFF) | (second << 16), (first >> 16) | (second & 0xFFFF0000))
    low, high = _halves(x)
    found = gl.permute(gl.join(low, high), (2, 3, 4, 1, 5, 0))  # row, block, word, place // 2, place % 2, which half
    return gl.convert_layout(gl.reshape(found, (128, x.shape[0])), factor)


@gluon.jit
def _read(words_ptr, scales_ptr, block, blocks, step):  # type: ignore[no-untyped-def]
    """Four blocks of every row: words [N, 4, 4] int32, scales [N, 4]; after the last zeros."""
    inside = gl.expand_dims(block + 4 * step < blocks, 0)
    words = gl.load(words_ptr + 16 * step, mask=gl.expand_dims(inside, 2), other=0)
    return words, gl.load(scales_ptr + 4 * step, mask=inside, other=0)


@gluon.jit
def _row_of(m, rows, GATED: constexpr, INTERLEAVED: constexpr, ROWS: constexpr):  # type: ignore[no-untyped-def]
    """Row of the matrix that is row m of a tile. GATED: eight rows of gate, then the same of up: a thread has both."""
    if GATED:
        row = gl.minimum(gl.program_id(0) * (ROWS // 2) + m // 16 * 8 + m % 8, rows - 1)
        second = m % 16 // 8
        found = 2 * row + second if INTERLEAVED else row + second * rows
    else:
        found = gl.minimum(gl.program_id(0) * ROWS + m, rows - 1)
    return found


@gluon.jit
def _gated(acc, alpha, limit, CLAMPED: constexpr, kind: constexpr):  # type: ignore[no-untyped-def]
    """See `specdec.ops.mixtures.routed.activated`. acc: [N, M]. Returns [N / 2, M], numbers p and p + 4 of eight side
    by side."""
    ROWS: constexpr = acc.shape[0]
    PAIRS: constexpr = acc.shape[1]
    both = gl.permute(gl.reshape(acc.to(kind).to(gl.float32), (ROWS // 16, 2, 8, PAIRS)), (0, 2, 3, 1))
    gate, up = gl.split(both)
    found = _activated(gate, up, alpha, limit, CLAMPED)
    found = gl.permute(gl.reshape(found, (ROWS // 16, 2, 4, PAIRS)), (0, 2, 1, 3))
    return gl.reshape(found, (ROWS // 2, PAIRS))


@gluon.jit
def _few_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # GATED: [T, I/2], else [P, I/2] in the order of the groups, as this kernel wrote it; int32 of two bfloat16
    stack_ptr,  # [E, O, I/8] int32
    scale_ptr,  # [E, O, I/32]
    bias_ptr,  # [E, O] contiguous
    index_ptr, order_ptr, offset_ptr, active_ptr,
    out_ptr,  # GATED: [P, rows] in the order of the groups, numbers p and p + 4 of eight side by side; else by pair
    top_k, rows, width, expert_stride, row_quads, scale_expert, scale_row, alpha, limit,
    GATED: constexpr, INTERLEAVED: constexpr, CLAMPED: constexpr, BIASED: constexpr,
    GROUPED: constexpr, PAIRS: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    """As `specdec.ops.mixtures.routed_kernel._routed_kernel`, whose arguments these are."""
    if DEPENDENT:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    ROWS: constexpr = 64  # of a tile, in which four warps lie one below the other
    mma: constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
    of_words: constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0]], [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]], [], [ROWS, 4, 4],
    )  # fmt: skip
    of_scales: constexpr = gl.SliceLayout(2, of_words)
    own_x: constexpr = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 1, 0], [0, 0, 2, 0]]
    of_x: constexpr = gl.DistributedLinearLayout(
        own_x if PAIRS == 8 else [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 1, 0], [0, 0, 2, 0], [8, 0, 0, 0]],
        [[0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        [[0, 0, 0, 0], [0, 0, 0, 0]], [], [PAIRS, 4, 4, 4],
    )  # fmt: skip
    x_2: constexpr = gl.SliceLayout(2, gl.SliceLayout(3, of_x))
    if GROUPED:
        expert = gl.load(active_ptr + gl.program_id(1))
        start = gl.load(offset_ptr + expert, mask=expert >= 0, other=0)
        end = gl.load(offset_ptr + expert + 1, mask=expert >= 0, other=0)
    else:  # the experts of one token
        expert = gl.load(index_ptr + gl.program_id(1)).to(gl.int32)
        start = gl.program_id(1)
        end = start + 1
    if expert < 0:
        return
    read = _row_of(gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_scales)), rows, GATED, INTERLEAVED, ROWS)
    block = gl.arange(0, 4, layout=gl.SliceLayout(0, of_scales))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, of_words)))
    at = gl.expand_dims((read * (4 * row_quads))[:, None] + 4 * block[None, :], 2) + gl.expand_dims(word[None, :], 0)
    words_ptr = stack_ptr + expert.to(gl.int64) * expert_stride + at
    scales_ptr = scale_ptr + expert.to(gl.int64) * scale_expert + (read * scale_row)[:, None] + block[None, :]
    own = gl.arange(0, PAIRS, layout=gl.SliceLayout(1, x_2))
    x_block = gl.arange(0, 4, layout=gl.SliceLayout(0, x_2))
    x_word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(3, of_x))))
    two = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, of_x))))
    in_row = gl.expand_dims(16 * x_block[None, :], 2) + gl.expand_dims(4 * x_word[None, :], 0)
    in_row = gl.expand_dims(in_row, 3) + gl.expand_dims(gl.expand_dims(two[None, :], 0), 0)
    x_inside = gl.expand_dims(gl.expand_dims(x_block[None, :], 2), 3)
    blocks = width // 32
    steps = (blocks + 3) // 4
    for first in range(start, end, PAIRS):
        real = first + own < end
        pair = gl.load(order_ptr + first + own, mask=real, other=0) if GROUPED else first + own
        source = gl.where(real, pair // top_k if GATED else first + own, 0).to(gl.int64)
        x_at = x_ptr + gl.expand_dims(gl.expand_dims((source * (width // 2))[:, None], 2), 3) + in_row
        there = gl.expand_dims(gl.expand_dims(real[:, None], 2), 3)
        acc = gl.zeros([ROWS, PAIRS], gl.float32, layout=mma)
        words_0, scales_0 = _read(words_ptr, scales_ptr, block, blocks, 0)
        words_1, scales_1 = _read(words_ptr, scales_ptr, block, blocks, 1)
        words_2, scales_2 = _read(words_ptr, scales_ptr, block, blocks, 2)
        words_3, scales_3 = _read(words_ptr, scales_ptr, block, blocks, 3)
        next_x = gl.load(x_at, mask=there & (x_inside < blocks), other=0)
        for base in range(0, steps, 4):
            for part in gl.static_range(4):  # so that no register is copied to where the next step finds it
                step = base + part
                words, x = words_0.to(gl.uint32, bitcast=True), next_x.to(gl.uint32, bitcast=True)
                scale = (scales_0.to(gl.uint16) << 7).to(gl.bfloat16, bitcast=True)
                scale = gl.expand_dims(scale, 2).broadcast_to(words.shape)
                words_0, scales_0 = words_1, scales_1
                words_1, scales_1 = words_2, scales_2
                words_2, scales_2 = words_3, scales_3
                words_3, scales_3 = _read(words_ptr, scales_ptr, block, blocks, step + 4)
                inside = there & (x_inside + 4 * (step + 1) < blocks)
                next_x = gl.load(x_at + 64 * (step + 1), mask=inside, other=0)
                left = _weights(words, scale, gl.DotOperandLayout(0, mma, 2))
                acc = mma_v2(left, _columns(x, gl.DotOperandLayout(1, mma, 2), not GATED), acc)
        kind: constexpr = out_ptr.dtype.element_ty
        if BIASED:
            row = _row_of(gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma)), rows, GATED, INTERLEAVED, ROWS)
            bias = gl.load(bias_ptr + expert.to(gl.int64) * (2 * rows if GATED else rows) + row)
            acc = acc + bias.to(gl.float32)[:, None]
        TILE: constexpr = ROWS // 2 if GATED else ROWS
        stored: constexpr = gl.BlockedLayout([8, 1], [TILE // 8, 256 // TILE], [1, 4], [0, 1])
        found = _gated(acc, alpha, limit, CLAMPED, kind) if GATED else acc
        found = gl.convert_layout(found.to(kind), stored)
        o = gl.program_id(0) * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, stored))
        place = first + gl.arange(0, PAIRS, layout=gl.SliceLayout(0, stored))
        to = gl.load(order_ptr + place, mask=place < end, other=0) if GROUPED and not GATED else place
        inside = (place < end)[None, :] & (o < rows)[:, None]
        gl.store(out_ptr + to.to(gl.int64)[None, :] * rows + o[:, None], found, mask=inside)


def few_mxfp4(pairs: int, experts: int, x: Tensor) -> bool:
    """Whether `launch_few` supports x and is faster: for gpt-oss-20b on an H200 up to 64 tokens.

    µs a layer at 1, 4, 8, 32, 64 tokens: 34, 81, 115, 173, 233; by tiles 85, 175, 231, 331, 338; read once 12, 41, 62,
    97, 100.
    """
    known = x.is_cuda and torch.version.hip is None and x.dtype == torch.bfloat16
    return known and pairs <= 8 * experts


def launch_few(
    x: Tensor,
    stack: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    sent: tuple[Tensor, Tensor, Tensor, Tensor],
    out: Tensor,
    gating: Gating,
    gated: bool,
    grouped: bool,
) -> None:
    """One of both launches of `specdec.ops.mixtures.routed_kernel.launch_routed`; the other must be this function, too.

    sent: index, order, offsets, active.
    """
    (tokens, top_k), rows, experts = sent[0].shape, out.shape[-1], len(stack)
    stack = stack.view(torch.int32)  # words of eight 4-bit weights
    grid = (triton.cdiv(rows, 32 if gated else 64), min(tokens * top_k, experts) if grouped else top_k)
    _few_kernel[grid](
        x.view(torch.int32), stack, scale, scale if bias is None else bias, *sent, out, top_k, rows, 8 * stack.shape[2],
        stack.stride(0), stack.stride(1) // 4, *scale.stride()[:2], gating.alpha, gating.limit or 0.0, GATED=gated,
        INTERLEAVED=gating.interleaved, CLAMPED=gating.limit is not None, BIASED=bias is not None, GROUPED=grouped,
        PAIRS=16 if tokens * top_k > 4 * experts else 8, num_warps=4, **dependent_launch(x.device),
    )  # fmt: skip


_BLOCKS = 128


@triton.jit
def unpacked(packed):  # type: ignore[no-untyped-def]
    """Numbers of four bits, low bits of int32, in float32: exponent and mantissa where float32 has them, then 2^126."""
    bits = ((packed & 7) << 22) | ((packed & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 85070591730234615865843651857942052864.0


@triton.jit
def _dequantise_kernel(  # type: ignore[no-untyped-def]
    packed_ptr,  # [E, rows, I/2] uint8
    exponent_ptr,  # [E, rows, I/32] uint8
    out_ptr,  # [E, rows, I], written
    blocks, rows, row_blocks, APART: constexpr, BLOCKS: constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    there = block < blocks
    packed = tl.load(packed_ptr + 16 * block[:, None] + tl.arange(0, 16)[None, :], mask=there[:, None], other=0)
    # An MXFP4 exponent has float32's bias of 127, so its byte in float32's exponent field is the scale; 0 gives 0.0.
    scale = (tl.load(exponent_ptr + block, mask=there, other=0).to(tl.int32) << 23).to(tl.float32, bitcast=True)
    packed = packed.to(tl.int32)
    values = tl.interleave(unpacked(packed), unpacked(packed >> 4)) * scale[:, None]
    to = block
    if APART:
        row = block // row_blocks % rows
        to += (row % 2 * (rows // 2) + row // 2 - row) * row_blocks
    place = out_ptr + 32 * to[:, None] + tl.arange(0, 32)[None, :]
    tl.store(place, values.to(out_ptr.dtype.element_ty), mask=there[:, None])


def launch_dequantise(stack: Tensor, scale: Tensor, dtype: torch.dtype, apart: bool = False) -> Tensor:
    """See `specdec.ops.mixtures.routed.dequantised_mxfp4`; of [E, O, I/2] and [E, O, I/32]; exponent 0 makes zeros.

    apart: rows 0, 2, 4, … of every expert come first, then the others.
    """
    stack, scale = stack.contiguous(), scale.contiguous()  # the kernel addresses blocks by one flat index
    out = torch.empty(*stack.shape[:-1], 2 * stack.shape[-1], dtype=dtype, device=stack.device)
    _dequantise_kernel[(triton.cdiv(scale.numel(), _BLOCKS),)](
        stack, scale, out, scale.numel(), *scale.shape[1:], APART=apart, BLOCKS=_BLOCKS
    )
    return out
