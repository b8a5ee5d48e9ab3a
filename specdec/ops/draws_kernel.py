"""Acceptance, resampling and drafts of sampled rows as Triton kernels. Imported on CUDA only.

A draw sums the weights of every part of a row, then finds the part, and in it the token, at which the cumulative sum
passes u·total: in two launches, or in the program that sums last. Weights are integers, so sums are exact whatever
their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from attention.kernels.launch import dependent_launch, wait_for_predecessor
from attention.kernels.tiles import at_most_last, block_of, ended, load_where, long_program_id, sum_where
from specdec.ops.filters_kernel import launch_filters
from specdec.ops.logits_kernel import LOG2E, load_logits, load_stats, probability

_PART = 2048
_WARPS = 4
_PICK_WARPS = 8
_UNIT = constexpr(2.0**52)  # of probabilities as integers: V of them stay below 2**63


@triton.jit
def _weights(p):  # type: ignore[no-untyped-def]
    return (p * _UNIT).to(tl.int64)


@triton.jit
def _target(total, uniform):  # type: ignore[no-untyped-def]
    """The place in a cumulative sum of integers at which to draw, below total."""
    # float64: totals reach 2**63, of which float32's 24 bits could address only every 2**39th place.
    return (uniform.to(tl.float64) * total.to(tl.float64)).to(tl.int64)


@triton.jit
def _head(proposal, row):  # type: ignore[no-untyped-def]
    """The head's logits and stats of a row's drafts, the map, whether q is the head's, and the strides of a draft."""
    logits_ptr, stats_ptr, inverse_ptr, sources_ptr, stride, step_stride, stats_stride, stats_step_stride = proposal
    source = tl.load(sources_ptr + row)
    from_ = tl.maximum(source, 0)
    logits_ptr += from_ * stride
    stats_ptr += from_ * stats_stride
    return logits_ptr, stats_ptr, inverse_ptr, source >= 0, step_stride, stats_step_stride


@triton.jit
def _next_weights(column, at, rejected, target, head, shape):  # type: ignore[no-untyped-def]
    """Weights of p and of max(p - q, 0) of tokens [N], int64, of the next token after `at` accepted drafts."""
    logits_ptr, index_ptr, stats_ptr, drafts_ptr, row_stride = target
    scale, floor, vocab = shape
    inside = column < vocab
    logits_ptr += tl.load(index_ptr + at) * row_stride
    x = load_logits(logits_ptr + column, inside)
    p = tl.where(inside, probability(x, column, load_stats(stats_ptr + at * 4), scale, floor), 0.0)
    draft = tl.load(drafts_ptr + at, mask=rejected, other=-1)
    q = tl.where(column == draft, 1.0, 0.0)
    if head is not None:
        head_logits_ptr, head_stats_ptr, inverse_ptr, drawn, step_stride, stats_step_stride = head
        if drawn & rejected:
            own = tl.load(inverse_ptr + column, mask=inside, other=-1)
            y = load_logits(head_logits_ptr + at * step_stride + own, own >= 0)
            stats = load_stats(head_stats_ptr + at * stats_step_stride)
            q = tl.where(own >= 0, probability(y, own, stats, scale, floor), 0.0)
    return _weights(p), _weights(tl.maximum(p - q, 0.0))


