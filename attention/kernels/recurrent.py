"""What the kernels of recurrences share: the rows they are launched over, and how a row's tokens are found.

A launch is a set of rows with one state each. Per row: the state of its slot (zeros where start == replay), the tokens
that are not in it yet ("replay", from the ring of inputs), then the row's tokens one after the other; the state after
the first num_new of them is stored (none where that is 0), and the inputs of the rest go into the ring. Position p of a
row lies at p mod R of its ring.

Programs of one row read the ring while others write it, so what is written must not lie where another still reads:
replayed positions and drafts are within R of each other (`ring_places`).

Tiles of a state with B rows and W columns are [J, B, L], W = J · L, rather than [B, W]: Triton spreads the last
dimension over the lanes of a warp first. So L / 4 lanes share a row, and a sum over a row's columns takes log2(L / 4)
shuffles for 128 / L rows at once; with all of 128 columns in the last dimension, five for each row, which is more than
the memory leaves time for. Imported on CUDA only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.checking import checking, require
from attention.recurrence.rows import StateRows

TOKENS_OF_SHORT_ROWS = 16
"""Rows with more tokens are read in chunks, where there is a kernel for chunks."""


def ring_places(start: int, replay: int, num_new: int, drafts: int, size: int) -> tuple[set[int], set[int]]:
    """The places of a row's ring that a launch reads and those it writes.

    They never meet where the tokens replayed and those of the launch are at most `size` (`FoldRule.ring_size`), or
    replay is 0:

    >>> ring_places(start=20, replay=2, num_new=1, drafts=3, size=7)
    ({4, 5}, {0, 1, 2})
    """
    first_draft = start + num_new
    reads = {p % size for p in range(start - replay, start)}
    return reads, {p % size for p in range(first_draft, first_draft + drafts)}


def inner_rows(x: torch.Tensor, inner: int = 1) -> torch.Tensor:
    """`x` itself where its last `inner` dimensions are contiguous, as it is for slices of a wider matmul result, or a
    copy."""
    size = 1
    for width, stride in zip(reversed(x.shape[-inner:]), reversed(x.stride()[-inner:]), strict=True):
        if width > 1 and stride != size:
            return x.contiguous()
        size *= width
    return x


def check_launch(
    rows: StateRows,
    slots: int,
    contiguous: dict[str, torch.Tensor],
    kept: dict[str, tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> None:
    """In check mode: index tensors are int32, a slot's part of each state and ring is without gaps, and inputs have the
    dtype of the ring that keeps them: a replayed token would else not be the one that was verified.

    Raises:
        InvariantError: one is not.
    """
    if not checking():
        return
    for name in ("query_start_loc", "slots", "start", "replay", "num_new"):
        require(getattr(rows, name).dtype == torch.int32, f"{name} is {getattr(rows, name).dtype}, not int32")
    require(len(rows.query_start_loc) == len(rows.slots) + 1, "query_start_loc is not one longer than slots")
    for name, x in contiguous.items():
        require(len(x) == slots, f"{name} has {len(x)} slots, the state {slots}")
        require(x[:1].is_contiguous(), f"{name} has gaps within a slot")
    for name, (given, ring) in (kept or {}).items():
        require(given.dtype == ring.dtype, f"{name} is {given.dtype}, the ring that keeps it {ring.dtype}")


@triton.jit
def row_tokens(query_start_loc_ptr, row):  # type: ignore[no-untyped-def]
    """query_start_loc [rows + 1] -> a row's first token (int64) and its number of tokens."""
    first = tl.load(query_start_loc_ptr + row)
    return first.to(tl.int64), tl.load(query_start_loc_ptr + row + 1) - first


@triton.jit
def row_of_block(query_start_loc_ptr, rows, program, BLOCK: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """query_start_loc [rows + 1] -> the row of a program, and which of the row's blocks of BLOCK tokens is the
    program's; `rows` for a program too many. There are at most tokens // BLOCK + rows blocks.
    """
    index = tl.arange(0, ROWS)  # [ROWS]
    first = tl.load(query_start_loc_ptr + index, mask=index < rows, other=0)  # [ROWS]
    tokens = tl.load(query_start_loc_ptr + index + 1, mask=index < rows, other=0) - first  # [ROWS]
    blocks = tl.where(index < rows, tl.cdiv(tokens, BLOCK), 0)  # [ROWS]
    row = tl.sum((tl.cumsum(blocks, 0) <= program).to(tl.int32), 0)
    block = program - tl.sum(tl.where(index < row, blocks, 0), 0)
    return tl.minimum(row, rows), block


@triton.jit
def row_state(slots_ptr, start_ptr, replay_ptr, num_new_ptr, row):  # type: ignore[no-untyped-def]
    """-> a row's slot (int64), start, replay and num_new."""
    slot = tl.load(slots_ptr + row).to(tl.int64)
    return slot, tl.load(start_ptr + row), tl.load(replay_ptr + row), tl.load(num_new_ptr + row)


@triton.jit
def times(S, x):  # type: ignore[no-untyped-def]
    """S [J, B, L] times x [J, 1, L], summed over J and L -> [1, B, 1]; first what a thread has by itself."""
    return tl.sum(tl.sum(S * x, 0, keep_dims=True), 2, keep_dims=True)
