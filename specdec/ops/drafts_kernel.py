"""Drafts into a verification's token ids, and greedy acceptance, as one Triton kernel each. Imported on CUDA only.

Nothing is specialised on sizes, strides or alignments, which differ between rounds of any shape: so each kernel is
compiled once, before the first round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.kernels.pdl import dependent_launch, wait_for_predecessor

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
    count,
    width,
    draft_stride,
    PLACES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_predecessor(DEPENDENT)
    i = tl.program_id(0) * PLACES + tl.arange(0, PLACES)  # [PLACES]
    inside = i < count
    flat = tl.load(flat_ptr + i, mask=inside, other=0)
    source = tl.load(sources_ptr + flat // width, mask=inside, other=0)
    drafts = tl.load(drafts_ptr + source * draft_stride + flat % width, mask=inside, other=0)
    tl.store(token_ids_ptr + tl.load(places_ptr + i, mask=inside, other=0), drafts, mask=inside)


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
    width,
    drafting,
    draft_stride,
    accepted_stride,
    tokens_stride,
    out_stride,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_predecessor(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)  # [COLUMNS]
    inside = column <= width
    place = tl.load(index_ptr + row * (width + 1) + column, mask=inside, other=0)
    target = tl.load(greedy_ptr + place, mask=inside, other=0)
    source = tl.load(sources_ptr + row, mask=row < drafting, other=0)
    drafted = column < tl.where(row < drafting, width, 0)
    drafts = tl.load(drafts_ptr + source * draft_stride + column, mask=drafted, other=0)
    num_drafts = tl.minimum(tl.load(num_drafts_ptr + row), width)
    accepted = (drafts == target) & (column < num_drafts)
    at = tl.min(tl.where(accepted, COLUMNS, column), 0)  # at most `width`, whose column is never accepted
    tl.store(accepted_ptr + row * accepted_stride, at.to(tl.int64))
    tl.store(tokens_ptr + row * tokens_stride + column, tl.where(column == at, target, drafts), mask=inside)
    tl.store(out_ptr + row * out_stride + column, drafts, mask=column < width)


def launch_placing(
    token_ids: torch.Tensor,
    places: torch.Tensor,
    flat: torch.Tensor,
    width: int,
    drafts: torch.Tensor,
    sources: torch.Tensor,
) -> None:
    """See `specdec.ops.drafts.place_drafts`; N >= 1."""
    count = len(places)
    _placing_kernel[(triton.cdiv(count, _PLACES),)](
        token_ids, places, flat, drafts, sources, count, width, drafts.stride(0),
        PLACES=_PLACES, num_warps=4, **dependent_launch(token_ids.device),
    )  # fmt: skip


def launch_acceptance(
    greedy: torch.Tensor,
    index: torch.Tensor,
    num_drafts: torch.Tensor,
    drafts: torch.Tensor,
    sources: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """See `specdec.ops.drafts.accept_greedily`; J >= 1."""
    rows, columns = index.shape
    _acceptance_kernel[(rows,)](
        greedy, index, num_drafts, drafts, sources, *out, columns - 1, len(sources), drafts.stride(0),
        *(x.stride(0) for x in out), COLUMNS=max(_LEAST_COLUMNS, triton.next_power_of_2(columns)),
        num_warps=1, **dependent_launch(greedy.device),
    )  # fmt: skip