@triton.jit
def _accept_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [T, V]
    index_ptr,  # [J, N + 1] int64
    stats_ptr,  # [J * (N + 1), 4] float32
    temperature_ptr,  # [J] float32
    min_p_ptr,  # [J] float32
    num_drafts_ptr,  # [J] int64
    accept_uniform_ptr,  # [J, N] float32
    proposal,  # None, or pointers to the head's logits, their stats, the map and the sources, and strides
    packed_ptr,  # [J, 2 * N + 2] int64
    sums_ptr,  # [J, 2, parts] int64: of p | of max(p - q, 0)
    vocab, row_stride, accept_stride,
    N: constexpr, DRAFTS: constexpr, PART: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    """It loads inputs that the filters' kernels do not write before it waits for them."""
    row, part, parts = long_program_id(0), tl.program_id(1), tl.num_programs(1)
    temperature, floor = tl.load(temperature_ptr + row), tl.load(min_p_ptr + row)
    packed_ptr += row * (2 * N + 2)
    index_ptr += row * (N + 1)
    stats_ptr += row * (N + 1) * 4
    num_drafts = tl.load(num_drafts_ptr + row)
    place = tl.arange(0, DRAFTS)
    exists = place < tl.where(temperature != 0, tl.minimum(num_drafts, N), 0)
    drafts = load_where(packed_ptr + N + 2 + place, exists)  # [DRAFTS]
    x = load_logits(logits_ptr + load_where(index_ptr + place, exists) * row_stride + drafts, exists)
    uniform = load_where(accept_uniform_ptr + row * accept_stride + place, exists)
    head = None
    if proposal is not None:
        head = _head(proposal, row)
    if head is not None:
        head_logits_ptr, head_stats_ptr, inverse_ptr, drawn, step_stride, stats_step_stride = head
        known = exists & (place < tl.where(drawn, num_drafts, 0))
        step = tl.where(known, place, 0)
        own = tl.load(inverse_ptr + drafts, mask=known, other=-1)
        y = load_logits(head_logits_ptr + step * step_stride + own, own >= 0)
    wait_for_predecessor(DEPENDENT)
    if temperature == 0:
        return
    scale = LOG2E / temperature
    p = probability(x, drafts, load_stats(stats_ptr + tl.where(exists, place, 0) * 4), scale, floor)
    q = tl.full((DRAFTS,), 1.0, tl.float32)
    if head is not None:
        of_head = probability(y, own, load_stats(head_stats_ptr + step * stats_step_stride), scale, floor)
        q = tl.where(drawn, tl.where(own >= 0, of_head, 0.0), q)
    accepted = exists & (uniform * q < p)
    at = tl.minimum(tl.min(tl.where(accepted, DRAFTS, place), 0), N).to(tl.int64)
    if part == 0:
        tl.store(packed_ptr, at)
    target = (logits_ptr, index_ptr, stats_ptr, packed_ptr + N + 2, row_stride)
    column = block_of(part, PART)
    of_p, of_rest = _next_weights(column, at, at < num_drafts, target, head, (scale, floor, vocab))
    sums_ptr += row * 2 * parts + part
    tl.store(sums_ptr, tl.sum(of_p, 0))
    tl.store(sums_ptr + parts, tl.sum(of_rest, 0))


@triton.jit
def _pick_part(sums, uniform):  # type: ignore[no-untyped-def]
    """int64 sums [PARTS] of the parts -> the part in which a draw falls, and how far into its own sum."""
    place = _target(tl.sum(sums, 0), uniform)
    passed = tl.cumsum(sums, 0) <= place
    return tl.sum(passed.to(tl.int32), 0), place - sum_where(sums, passed)


