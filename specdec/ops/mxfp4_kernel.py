"""Weights in MXFP4 inside Triton kernels: unpacked for tensor cores, or multiplied where they were unpacked. Imported
on CUDA only, and by tests under the interpreter.

The numbers are described in `specdec.ops.routed`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _unpacked(packed):  # type: ignore[no-untyped-def]
    """Numbers of four bits, low bits of int32, in float32: exponent and mantissa where float32 has them, then 2^126."""
    bits = ((packed & 7) << 22) | ((packed & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 85070591730234615865843651857942052864.0


@triton.jit
def mxfp4_tile(  # type: ignore[no-untyped-def]
    packed_ptr, exponent_ptr, k, there, width, EVEN: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Columns k to k + WIDTH of a tile of rows [N, WIDTH] in float32; the pointers [N, 1] are those of the rows."""
    byte, block = tl.arange(0, WIDTH // 2), tl.arange(0, WIDTH // 32)
    if EVEN:
        packed = tl.load(packed_ptr + k // 2 + byte[None, :]).to(tl.int32)
        exponent = tl.load(exponent_ptr + k // 32 + block[None, :]).to(tl.int32)
    else:
        packed = tl.load(
            packed_ptr + k // 2 + byte[None, :], mask=there & (k + 2 * byte < width)[None, :], other=0
        ).to(tl.int32)  # fmt: skip
        exponent = tl.load(
            exponent_ptr + k // 32 + block[None, :], mask=there & (k + 32 * block < width)[None, :], other=0
        ).to(tl.int32)  # fmt: skip
    values = tl.interleave(_unpacked(packed), _unpacked(packed >> 4))
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    return tl.reshape(tl.reshape(values, (ROWS, WIDTH // 32, 32)) * scale[:, :, None], (ROWS, WIDTH))


@triton.jit
def _halves(words, PLACE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers PLACE and PLACE + 4 of every word, 2^-14 times themselves, in float32: both are moved at once to where
    float16 has its sign, exponent and mantissa."""
    if PLACE == 0:
        both = ((words << 9) & 0x0E000E00) | ((words << 12) & 0x80008000)
    elif PLACE == 1:
        both = ((words << 5) & 0x0E000E00) | ((words << 8) & 0x80008000)
    elif PLACE == 2:
        both = ((words << 1) & 0x0E000E00) | ((words << 4) & 0x80008000)
    else:
        both = ((words >> 3) & 0x0E000E00) | (words & 0x80008000)
    low = both.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, (both >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _word_products(  # type: ignore[no-untyped-def]
    words_ptr, exponent_ptr, x_ptr, other_ptr, k, width, COUNT: tl.constexpr, MASKED: tl.constexpr, TWO: tl.constexpr
):  # fmt: skip
    """Sums of eight products each, [N, COUNT] in float32, of columns from k on, with one vector, or with two.

    Pointers: [N, 1] of rows, and scalar ones of vectors.
    """
    at = k // 8 + tl.arange(0, COUNT)[None, :]
    block = k // 32 + tl.arange(0, COUNT // 4)[None, :]
    inside, other = 8 * at < width if MASKED else None, 0 if MASKED else None
    words = tl.load(words_ptr + at, mask=inside, other=other).to(tl.uint32, bitcast=True)
    exponents = tl.load(exponent_ptr + block, mask=32 * block < width if MASKED else None, other=other).to(tl.uint32)
    scale = (exponents << 23).to(tl.float32, bitcast=True) * 16384.0
    scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (words.shape[0], COUNT // 4, 4)), words.shape)
    sums = tl.zeros(words.shape, tl.float32)
    others = sums
    for place in tl.static_range(4):
        low, high = _halves(words, place)
        sums += low * tl.load(x_ptr + 8 * at + place, mask=inside, other=other).to(tl.float32)
        sums += high * tl.load(x_ptr + 8 * at + place + 4, mask=inside, other=other).to(tl.float32)
        if TWO:
            others += low * tl.load(other_ptr + 8 * at + place, mask=inside, other=other).to(tl.float32)
            others += high * tl.load(other_ptr + 8 * at + place + 4, mask=inside, other=other).to(tl.float32)
    return sums * scale, others * scale


@triton.jit
def few_products(  # type: ignore[no-untyped-def]
    words_ptr, exponent_ptr, x_ptr, other_ptr, width, ROWS: tl.constexpr, COUNT: tl.constexpr, EVEN: tl.constexpr,
    TWO: tl.constexpr,
):  # fmt: skip
    """Rows times one vector, or two: [N, 2] in float32. See `_word_products`."""
    sums = tl.zeros((ROWS, COUNT), tl.float32)
    others, whole = sums, width // (8 * COUNT) * (8 * COUNT)
    for k in range(0, whole, 8 * COUNT):
        one, two = _word_products(words_ptr, exponent_ptr, x_ptr, other_ptr, k, width, COUNT, False, TWO)
        sums += one
        others += two
    if not EVEN:
        one, two = _word_products(words_ptr, exponent_ptr, x_ptr, other_ptr, whole, width, COUNT, True, TWO)
        sums += one
        others += two
    first = tl.sum(sums, 1)
    return tl.join(first, tl.sum(others, 1) if TWO else first)
