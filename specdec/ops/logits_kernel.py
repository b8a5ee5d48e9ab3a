"""A row of logits in Triton kernels: how one is read, weighed and ordered, and what filters leave of it.

Imported on CUDA only."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_logits(ptr, mask):  # type: ignore[no-untyped-def]
    """float32; a NaN counts as -infinity, and so does what is masked."""
    x = tl.load(ptr, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def weight(x, peak, scale):  # type: ignore[no-untyped-def]
    """exp((x - peak) / temperature); scale: log2(e) / temperature."""
    return tl.where(x == peak, 1.0, tl.exp2((x - peak) * scale))


@triton.jit
def load_stats(ptr):  # type: ignore[no-untyped-def]
    """The columns of `Filtered.stats` at ptr, a pointer or several."""
    return tl.load(ptr), tl.load(ptr + 1), tl.load(ptr + 2), tl.load(ptr + 3)


@triton.jit
def store_stats(ptr, stats):  # type: ignore[no-untyped-def]
    """The columns of `Filtered.stats`."""
    for column in tl.static_range(4):
        tl.store(ptr + column, stats[column])


@triton.jit
def probability(x, index, stats, scale, floor):  # type: ignore[no-untyped-def]
    """p of tokens [N] with logits x; stats as loaded, of one row or of one row a token; floor: min_p."""
    peak, threshold, first, total = stats
    w = weight(x, peak, scale)
    kept = (x > threshold) | ((x == threshold) & (index.to(tl.float32) >= first))
    return tl.where(kept & (w >= floor), w, 0.0) / total


@triton.jit
def distance_from(x, peak):  # type: ignore[no-untyped-def]
    """Finite, so that it lies below a bound at infinity."""
    return tl.where(x == peak, 0.0, tl.minimum(peak - x, 3e38))


@triton.jit
def ordered(x, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32 in the order of float32 x, without the SHIFT lowest bits, which a narrower dtype does not have."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def unordered(key, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The float32 of a key."""
    bits = (key << SHIFT) + tl.where(key < 0, (1 << SHIFT) - 1, 0)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def load_row(  # type: ignore[no-untyped-def]
    logits_ptr,
    peaks_ptr,
    index_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    row,
    per,
    row_stride,
    peak_stride,
):
    """Where a row of logits begins, its largest one, and temperature, top-k, top-p and min-p of its request.

    All that can be loaded at once is: what is loaded one after the other takes longer than these kernels compute. Of a
    greedy row only the parameters are, since the rest may be any number: where the kernels are built, all rows are
    greedy, and some launches may be missing before this one (`attention.kernels.together`).

    index_ptr: which row of the logits it is; None: the row itself.
    """
    owner = row // per
    temperature, top_k = tl.load(temperature_ptr + owner), tl.load(top_k_ptr + owner)
    top_p, min_p = tl.load(top_p_ptr + owner), tl.load(min_p_ptr + owner)
    is_sampled, source = temperature != 0, row
    if index_ptr is not None:
        source = tl.load(index_ptr + row, mask=is_sampled, other=0)
    place = tl.load(peaks_ptr + source * peak_stride, mask=is_sampled, other=0)
    logits_ptr += source * row_stride
    return logits_ptr, load_logits(logits_ptr + place, is_sampled), temperature, top_k, top_p, min_p