@triton.jit
def _resample_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [T, V]
    index_ptr,  # [J, N + 1] int64
    stats_ptr,  # [J * (N + 1), 4] float32
    temperature_ptr,  # [J] float32
    min_p_ptr,  # [J] float32
    num_drafts_ptr,  # [J] int64
    next_uniform_ptr,  # [J, N + 1] float32
    proposal,  # see _accept_kernel
    packed_ptr,  # [J, 2 * N + 2] int64
    sums_ptr,  # [J, 2, parts] int64: of p | of max(p - q, 0)
    vocab, parts, row_stride, next_stride,
    N: constexpr, TOKENS: constexpr, PART: constexpr, PARTS: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    row = long_program_id(0)
    temperature, floor = tl.load(temperature_ptr + row), tl.load(min_p_ptr + row)
    num_drafts, column = tl.load(num_drafts_ptr + row), tl.arange(0, TOKENS)
    columns = tl.where(temperature != 0, N + 1, 0)
    uniforms = load_where(next_uniform_ptr + row * next_stride + column, column < columns)  # [TOKENS]
    wait_for_predecessor(DEPENDENT)
    if temperature == 0:
        return
    scale = LOG2E / temperature
    packed_ptr += row * (2 * N + 2)
    at = tl.load(packed_ptr)
    rejected = at < num_drafts
    part = tl.arange(0, PARTS)
    sums_ptr += row * 2 * parts
    of_rest = load_where(sums_ptr + parts + part, part < parts)
    usable = rejected & (tl.sum(of_rest, 0) > 0)
    sums = tl.where(usable, of_rest, load_where(sums_ptr + part, part < parts))
    part, place = _pick_part(sums, sum_where(uniforms, column == at))
    target = (logits_ptr, index_ptr + row * (N + 1), stats_ptr + row * (N + 1) * 4, packed_ptr + N + 2, row_stride)
    head = None
    if proposal is not None:
        head = _head(proposal, row)
    tokens = block_of(part, PART)
    of_p, of_rest = _next_weights(tokens, at, rejected, target, head, (scale, floor, vocab))
    token = part * PART + ended(tl.where(usable, of_rest, of_p), place)
    token = at_most_last(token, vocab)
    drafts = load_where(packed_ptr + N + 2 + column, column < N)
    tl.store(packed_ptr + 1 + column, tl.where(column == at, token, drafts), mask=column <= N)


@triton.jit
def _uniform_of_step(  # type: ignore[no-untyped-def]
    uniform_ptr, num_accepted_ptr, row, step, columns, stride, accepted_stride, is_sampled
):
    """0 for a greedy row, which may have no place in either."""
    at = step
    if num_accepted_ptr is not None:
        at += load_where(num_accepted_ptr + row * accepted_stride, is_sampled)
    return load_where(uniform_ptr + row * stride + tl.minimum(at, columns - 1), is_sampled)


@triton.jit
def _draft_weights(x, column, stats, temperature, min_p, vocab):  # type: ignore[no-untyped-def]
    """Weights int64 of tokens of the head's logits x."""
    return tl.where(column < vocab, _weights(probability(x, column, stats, LOG2E / temperature, min_p)), 0)


@triton.jit(do_not_specialize=["step", "accepted_stride"])
def _draft_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [R, V]
    ids_ptr,  # [R] int64
    temperature_ptr,  # [R] float32
    min_p_ptr,  # [R] float32
    uniform_ptr,  # [R, columns] float32
    num_accepted_ptr,  # [R] int64 or None
    drafts_ptr,  # [R] int64 or None
    target_ids_ptr,  # [V] int64 or None
    kept_accepted_ptr,  # [R] int64 or None
    stats_ptr,  # [R, 4] float32
    sums_ptr,  # [R, parts] int64
    done_ptr,  # [R] int32, parts that are summed: zeros
    step, columns, vocab, row_stride, ids_stride, uniform_stride, accepted_stride, drafts_stride, stats_stride,
    PART: constexpr, PARTS: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    """Sum the weights of one part of a row; the program that is done last draws the row's token.

    It loads inputs that the filters' kernels do not write before it waits for them.
    """
    row, part, parts = long_program_id(0), tl.program_id(1), tl.num_programs(1)
    temperature, min_p = tl.load(temperature_ptr + row), tl.load(min_p_ptr + row)
    logits_ptr += row * row_stride
    column = block_of(part, PART)
    x = load_logits(logits_ptr + column, column < tl.where(temperature != 0, vocab, 0))  # [PART]
    uniform = _uniform_of_step(
        uniform_ptr, num_accepted_ptr, row, step, columns, uniform_stride, accepted_stride, temperature != 0
    )
    wait_for_predecessor(DEPENDENT)
    if temperature == 0:
        return
    stats = load_stats(stats_ptr + row * stats_stride)
    tl.store(sums_ptr + row * parts + part, tl.sum(_draft_weights(x, column, stats, temperature, min_p, vocab), 0))
    # acq_rel: releases this program's sum, and acquires the others' for the program that is done last.
    if tl.atomic_add(done_ptr + row, 1, sem="acq_rel") < parts - 1:
        return
    each = tl.arange(0, PARTS)
    # .cg: from L2, because other multiprocessors wrote these and L1 caches are not coherent.
    sums = tl.load(sums_ptr + row * parts + each, mask=each < parts, other=0, cache_modifier=".cg")
    part, place = _pick_part(sums, uniform)
    column = block_of(part, PART)
    x = load_logits(logits_ptr + column, column < vocab)
    token = part * PART + ended(_draft_weights(x, column, stats, temperature, min_p, vocab), place)
    token = at_most_last(token, vocab)
    tl.store(ids_ptr + row * ids_stride, token)
    if drafts_ptr is not None:
        if target_ids_ptr is not None:
            token = tl.load(target_ids_ptr + token)
        tl.store(drafts_ptr + row * drafts_stride, token)
    if kept_accepted_ptr is not None:
        tl.store(kept_accepted_ptr + row, tl.load(num_accepted_ptr + row * accepted_stride))


