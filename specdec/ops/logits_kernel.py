"""Triton kernels' parts that read a row of logits, and the last step of a filter's search. Imported on CUDA only.

How the parts narrow the row down: `filters_kernel.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

from attention.kernels.launch import wait_for_predecessor
from attention.kernels.tiles import block_of, load_where, long_program_id, sum_where

LOG2E = constexpr(1.4426950408889634)


@triton.jit
def load_logits(ptr, mask):  # type: ignore[no-untyped-def]
    """float32; NaNs and masked logits count as -infinity."""
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
def store_columns(ptr, values):  # type: ignore[no-untyped-def]
    """The columns of `Filtered.stats`, or the numbers at STATE."""
    for column in tl.static_range(len(values)):
        tl.store(ptr + column, values[column])


@triton.jit
def is_kept(x, index, stats):  # type: ignore[no-untyped-def]
    """Whether filters other than min-p keep tokens [N] with logits x; stats as loaded."""
    _, threshold, first, _ = stats
    return (x > threshold) | ((x == threshold) & (index.to(tl.float32) >= first))


@triton.jit
def probability(x, index, stats, scale, floor):  # type: ignore[no-untyped-def]
    """p of tokens [N] with logits x; stats as loaded, of one row or of one row a token; floor: min_p."""
    w = weight(x, stats[0], scale)
    return tl.where(is_kept(x, index, stats) & (w >= floor), w, 0.0) / stats[3]


@triton.jit
def distance_from(x, peak):  # type: ignore[no-untyped-def]
    """Finite, so that it lies below a bound at infinity."""
    return tl.where(x == peak, 0.0, tl.minimum(peak - x, 3e38))


@triton.jit
def ordered(x, SHIFT: constexpr):  # type: ignore[no-untyped-def]
    """int32 in the order of float32 x, without the SHIFT lowest bits, which a narrower dtype does not have."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def unordered(key, SHIFT: constexpr):  # type: ignore[no-untyped-def]
    """The float32 of a key."""
    bits = (key << SHIFT) + tl.where(key < 0, (1 << SHIFT) - 1, 0)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def load_row(  # type: ignore[no-untyped-def]
    logits_ptr, peaks_ptr, index_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    row, per, row_stride, peak_stride,
):  # fmt: skip
    """Where a row of logits begins, its largest one, and temperature, top-k, top-p and min-p of its request.

    Everything that can be loaded at once is loaded at once: dependent loads take longer than these kernels compute. Of
    a greedy row only the parameters are, since the rest may be any number: where the kernels are built, all rows are
    greedy, and some launches may be missing before this one (`attention.kernels.launch`).

    index_ptr: the row's index into the logits; None: the row itself.
    """
    owner = row // per
    temperature, top_k = tl.load(temperature_ptr + owner), tl.load(top_k_ptr + owner)
    top_p, min_p = tl.load(top_p_ptr + owner), tl.load(min_p_ptr + owner)
    is_sampled, source = temperature != 0, row
    if index_ptr is not None:
        source = load_where(index_ptr + row, is_sampled)
    place = load_where(peaks_ptr + source * peak_stride, is_sampled)
    logits_ptr += source * row_stride
    return logits_ptr, load_logits(logits_ptr + place, is_sampled), temperature, top_k, top_p, min_p


EDGES = constexpr(14)
COLUMNS = constexpr(16)  # of a part's first sums: up to each edge | above the floor of min-p | of all
FLOOR, ALL = EDGES, constexpr(15)
STATE = constexpr(8)  # of a row's search: low | high | below | target | total | total above min-p's floor


@triton.jit
def search_state(ptr):  # type: ignore[no-untyped-def]
    """The numbers at STATE."""
    low, high, below = tl.load(ptr), tl.load(ptr + 1), tl.load(ptr + 2)
    return low, high, below, tl.load(ptr + 3), tl.load(ptr + 4), tl.load(ptr + 5)


@triton.jit
def counts_tokens(top_k, vocab):  # type: ignore[no-untyped-def]
    """Whether a row has top-k, so that its tokens are counted, not weighed, in the launches that narrow it down."""
    return (top_k > 0) & (top_k < vocab)


@triton.jit
def mass_target(total, top_p):  # type: ignore[no-untyped-def]
    """A token is kept if the tokens that are more probable have less mass than this."""
    return total - (1 - top_p) * total


