"""Triton kernels of greedy rows: arg max, drafts into a verification, acceptance. Imported on CUDA only.

Of a sampled row it can be the arg max of scores with noise that is keyed by position: that is the row's draw. It takes
two launches, over chunks of a row and then over chunks: torch's own keeps only few multiprocessors busy with few rows
(37 µs for 6 rows of 128,256 in bfloat16 on an H200).

Placing and acceptance read the drafts where the draft loop keeps them, in the order of the round before; in torch they
are `fill_drafts` and `judge_greedy` of `specdec/acceptance/judge.py`, a dozen launches. They are specialised on no
size, stride or alignment, which differ between rounds of any shape: each is compiled once, before the first round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from attention.kernels.launch import CompiledAtOnce, dependent_launch, wait_for_predecessor
from attention.kernels.tiles import block_of, load_where, long_program_id
from specdec.ops.logits_kernel import LOG2E, is_kept, load_logits, load_stats, weight

_PART = 4096
_SMALL = constexpr(2.0**-6)


@triton.jit
def _gumbel(seed, ids):  # type: ignore[no-untyped-def]
    """As `specdec.requests.noise.gumbel`."""
    x = seed.to(tl.uint64) + ids.to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    w = tl.maximum(((x ^ (x >> 31)) >> 1).to(tl.float32) * 2.0**-63, 2.0**-64)
    series = w * (1 + w * (1 / 2 + w * (1 / 3 + w * (1 / 4 + w * (1 / 5)))))  # 1 - w has too few bits of a small w
    return -tl.log(tl.where(w < _SMALL, series, -tl.log(1 - w)))


@triton.jit(do_not_specialize=["per", "first", "last", "seed_stride"])
def _parts_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [T, V]
    best_ptr,  # [R, chunks] float32
    place_ptr,  # [R, chunks] int32
    index_ptr,  # [R] int64 or None
    temperature_ptr,  # [J] float32, or None where all rows are greedy
    min_p_ptr,  # [J] float32
    stats_ptr,  # [R, 4] float32
    seeds_ptr,  # [J, columns] int64
    accepted_ptr,  # [J] int64 or None
    ids_ptr,  # [V] int64 or None
    per, first, last, seed_stride, vocab, row_stride,
    PART: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    row, part = long_program_id(0), tl.program_id(1)
    column = block_of(part, PART)  # [PART]
    inside = column < vocab
    source = row if index_ptr is None else tl.load(index_ptr + row)
    logits_ptr += source * row_stride + column
    x = tl.load(logits_ptr, mask=inside, other=float("-inf")).to(tl.float32)  # [PART]
    x = tl.where(x != x, float("inf"), x)  # torch's arg max takes a NaN for the largest
    if temperature_ptr is not None:
        owner, place = row // per, row % per + first
        temperature = tl.load(temperature_ptr + owner)
        if temperature != 0:
            stats = load_stats(stats_ptr + row * 4)
            x = load_logits(logits_ptr, inside)
            kept = inside & is_kept(x, column, stats)
            floor = tl.load(min_p_ptr + owner)
            if floor > 0:
                kept = kept & (weight(x, stats[0], LOG2E / temperature) >= floor)
            inverse = 1 / temperature  # one division a row: logarithms leave its unit no time for one a token
            scaled = tl.where(x == stats[0], 0.0, (x - stats[0]) * inverse)
            x = tl.where(kept, scaled, float("-inf"))
            if tl.max(x, 0) > float("-inf"):  # filters leave nothing of most parts, which need no noise
                ids = column if ids_ptr is None else load_where(ids_ptr + column, inside)
                if accepted_ptr is not None:
                    place += tl.load(accepted_ptr + owner)
                x += _gumbel(tl.load(seeds_ptr + owner * seed_stride + tl.minimum(place, last)), ids)
    # Of equal logits the lowest id, inside a part and among parts, so that the result does not depend on the parts.
    best, place = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    to = row * tl.num_programs(1) + part
    tl.store(best_ptr + to, best)
    tl.store(place_ptr + to, part * PART + place)


@triton.jit
def _best_kernel(  # type: ignore[no-untyped-def]
    best_ptr,  # [T, chunks] float32
    place_ptr,  # [T, chunks] int32
    out_ptr,  # [T] int64
    mapped_ptr,  # [T] int64 or None
    map_ptr,  # [V] int64 or None
    parts, mapped_stride,
    MOST_PARTS: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    row = long_program_id(0)
    part = tl.arange(0, MOST_PARTS)
    best = tl.load(best_ptr + row * parts + part, mask=part < parts, other=float("-inf"))  # [MOST_PARTS]
    _, first = tl.max(best, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(place_ptr + row * parts + first).to(tl.int64)
    tl.store(out_ptr + row, token)
    if mapped_ptr is not None:
        if map_ptr is not None:
            token = tl.load(map_ptr + token)
        tl.store(mapped_ptr + row * mapped_stride, token)


def launch_greedy(
    logits: Tensor,
    target_ids: Tensor | None = None,
    mapped: Tensor | None = None,
    noise: tuple[Tensor | None, ...] = (None,) * 6,
    step: int = 0,
    into: Tensor | None = None,
) -> Tensor:
    """logits [T >= 1, V], columns side by side -> [R] int64, R = T without an index; into: where they are written.

    mapped: [R] int64 of any stride, gets the same ids, or target_ids [V] of them. noise: an index [R] or None, and
        temperature [J], min_p [J], stats [R, 4], seeds [J, columns] and num_accepted [J] or None, see `draw_keyed`.
    """
    index, temperature, _, _, seeds, _ = noise
    rows, vocab = len(logits if index is None else index), logits.shape[1]
    per, last, seed_stride = 1, 0, 0
    if temperature is not None and seeds is not None:
        per, last, seed_stride = rows // len(temperature), seeds.shape[1] - 1, seeds.stride(0)
    parts, options = triton.cdiv(vocab, _PART), dependent_launch(logits.device)
    best = logits.new_empty(rows, parts, dtype=torch.float32)
    place = logits.new_empty(rows, parts, dtype=torch.int32)
    out = logits.new_empty(rows, dtype=torch.int64) if into is None else into
    with CompiledAtOnce():  # tokens are indices
        _parts_kernel[(rows, parts)](
            logits, best, place, *noise, target_ids, per, step, last, seed_stride, vocab, logits.stride(0), PART=_PART,
            num_warps=8, **options,
        )  # fmt: skip
        _best_kernel[(rows,)](
            best, place, out, mapped, target_ids, parts, 0 if mapped is None else mapped.stride(0),
            MOST_PARTS=triton.next_power_of_2(parts), num_warps=1, **options,
        )  # fmt: skip
    return out


_PLACES = 128
_LEAST_COLUMNS = 16
_PLACING = ["token_ids_ptr", "places_ptr", "flat_ptr", "drafts_ptr", "sources_ptr", "count", "width", "draft_stride"]
_ACCEPTANCE = [
    *("greedy_ptr", "index_ptr", "num_drafts_ptr", "drafts_ptr", "sources_ptr"),
    *("accepted_ptr", "tokens_ptr", "out_ptr"),
    *("width", "drafting", "draft_stride", "accepted_stride", "tokens_stride", "out_stride"),
]


@triton.jit(do_not_specialize=_PLACING)
def _placing_kernel(  # type: ignore[no-untyped-def]
    token_ids_ptr,  # [T] int64
    places_ptr,  # [N] int64
    flat_ptr,  # [N] int64
    drafts_ptr,  # [S, >= width] int64
    sources_ptr,  # [R] int64
    count, width, draft_stride,
    PLACES: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    i = block_of(tl.program_id(0), PLACES)  # [PLACES]
    inside = i < count
    flat = load_where(flat_ptr + i, inside)
    source = load_where(sources_ptr + flat // width, inside)
    drafts = load_where(drafts_ptr + source * draft_stride + flat % width, inside)
    tl.store(token_ids_ptr + load_where(places_ptr + i, inside), drafts, mask=inside)


@triton.jit(do_not_specialize=_ACCEPTANCE)
def _acceptance_kernel(  # type: ignore[no-untyped-def]
    greedy_ptr,  # [T] int64
    index_ptr,  # [J, width + 1] int64
    num_drafts_ptr,  # [J] int64
    drafts_ptr,  # [S, >= width] int64
    sources_ptr,  # [drafting] int64
    accepted_ptr,  # [J] int64
    tokens_ptr,  # [J, width + 1] int64
    out_ptr,  # [J, width] int64
    width, drafting, draft_stride, accepted_stride, tokens_stride, out_stride,
    COLUMNS: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    row = long_program_id(0)
    column = tl.arange(0, COLUMNS)  # [COLUMNS]
    inside = column <= width
    place = load_where(index_ptr + row * (width + 1) + column, inside)
    target = load_where(greedy_ptr + place, inside)
    source = load_where(sources_ptr + row, row < drafting)
    drafted = column < tl.where(row < drafting, width, 0)
    drafts = load_where(drafts_ptr + source * draft_stride + column, drafted)
    num_drafts = tl.minimum(tl.load(num_drafts_ptr + row), width)
    accepted = (drafts == target) & (column < num_drafts)
    at = tl.min(tl.where(accepted, COLUMNS, column), 0)  # at most `width`, whose column is never accepted
    tl.store(accepted_ptr + row * accepted_stride, at)
    tl.store(tokens_ptr + row * tokens_stride + column, tl.where(column == at, target, drafts), mask=inside)
    tl.store(out_ptr + row * out_stride + column, drafts, mask=column < width)


def launch_placing(
    token_ids: Tensor,
    places: Tensor,
    flat: Tensor,
    width: int,
    drafts: Tensor,
    sources: Tensor,
) -> None:
    """token_ids[places[i]] = drafts[sources[flat[i] // width], flat[i] % width], in place.

    token_ids: [T]; places, flat: [N] int64, contiguous; each flat[i] is below R·width. width: n, drafts of a row at
    most, at least 1 where N is not 0. drafts: [S, n or more] int64, columns side by side; sources: [R] int64,
    contiguous, its rows.
    """
    if not (count := len(places)):
        return
    _placing_kernel[(triton.cdiv(count, _PLACES),)](
        token_ids, places, flat, drafts, sources, count, width, drafts.stride(0),
        PLACES=_PLACES, num_warps=4, **dependent_launch(token_ids.device),
    )  # fmt: skip


def launch_acceptance(
    greedy: Tensor,
    index: Tensor,
    num_drafts: Tensor,
    drafts: Tensor,
    sources: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
) -> None:
    """The longest prefix of every row's drafts that is equal to the target's arg max, then the target's token.

    Args:
        greedy: [T] int64, contiguous: the arg max of each row of logits.
        index: [J, n+1] int64, contiguous: the row of logits after each token of a verification.
        num_drafts: [J] int64, contiguous; drafts past it do not exist.
        drafts: [S, n or more] int64, columns side by side; sources: [R <= J] int64, contiguous: its rows, of the first
            R rows. The others have zeros for drafts.
        out: num_accepted [J], tokens [J, n+1] (drafts with the target's token after the accepted ones, 0 in the last
            place where that is elsewhere) and the drafts [J, n]; int64, columns side by side; written.
    """
    rows, columns = index.shape
    if not rows:
        return
    with CompiledAtOnce():  # the number of accepted drafts is an index into memory
        _acceptance_kernel[(rows,)](
            greedy, index, num_drafts, drafts, sources, *out, columns - 1, len(sources), drafts.stride(0),
            *(x.stride(0) for x in out), COLUMNS=max(_LEAST_COLUMNS, triton.next_power_of_2(columns)),
            num_warps=1, **dependent_launch(greedy.device),
        )  # fmt: skip
