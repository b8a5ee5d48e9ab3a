"""Pairs of tokens and experts by expert: few by one program, many by a launch that counts and one that places.

Imported on CUDA only, and by tests under the interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from attention.hf.padding import Padding
from attention.kernels.launch import CompiledAtOnce, dependent_launch, wait_for_predecessor

TILE = 128
"""Pairs of a tile."""
_ONE_PROGRAM = 4096
"""µs on an H200 at 8,192 and 16,384 pairs: one program 20 and 33, two launches 11 and 13."""
_PAIRS = 1024


@dataclass(frozen=True)
class Groups:
    """Pairs grouped by expert. order: [P] int32 pairs, sorted by expert. offsets: [E+1] int32, begin of each expert's
    pairs. active: [min(P, E)] int32 experts that have pairs, -1 after them.

    For many pairs also tiles: [2, N] int32, each tile's expert and first place in the order, and num_tiles: [1] int32,
    number of tiles in use, at most N. A tile has at most TILE pairs, all of one expert.
    """

    order: Tensor
    offsets: Tensor
    active: Tensor
    tiles: Tensor | None = None
    num_tiles: Tensor | None = None


@triton.jit
def _expert_of(index_ptr, slot_ptr, pair, num_pairs, num_experts, top_k, page_size):  # type: ignore[no-untyped-def]
    """The experts of pairs, and which pairs have one: a rehearsal may have anything there."""
    real = pair < num_pairs
    source = pair
    if slot_ptr is not None:
        slot = tl.load(slot_ptr + pair // top_k, mask=real, other=page_size)
        source = tl.where(slot < page_size, pair % top_k, pair)
    chosen = tl.load(index_ptr + source, mask=real, other=0)
    real = real & (chosen >= 0) & (chosen < num_experts)
    return tl.where(real, chosen, 0).to(tl.int32), real


@triton.jit(do_not_specialize=["num_pairs", "num_active"])
def _group_kernel(  # type: ignore[no-untyped-def]
    index_ptr,  # [P] int64, the expert of every pair
    slot_ptr,  # [T] int64, or None: pairs of tokens with slots below `page_size` take the experts of the first token
    count_ptr,  # [E], written
    order_ptr, offset_ptr, active_ptr,  # see `Groups`; written
    num_pairs, num_experts, num_active, top_k, page_size,
    PAIRS: constexpr, EXPERTS: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    expert = tl.arange(0, EXPERTS)
    there = expert < num_experts
    pair = tl.arange(0, PAIRS)
    tl.store(count_ptr + expert, 0, mask=there)
    tl.store(active_ptr + expert, -1, mask=expert < num_active)
    tl.debug_barrier()
    chosen, real = _expert_of(index_ptr, slot_ptr, pair, num_pairs, num_experts, top_k, page_size)
    # relaxed: the barriers around order the counts for this one program.
    rank = tl.atomic_add(count_ptr + chosen, 1, mask=real, sem="relaxed")
    tl.debug_barrier()
    count = tl.load(count_ptr + expert, mask=there, other=0)
    end = tl.cumsum(count, 0)
    tl.store(offset_ptr + expert, end - count, mask=expert <= num_experts)
    place = tl.cumsum((count > 0).to(tl.int32), 0) - 1
    tl.store(active_ptr + place, expert, mask=there & (count > 0))
    tl.debug_barrier()
    start = tl.load(offset_ptr + chosen, mask=real, other=0)
    tl.store(order_ptr + start + rank, pair, mask=real)


@triton.jit(do_not_specialize=["num_pairs"])
def _rank_kernel(  # type: ignore[no-untyped-def]
    index_ptr, slot_ptr,  # see `_group_kernel`
    count_ptr,  # [E] zeros, counted up
    rank_ptr,  # [P] int32, written: the pair's place among its expert's pairs
    num_pairs, num_experts, top_k, page_size, PAIRS: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    chosen, real = _expert_of(index_ptr, slot_ptr, pair, num_pairs, num_experts, top_k, page_size)
    tl.store(rank_ptr + pair, tl.atomic_add(count_ptr + chosen, 1, mask=real, sem="relaxed"), mask=real)


@triton.jit(do_not_specialize=["num_pairs", "num_active", "most_tiles"])
def _place_kernel(  # type: ignore[no-untyped-def]
    index_ptr, slot_ptr, count_ptr, rank_ptr,  # see `_rank_kernel`
    order_ptr, offset_ptr, active_ptr, tile_ptr, num_tiles_ptr,  # see `Groups`; written
    num_pairs, num_experts, num_active, most_tiles, top_k, page_size,
    PAIRS: constexpr, EXPERTS: constexpr, TILE: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    expert = tl.arange(0, EXPERTS)
    there = expert < num_experts
    count = tl.load(count_ptr + expert, mask=there, other=0)
    start = tl.cumsum(count, 0) - count
    tiles = (count + TILE - 1) // TILE
    first_tile = tl.cumsum(tiles, 0) - tiles
    if tl.program_id(0) == 0:
        tl.store(offset_ptr + expert, start, mask=expert <= num_experts)
        tl.store(num_tiles_ptr, tl.sum(tiles, 0))
        tl.store(active_ptr + expert, -1, mask=expert < num_active)
        tl.debug_barrier()
        active = tl.cumsum((count > 0).to(tl.int32), 0) - 1
        tl.store(active_ptr + active, expert, mask=there & (count > 0))
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    chosen, real = _expert_of(index_ptr, slot_ptr, pair, num_pairs, num_experts, top_k, page_size)
    rank = tl.load(rank_ptr + pair, mask=real, other=0)
    place = tl.gather(start, chosen, 0) + rank
    tl.store(order_ptr + place, pair, mask=real)
    tile = tl.gather(first_tile, chosen, 0) + rank // TILE
    begins = real & (rank % TILE == 0)
    tl.store(tile_ptr + tile, chosen, mask=begins)
    tl.store(tile_ptr + most_tiles + tile, place, mask=begins)


def group_pairs(index: Tensor, num_experts: int, padding: Padding | None = None, tiled: bool = False) -> Groups:
    """index: [T, k] int64, contiguous. tiled: make `tiles`, which many pairs always have.

    padding: slots [T] int64, and a page's size: tokens with slots below it are padding, and take the experts of the
    first token, whose weights are read anyway.
    """
    slots, page_size = padding or (None, 0)
    pairs, most = index.numel(), min(index.numel(), num_experts)
    groups = Groups(*(index.new_empty(n, dtype=torch.int32) for n in (pairs, num_experts + 1, most)))
    experts, dependent = triton.next_power_of_2(num_experts + 1), dependent_launch(index.device)
    with CompiledAtOnce():  # places in memory
        if tiled or pairs > _ONE_PROGRAM:
            return _grouped_by_many(index, slots, page_size, num_experts, groups)
        counts, size = index.new_empty(num_experts, dtype=torch.int32), max(triton.next_power_of_2(pairs), 16)
        _group_kernel[(1,)](
            index, slots, counts, groups.order, groups.offsets, groups.active, pairs, num_experts, most,
            index.shape[1], page_size, PAIRS=size, EXPERTS=experts, num_warps=min(max(size // 256, 4), 16), **dependent,
        )  # fmt: skip
    return groups


def _grouped_by_many(index: Tensor, slots: Tensor | None, page_size: int, num_experts: int, groups: Groups) -> Groups:
    pairs, most = index.numel(), len(groups.active)
    counts, ranks = index.new_zeros(num_experts, dtype=torch.int32), torch.empty_like(groups.order)
    tiles = index.new_empty(2, most + (pairs - most) // TILE, dtype=torch.int32)  # whole ones, and one of each expert
    num_tiles = index.new_empty(1, dtype=torch.int32)
    grid, shape, dependent = (triton.cdiv(pairs, _PAIRS),), (index.shape[1], page_size), dependent_launch(index.device)
    _rank_kernel[grid](index, slots, counts, ranks, pairs, num_experts, *shape, PAIRS=_PAIRS, **dependent)
    _place_kernel[grid](
        index, slots, counts, ranks, groups.order, groups.offsets, groups.active, tiles, num_tiles, pairs, num_experts,
        most, tiles.shape[1], *shape, PAIRS=_PAIRS, EXPERTS=triton.next_power_of_2(num_experts + 1), TILE=TILE,
        **dependent,
    )  # fmt: skip
    return replace(groups, tiles=tiles, num_tiles=num_tiles)