@triton.jit
def _middle(low, high):  # type: ignore[no-untyped-def]
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    row, chunk, PART: constexpr, PARTS: constexpr, CAPACITY: constexpr, TILE: constexpr
):
    """Logits, their order and whether they count, of TILE tokens: as many of each part, listed ones or all."""
    logits_ptr, list_, bounds, vocab, shift = row
    counts, listed_ptr, used, parts = list_
    low, high, peak, least = bounds
    place = tl.arange(0, TILE)
    part, column = place // (TILE // PARTS), chunk * (TILE // PARTS) + place % (TILE // PARTS)
    if used:
        x = load_logits(listed_ptr + part * CAPACITY + column, (part < parts) & (column < CAPACITY))
        of_part = tl.broadcast_to(counts[:, None], (PARTS, TILE // PARTS))
        inside = column < tl.reshape(of_part, (TILE,))
        x = tl.where(inside, x, float("-inf"))
    else:
        index = part * PART + column
        inside = (column < PART) & (index < vocab)
        x = load_logits(logits_ptr + index, inside)
    distance = distance_from(x, peak)
    return x, ordered(x, shift), inside & (distance >= low) & (distance < high) & (x >= least)


@triton.jit
def _search(  # type: ignore[no-untyped-def]
    row, chunks, below, target, scale,
    COUNT: constexpr, PART: constexpr, PARTS: constexpr, CAPACITY: constexpr, TILE: constexpr,
):  # fmt: skip
    """The lowest kept logit of a row's tokens: where their count or mass, from `below` on, reaches target.

    Returns it with, for top-p, the first kept index among tokens of that logit and the mass of all that are kept.
    The first tile stays in registers.
    """
    logits_ptr, _list, bounds, vocab, shift = row
    peak = bounds[2]
    x, keys, inside = _tile(row, 0, PART, PARTS, CAPACITY, TILE)
    w = tl.where(inside, 1.0 if COUNT else weight(x, peak, scale), 0.0)
    key = tl.min(tl.where(inside, keys, 0x7FFFFFFF), 0)  # kept
    dropped = tl.max(tl.where(inside, keys, -0x7FFFFFFF), 0) + 1
    for chunk in range(1, chunks):
        x, keys_, inside_ = _tile(row, chunk, PART, PARTS, CAPACITY, TILE)
        key = tl.minimum(key, tl.min(tl.where(inside_, keys_, 0x7FFFFFFF), 0))
        dropped = tl.maximum(dropped, tl.max(tl.where(inside_, keys_, -0x7FFFFFFF), 0) + 1)
    while dropped > key + 1:
        middle = _middle(key, dropped)
        sums = tl.where(keys >= middle, w, 0.0)
        for chunk in range(1, chunks):
            x, keys_, inside_ = _tile(row, chunk, PART, PARTS, CAPACITY, TILE)
            sums += tl.where(inside_ & (keys_ >= middle), 1.0 if COUNT else weight(x, peak, scale), 0.0)
        reached = below + tl.sum(sums, 0) >= target
        key = tl.where(reached, middle, key)
        dropped = tl.where(reached, dropped, middle)
    threshold = unordered(key, shift)
    first, mass = tl.full((), 0, tl.int32), tl.full((), 0, tl.float32)
    if not COUNT:
        above = tl.where(keys > key, w, 0.0)
        equal = tl.where(inside & (keys == key), 1, 0)
        for chunk in range(1, chunks):
            x, keys_, inside_ = _tile(row, chunk, PART, PARTS, CAPACITY, TILE)
            above += tl.where(inside_ & (keys_ > key), weight(x, peak, scale), 0.0)
            equal += tl.where(inside_ & (keys_ == key), 1, 0)
        mass, ties = below + tl.sum(above, 0), tl.sum(equal, 0)
        each = weight(threshold, peak, scale)
        kept = tl.maximum(tl.ceil((target - mass) / tl.maximum(each, 1e-38)), 1.0)
        kept = tl.minimum(kept, ties.to(tl.float32)).to(tl.int32)
        mass += kept.to(tl.float32) * each
        if kept < ties:  # the lowest indices go: which part the first kept one is in, then where in it
            of_part = tl.sum(tl.reshape(equal, (PARTS, TILE // PARTS)), 1)
            passed = tl.cumsum(of_part, 0) <= ties - kept
            part = tl.sum(passed.to(tl.int32), 0)
            before = sum_where(of_part, passed)
            index = block_of(part, PART)
            of_index = ordered(load_logits(logits_ptr + index, index < vocab), shift)
            tied = ((index < vocab) & (of_index == key)).to(tl.int32)
            first = part * PART + tl.sum((before + tl.cumsum(tied, 0) <= ties - kept).to(tl.int32), 0)
    return threshold, first, mass


@triton.jit
def _stats(peak, threshold, first, mass, above_floor, floor, scale):  # type: ignore[no-untyped-def]
    """A row's result. Where min-p drops the lowest kept logit, only the logits that min-p keeps remain."""
    total = tl.where(weight(threshold, peak, scale) < floor, above_floor, mass)
    return peak, threshold, first.to(tl.float32), total


@triton.jit(do_not_specialize=["per"])
def settle_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [T, V]
    peaks_ptr,  # [T] int64
    index_ptr,  # [R] int64 or None
    temperature_ptr,  # [J] float32
    top_k_ptr,  # [J] int32
    top_p_ptr,  # [J] float32
    min_p_ptr,  # [J] float32
    sums_ptr,  # [R, parts, COLUMNS] float32, the first ones
    state_ptr,  # [2, R, STATE] float32
    counts_ptr,  # [R, parts] int32
    listed_ptr,  # [R, parts, CAPACITY] as the logits
    stats_ptr,  # [R, 4] float32
    zeros_ptr,  # [R] int32 or None
    vocab, parts, row_stride, peak_stride, stats_stride, per,
    SHIFT: constexpr, PART: constexpr, PARTS: constexpr, CAPACITY: constexpr, TILE: constexpr,
    DEPENDENT: constexpr,
):  # fmt: skip
    row = long_program_id(0)
    logits_ptr, peak, temperature, top_k, top_p, floor = load_row(
        logits_ptr, peaks_ptr, index_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, per, row_stride,
        peak_stride,
    )  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    if temperature == 0:
        return
    stats_ptr += row * stats_stride
    if zeros_ptr is not None:
        tl.store(zeros_ptr + row, 0)
    scale = LOG2E / temperature
    part = tl.arange(0, PARTS)
    least, first = tl.full((), float("-inf"), tl.float32), tl.full((), 0, tl.int32)
    counting = counts_tokens(top_k, vocab)
    if (top_p >= 1) & (counting == 0):
        of_part = sums_ptr + (row * parts + part) * COLUMNS
        above_floor = tl.sum(load_where(of_part + FLOOR, part < parts), 0)
        mass = tl.sum(load_where(of_part + ALL, part < parts), 0)
        store_columns(stats_ptr, _stats(peak, least, first, mass, above_floor, floor, scale))
        return
    state_ptr += row * STATE
    low, high, below, target, mass, above_floor = search_state(state_ptr)
    counts = load_where(counts_ptr + row * parts + part, part < parts)  # [PARTS]
    most = tl.max(counts, 0)
    used = most <= CAPACITY
    chunks = tl.cdiv(tl.where(used, most, PART), TILE // PARTS)
    list_ = (counts, listed_ptr + row * parts * CAPACITY, used, parts)
    if counting:
        tokens = (logits_ptr, list_, (low, high, peak, least), vocab, SHIFT)
        least = _search(tokens, chunks, 0.0, target, scale, True, PART, PARTS, CAPACITY, TILE)[0]
        tokens = (logits_ptr, list_, (low, high, peak, least), vocab, SHIFT)
        masses, above = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
        for chunk in range(chunks):
            x, _keys, inside = _tile(tokens, chunk, PART, PARTS, CAPACITY, TILE)
            w = tl.where(inside, weight(x, peak, scale), 0.0)
            masses += w
            above += tl.where(w >= floor, w, 0.0)
        mass, above_floor = tl.sum(masses, 0), tl.sum(above, 0)
        target = mass_target(mass, top_p)
    threshold = least
    if top_p < 1:
        tokens = (logits_ptr, list_, (low, high, peak, least), vocab, SHIFT)
        threshold, first, mass = _search(tokens, chunks, below, target, scale, False, PART, PARTS, CAPACITY, TILE)
    store_columns(stats_ptr, _stats(peak, threshold, first, mass, above_floor, floor, scale))