def launch_drafts(
    logits: Tensor, ids: Tensor, parameters: tuple[Tensor, ...], uniform: Tensor, step: int,
    stats: Tensor, num_accepted: Tensor | None,
    places: tuple[Tensor | None, ...],
) -> None:  # fmt: skip
    """See `draw_drafts`; parameters: temperature, top_k, top_p, min_p [R]; stats [R, 4].

    places: the fields of a `DraftPlaces`.
    """
    copy, drafts, target_ids, kept_accepted = places
    (rows, vocab), options = logits.shape, dependent_launch(logits.device)
    place = {
        "step": step,
        "columns": uniform.shape[1],
        "ids_stride": ids.stride(0),
        "uniform_stride": uniform.stride(0),
        "accepted_stride": 0 if num_accepted is None else num_accepted.stride(0),
        "drafts_stride": 0 if drafts is None else drafts.stride(0),
    }
    sizes = {"vocab": vocab, "row_stride": logits.stride(0), "stats_stride": stats.stride(0)}
    done = ids.new_empty(rows, dtype=torch.int32)
    launch_filters(logits, ids, parameters, stats, None, copy, done)
    parts = triton.cdiv(vocab, _PART)
    _draft_kernel[(rows, parts)](
        logits, ids, parameters[0], parameters[3], uniform, num_accepted, drafts, target_ids, kept_accepted, stats,
        ids.new_empty(rows, parts), done, **place, **sizes, PART=_PART, PARTS=triton.next_power_of_2(parts),
        num_warps=_WARPS, **options,
    )  # fmt: skip


def launch_acceptance(
    logits: Tensor,
    inputs: tuple[Tensor, ...],
    accept_uniform: Tensor,
    next_uniform: Tensor,
    packed: Tensor,
    proposal: tuple[Tensor, ...] | None,
) -> None:
    """See `accept_drafts`.

    Args:
        inputs: index [J, n+1], stats [J * (n+1), 4], temperature [J], min_p [J], num_drafts [J].
        proposal: logits, stats, inverse and sources of a `Proposal`.
    """
    (rows, tokens), vocab, options = inputs[0].shape, logits.shape[1], dependent_launch(logits.device)
    parts = triton.cdiv(vocab, _PART)
    sums = packed.new_empty(rows, 2, parts)
    head = None if proposal is None else (*proposal, *proposal[0].stride()[:2], *proposal[1].stride()[:2])
    sizes = {"vocab": vocab, "row_stride": logits.stride(0), "N": tokens - 1, "PART": _PART}
    _accept_kernel[(rows, parts)](
        logits, *inputs, accept_uniform, head, packed, sums, **sizes, accept_stride=accept_uniform.stride(0),
        DRAFTS=triton.next_power_of_2(max(tokens - 1, 1)), num_warps=_WARPS, **options,
    )  # fmt: skip
    _resample_kernel[(rows,)](
        logits, *inputs, next_uniform, head, packed, sums, **sizes, parts=parts, next_stride=next_uniform.stride(0),
        TOKENS=triton.next_power_of_2(tokens), PARTS=triton.next_power_of_2(parts), num_warps=_PICK_WARPS, **options,
    )  # fmt: skip
