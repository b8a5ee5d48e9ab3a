"""Filters of sampled rows as Triton kernels. Imported on CUDA only.

A filter is a search for the lowest kept logit: top-k for the one at which the count of tokens reaches k, top-p for the
one at which the mass reaches p of the total. Two launches over parts of every row narrow it down by its distance from
the largest: the first has edges that grow with the distance, the second divides the interval found. A third lists the
tokens in what remains, and the last, one program a row, searches the list bit by bit of the ordered logit. A list that
is too long for its place is not used: that program then reads the whole row.

A row with top-k is narrowed by top-k alone, and everything above is listed too: top-p's search is then in the list.
min-p needs no search: it keeps an upper set of its own, and what is kept in the end is the smaller of two upper sets.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.kernels.pdl import dependent_launch, wait_for_predecessor

_PART = 2048
_SUMS_TILE = 128  # tokens of a part that are summed at once: one a thread, or Triton moves them between threads
_SUMS_WARPS = 4
_LIST_WARPS = 4
_LISTED = 4  # a part's list has room for one in so many tokens
_SHARE = 256  # tokens of one part in a tile of the last search
_TILE = 8192  # at most
_PROGRAMS = 2048  # from so many on, a program has several parts


_COLUMNS = tl.constexpr(16)  # of a part's sums: up to each edge | above the floor of min-p | of all
_EDGES = tl.constexpr(14)
_FLOOR = tl.constexpr(14)
_ALL = tl.constexpr(15)
_STATE = tl.constexpr(8)  # of a row's search: low | high | below | target | total | total above min-p's floor
_REACH = tl.constexpr(128.0)  # top-k's first edges lie within this distance
_SHIFT = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
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
def probability(x, index, stats, scale, floor):  # type: ignore[no-untyped-def]
    """p of tokens [N] with logits x; stats as loaded, of one row or of one row a token; floor: min_p."""
    peak, threshold, first, total = stats
    w = weight(x, peak, scale)
    kept = (x > threshold) | ((x == threshold) & (index.to(tl.float32) >= first))
    return tl.where(kept & (w >= floor), w, 0.0) / total


@triton.jit
def _distance(x, peak):  # type: ignore[no-untyped-def]
    """Finite, so that it lies below a bound at infinity."""
    return tl.where(x == peak, 0.0, tl.minimum(peak - x, 3e38))


@triton.jit
def _ordered(x, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32 in the order of float32 x, without the SHIFT lowest bits, which a narrower dtype does not have."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def _unordered(key, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The float32 of a key."""
    bits = (key << SHIFT) + tl.where(key < 0, (1 << SHIFT) - 1, 0)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):  # type: ignore[no-untyped-def]
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def _mass_target(total, top_p):  # type: ignore[no-untyped-def]
    """A token is kept as long as what is more probable than it has less mass than this."""
    return total - (1 - top_p) * total


@triton.jit
def _counts(top_k, vocab):  # type: ignore[no-untyped-def]
    """Whether a row has top-k, so that its tokens are counted, not weighed, in the launches that narrow it down."""
    return (top_k > 0) & (top_k < vocab)


@triton.jit
def _parameters(temperature_ptr, top_k_ptr, top_p_ptr, owner):  # type: ignore[no-untyped-def]
    """Temperature, top-k and top-p of a request."""
    return tl.load(temperature_ptr + owner), tl.load(top_k_ptr + owner), tl.load(top_p_ptr + owner)


@triton.jit
def _source(logits_ptr, index_ptr, row, row_stride):  # type: ignore[no-untyped-def]
    """Where the logits of a row begin: those of row index[row], or of the row itself where there is no index."""
    source = row
    if index_ptr is not None:
        source = tl.load(index_ptr + row)
    return logits_ptr + source * row_stride


@triton.jit
def _peak(logits_ptr, peaks_ptr, row, peak_stride):  # type: ignore[no-untyped-def]
    """The largest logit of a row; logits_ptr: where its logits begin."""
    return load_logits(logits_ptr + tl.load(peaks_ptr + row * peak_stride), True)


@triton.jit
def _narrowed(  # type: ignore[no-untyped-def]
    sums_ptr,  # [parts, _COLUMNS]
    edges_ptr,  # [_COLUMNS]
    state_ptr,  # [_STATE], of the level before
    parts,
    counting,
    top_k,
    top_p,
    LEVEL: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The interval [low, high) of distances with the lowest kept logit, after level LEVEL, and what lies below it.

    With it the target of the search and, of top-p's, the total mass and that above the floor of min-p.
    """
    part, column = tl.arange(0, PARTS)[:, None], tl.arange(0, _COLUMNS)[None, :]
    sums = tl.sum(tl.load(sums_ptr + part * _COLUMNS + column, mask=part < parts, other=0.0), 0)  # [_COLUMNS]
    column = tl.arange(0, _COLUMNS)
    edges = tl.load(edges_ptr + column, mask=column < _EDGES, other=0.0)
    if LEVEL == 0:
        low, high, below = 0.0, float("inf"), 0.0
        total = tl.sum(tl.where(column == _ALL, sums, 0.0), 0)
        above_floor = tl.sum(tl.where(column == _FLOOR, sums, 0.0), 0)
        target = tl.where(counting, top_k.to(tl.float32), _mass_target(total, top_p))
    else:
        low, high, below = tl.load(state_ptr), tl.load(state_ptr + 1), tl.load(state_ptr + 2)
        target, total, above_floor = tl.load(state_ptr + 3), tl.load(state_ptr + 4), tl.load(state_ptr + 5)
    short = (column < _EDGES) & (sums < target)
    low = tl.maximum(low, tl.max(tl.where(short, edges, 0.0), 0))
    below = tl.maximum(below, tl.max(tl.where(short, sums, 0.0), 0))
    high = tl.minimum(high, tl.min(tl.where((column < _EDGES) & (sums >= target), edges, float("inf")), 0))
    return low, high, below, target, total, above_floor


@triton.jit
def _remember(state_ptr, low, high, below, target, total, above_floor):  # type: ignore[no-untyped-def]
    tl.store(state_ptr, low)
    tl.store(state_ptr + 1, high)
    tl.store(state_ptr + 2, below)
    tl.store(state_ptr + 3, target)
    tl.store(state_ptr + 4, total)
    tl.store(state_ptr + 5, above_floor)


@triton.jit(do_not_specialize=["repeat", "per"])
def _sums_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [T, V]
    peaks_ptr,  # [R] int64
    index_ptr,  # [R] int64 or None
    temperature_ptr,  # [J] float32
    top_k_ptr,  # [J] int32
    top_p_ptr,  # [J] float32
    min_p_ptr,  # [J] float32
    sums_ptr,  # [2, R, parts, _COLUMNS] float32
    edges_ptr,  # [2, R, _COLUMNS] float32
    state_ptr,  # [2, R, _STATE] float32
    vocab,
    parts,
    repeat,  # parts of one program
    row_stride,
    peak_stride,
    per,
    LEVEL: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_predecessor(DEPENDENT)
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * repeat
    rows = tl.num_programs(0).to(tl.int64)
    owner = row // per
    temperature, top_k, top_p = _parameters(temperature_ptr, top_k_ptr, top_p_ptr, owner)
    counting = _counts(top_k, vocab)
    if (temperature == 0) | ((LEVEL > 0) & (top_p >= 1) & (counting == 0)):
        return
    logits_ptr = _source(logits_ptr, index_ptr, row, row_stride)
    peak = _peak(logits_ptr, peaks_ptr, row, peak_stride)
    scale, floor = LOG2E / temperature, tl.load(min_p_ptr + owner)
    column = tl.arange(0, _COLUMNS)
    if LEVEL == 0:
        # what lies farther has, all together, less than 1 - p of the mass: each has less than (1 - p) / V of the peak's
        reach = tl.where(counting, _REACH, temperature * tl.log(vocab / tl.maximum(1 - top_p, 1e-8)))
        fraction = (column + 1) / _EDGES
        edges = reach * fraction * fraction * fraction
    else:
        low, high, below, target, total, above_floor = _narrowed(
            sums_ptr + row * parts * _COLUMNS,
            edges_ptr + row * _COLUMNS,
            state_ptr,
            parts,
            counting,
            top_k,
            top_p,
            LEVEL - 1,
            PARTS,
        )
        if start == 0:
            _remember(state_ptr + (rows + row) * _STATE, low, high, below, target, total, above_floor)
        doubled, divided = low * tl.exp2(column + 1.0), low + (high - low) * ((column + 1) / (_EDGES + 1))
        edges = tl.where(high == float("inf"), doubled, divided)
    edges = tl.where(column < _EDGES, edges, float("inf"))
    at = LEVEL * rows + row
    if start == 0:
        tl.store(edges_ptr + at * _COLUMNS + column, edges)
    for part in range(start, tl.minimum(start + repeat, parts)):
        sums, above = tl.zeros((_COLUMNS, TILE), tl.float32), tl.zeros((TILE,), tl.float32)
        for tile in tl.static_range(PART // TILE):
            index = part * PART + tile * TILE + tl.arange(0, TILE)
            x = load_logits(logits_ptr + index, index < vocab)  # [TILE]
            w = tl.where(index < vocab, tl.where(counting, 1.0, weight(x, peak, scale)), 0.0)
            nearer = (_distance(x, peak)[None, :] < edges[:, None]).to(tl.float32)
            sums += nearer * w[None, :]
            if LEVEL == 0:
                above += tl.where(w >= floor, w, 0.0)
        of_part = tl.sum(sums, 1)
        if LEVEL == 0:
            of_part = tl.where(column == _FLOOR, tl.sum(above, 0), of_part)
        tl.store(sums_ptr + (at * parts + part) * _COLUMNS + column, of_part)


@triton.jit(do_not_specialize=["repeat", "per"])
def _list_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [T, V]
    peaks_ptr,  # [R] int64
    index_ptr,  # [R] int64 or None
    temperature_ptr,  # [J] float32
    top_k_ptr,  # [J] int32
    top_p_ptr,  # [J] float32
    sums_ptr,  # [2, R, parts, _COLUMNS] float32
    edges_ptr,  # [2, R, _COLUMNS] float32
    state_ptr,  # [2, R, _STATE] float32
    counts_ptr,  # [R, parts] int32
    listed_ptr,  # [R, parts, CAPACITY] int16, places in the part
    vocab,
    parts,
    repeat,  # parts of one program
    row_stride,
    peak_stride,
    per,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_predecessor(DEPENDENT)
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * repeat
    rows = tl.num_programs(0).to(tl.int64)
    owner = row // per
    temperature, top_k, top_p = _parameters(temperature_ptr, top_k_ptr, top_p_ptr, owner)
    counting = _counts(top_k, vocab)
    if (temperature == 0) | ((top_p >= 1) & (counting == 0)):
        return
    logits_ptr = _source(logits_ptr, index_ptr, row, row_stride)
    at = rows + row
    low, high, below, target, total, above_floor = _narrowed(
        sums_ptr + at * parts * _COLUMNS,
        edges_ptr + at * _COLUMNS,
        state_ptr + at * _STATE,
        parts,
        counting,
        top_k,
        top_p,
        1,
        PARTS,
    )
    low, below = tl.where(counting, 0.0, low), tl.where(counting, 0.0, below)
    if start == 0:
        _remember(state_ptr + row * _STATE, low, high, below, target, total, above_floor)
    peak = _peak(logits_ptr, peaks_ptr, row, peak_stride)
    place = tl.arange(0, PART)
    for part in range(start, tl.minimum(start + repeat, parts)):
        column = part * PART + place
        x = load_logits(logits_ptr + column, column < vocab)  # [PART]
        distance = _distance(x, peak)
        inside = ((column < vocab) & (distance >= low) & (distance < high)).to(tl.int32)
        to, list_ = tl.cumsum(inside, 0) - 1, row * parts + part
        tl.store(listed_ptr + list_ * CAPACITY + to, place.to(tl.int16), mask=(inside > 0) & (to < CAPACITY))
        tl.store(counts_ptr + list_, tl.sum(inside, 0))


@triton.jit
def _tile(row, chunk, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Logits, their order and whether they count, of TILE tokens: as many of each part, listed ones or all."""
    logits_ptr, list_, bounds, vocab, shift = row
    counts_ptr, listed_ptr, used, parts, PART, PARTS, CAPACITY = list_
    low, high, peak, least = bounds
    place = tl.arange(0, TILE)
    part, column = place // (TILE // PARTS), chunk * (TILE // PARTS) + place % (TILE // PARTS)
    index = part * PART + column
    inside = (column < PART) & (index < vocab)
    if used:
        inside = column < tl.load(counts_ptr + part, mask=part < parts, other=0)
        index = part * PART + tl.load(listed_ptr + part * CAPACITY + column, mask=inside, other=0).to(tl.int32)
    x = load_logits(logits_ptr + index, inside)
    distance = _distance(x, peak)
    return x, _ordered(x, shift), inside & (distance >= low) & (distance < high) & (x >= least)


@triton.jit
def _search(  # type: ignore[no-untyped-def]
    row, chunks, below, target, scale, COUNT: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr
):
    """The lowest kept logit of a row's tokens: where their count or mass, from `below` on, reaches target.

    Returns it with, for top-p, the first kept index among tokens of that logit and the mass of all that are kept.
    The first tile stays in registers.
    """
    logits_ptr, _list, bounds, vocab, shift = row
    peak = bounds[2]
    x, keys, inside = _tile(row, 0, TILE)
    w = tl.where(inside, 1.0 if COUNT else weight(x, peak, scale), 0.0)
    key = tl.min(tl.where(inside, keys, 0x7FFFFFFF), 0)  # kept
    dropped = tl.max(tl.where(inside, keys, -0x7FFFFFFF), 0) + 1
    for chunk in range(1, chunks):
        x, keys_, inside_ = _tile(row, chunk, TILE)
        key = tl.minimum(key, tl.min(tl.where(inside_, keys_, 0x7FFFFFFF), 0))
        dropped = tl.maximum(dropped, tl.max(tl.where(inside_, keys_, -0x7FFFFFFF), 0) + 1)
    while dropped > key + 1:
        middle = _middle(key, dropped)
        sums = tl.where(keys >= middle, w, 0.0)
        for chunk in range(1, chunks):
            x, keys_, inside_ = _tile(row, chunk, TILE)
            sums += tl.where(inside_ & (keys_ >= middle), 1.0 if COUNT else weight(x, peak, scale), 0.0)
        reached = below + tl.sum(sums, 0) >= target
        key = tl.where(reached, middle, key)
        dropped = tl.where(reached, dropped, middle)
    threshold = _unordered(key, shift)
    first, mass = tl.full((), 0, tl.int32), tl.full((), 0, tl.float32)
    if not COUNT:
        above = tl.where(keys > key, w, 0.0)
        equal = tl.where(inside & (keys == key), 1, 0)
        for chunk in range(1, chunks):
            x, keys_, inside_ = _tile(row, chunk, TILE)
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
            before = tl.sum(tl.where(passed, of_part, 0), 0)
            index = part * PART + tl.arange(0, PART)
            of_index = _ordered(load_logits(logits_ptr + index, index < vocab), shift)
            tied = ((index < vocab) & (of_index == key)).to(tl.int32)
            first = part * PART + tl.sum((before + tl.cumsum(tied, 0) <= ties - kept).to(tl.int32), 0)
    return threshold, first, mass


@triton.jit
def _stats(peak, threshold, first, mass, above_floor, floor, scale):  # type: ignore[no-untyped-def]
    """A row's result. Where min-p drops the lowest kept logit, what it keeps is all that is kept."""
    total = tl.where(weight(threshold, peak, scale) < floor, above_floor, mass)
    return peak, threshold, first.to(tl.float32), total


@triton.jit
def store_stats(ptr, stats):  # type: ignore[no-untyped-def]
    """The columns of `Filtered.stats`."""
    for column in tl.static_range(4):
        tl.store(ptr + column, stats[column])


@triton.jit(do_not_specialize=["per"])
def _settle_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [T, V]
    peaks_ptr,  # [R] int64
    index_ptr,  # [R] int64 or None
    temperature_ptr,  # [J] float32
    top_k_ptr,  # [J] int32
    top_p_ptr,  # [J] float32
    min_p_ptr,  # [J] float32
    sums_ptr,  # [2, R, parts, _COLUMNS] float32
    state_ptr,  # [2, R, _STATE] float32
    counts_ptr,  # [R, parts] int32
    listed_ptr,  # [R, parts, CAPACITY] int16
    stats_ptr,  # [R, 4] float32
    vocab,
    parts,
    row_stride,
    peak_stride,
    stats_stride,
    per,
    SHIFT: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_predecessor(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    owner = row // per
    temperature, top_k, top_p = _parameters(temperature_ptr, top_k_ptr, top_p_ptr, owner)
    floor = tl.load(min_p_ptr + owner)
    if temperature == 0:
        return
    logits_ptr = _source(logits_ptr, index_ptr, row, row_stride)
    stats_ptr += row * stats_stride
    peak = _peak(logits_ptr, peaks_ptr, row, peak_stride)
    scale = LOG2E / temperature
    part = tl.arange(0, PARTS)
    least, first = tl.full((), float("-inf"), tl.float32), tl.full((), 0, tl.int32)
    counting = _counts(top_k, vocab)
    if (top_p >= 1) & (counting == 0):
        of_part = sums_ptr + (row * parts + part) * _COLUMNS
        above_floor = tl.sum(tl.load(of_part + _FLOOR, mask=part < parts, other=0.0), 0)
        mass = tl.sum(tl.load(of_part + _ALL, mask=part < parts, other=0.0), 0)
        store_stats(stats_ptr, _stats(peak, least, first, mass, above_floor, floor, scale))
        return
    state_ptr += row * _STATE
    low, high, below = tl.load(state_ptr), tl.load(state_ptr + 1), tl.load(state_ptr + 2)
    target, mass, above_floor = tl.load(state_ptr + 3), tl.load(state_ptr + 4), tl.load(state_ptr + 5)
    most = tl.max(tl.load(counts_ptr + row * parts + part, mask=part < parts, other=0), 0)
    used = most <= CAPACITY
    chunks = tl.cdiv(tl.where(used, most, PART), TILE // PARTS)
    list_ = (counts_ptr + row * parts, listed_ptr + row * parts * CAPACITY, used, parts, PART, PARTS, CAPACITY)
    if counting:
        tokens = (logits_ptr, list_, (low, high, peak, least), vocab, SHIFT)
        least = _search(tokens, chunks, 0.0, target, scale, True, PART, PARTS, TILE)[0]
        tokens = (logits_ptr, list_, (low, high, peak, least), vocab, SHIFT)
        masses, above = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
        for chunk in range(chunks):
            x, _keys, inside = _tile(tokens, chunk, TILE)
            w = tl.where(inside, weight(x, peak, scale), 0.0)
            masses += w
            above += tl.where(w >= floor, w, 0.0)
        mass, above_floor = tl.sum(masses, 0), tl.sum(above, 0)
        target = _mass_target(mass, top_p)
    threshold = least
    if top_p < 1:
        tokens = (logits_ptr, list_, (low, high, peak, least), vocab, SHIFT)
        threshold, first, mass = _search(tokens, chunks, below, target, scale, False, PART, PARTS, TILE)
    store_stats(stats_ptr, _stats(peak, threshold, first, mass, above_floor, floor, scale))


def launch_filters(
    logits: torch.Tensor,
    peaks: torch.Tensor,
    parameters: tuple[torch.Tensor, ...],
    stats: torch.Tensor,
    index: torch.Tensor | None,
) -> None:
    """See `filter_rows`; parameters: temperature, top_k, top_p, min_p [J]; stats [R, 4]."""
    rows, vocab = len(stats), logits.shape[1]
    per, options = rows // len(parameters[0]), dependent_launch(logits.device)
    parts = triton.cdiv(vocab, _PART)
    inputs = (logits, peaks, index, *parameters)
    sizes = {
        "vocab": vocab,
        "parts": parts,
        "row_stride": logits.stride(0),
        "peak_stride": peaks.stride(0),
        "per": per,
        "PART": _PART,
        "PARTS": triton.next_power_of_2(parts),
    }
    state = stats.new_empty(2, rows, _STATE.value)
    sums, edges = stats.new_empty(2, rows, parts, _COLUMNS.value), stats.new_empty(2, rows, _COLUMNS.value)
    counts = stats.new_empty(rows, parts, dtype=torch.int32)
    listed = stats.new_empty(rows, parts, _PART // _LISTED, dtype=torch.int16)
    repeat = max(1, rows * parts // _PROGRAMS)  # what a program computes of a part does not depend on it
    grid = (rows, triton.cdiv(parts, repeat))
    for level in (0, 1):
        _sums_kernel[grid](
            *inputs, sums, edges, state, repeat=repeat, **sizes, LEVEL=level, TILE=_SUMS_TILE,
            num_warps=_SUMS_WARPS, **options,
        )  # fmt: skip
    _list_kernel[grid](
        *inputs[:-1], sums, edges, state, counts, listed, repeat=repeat, **sizes, CAPACITY=listed.shape[2],
        num_warps=_LIST_WARPS, **options,
    )  # fmt: skip
    tile = max(min(_SHARE * sizes["PARTS"], _TILE), sizes["PARTS"])
    _settle_kernel[(rows,)](
        *inputs, sums, state, counts, listed, stats, **sizes, stats_stride=stats.stride(0),
        SHIFT=_SHIFT[logits.dtype], CAPACITY=listed.shape[2], TILE=tile,
        num_warps=min(max(tile // 512, 4), 16), **options,
    )  # fmt: skip
