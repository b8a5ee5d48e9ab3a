"""What recurrences in chunks share: how a row's tokens are cut, and the inverse of a triangular matrix.

A row's committed tokens are cut into chunks of CHUNK, then its drafts, so that the state is stored between two chunks.
Imported on CUDA only.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

CHUNK = 64


def precision_of(dtype: torch.dtype) -> str:
    """How matmuls of float32 states are computed: as float32 on tensor cores (three products of TF32 each) where the
    inputs have as many bits, else in TF32, which has more bits than half precision."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


@cache
def stages(device: torch.device, width: int) -> int:
    """How many chunks are in flight in a loop over them: the next one's loads run ahead where there is shared memory
    for both. Two of 128 numbers a token take up to 221,440 bytes (Triton 3.6); Hopper has 232,448."""
    if device.type != "cuda":
        return 1
    bytes_ = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)  # not on ROCm
    return 2 if bytes_ >= 225_000 and width <= 128 else 1


def most_chunks(tokens: int, rows: int) -> int:
    """At least as many as the chunks of all rows."""
    return tokens // CHUNK + 2 * rows


@triton.jit
def chunk_of_row(tokens, num_new, chunk, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """-> where a row's chunk begins and ends, among the row's tokens; an empty one after the last."""
    new = tl.minimum(num_new, tokens)
    committed = tl.cdiv(new, CHUNK)
    begin = tl.where(chunk < committed, chunk * CHUNK, new + (chunk - committed) * CHUNK)
    return begin, tl.minimum(begin + CHUNK, tl.where(chunk < committed, new, tokens))


@triton.jit
def chunks_of_row(tokens, num_new, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """-> the number of chunks of committed tokens, and of all."""
    new = tl.minimum(num_new, tokens)
    committed = tl.cdiv(new, CHUNK)
    return committed, committed + tl.cdiv(tokens - new, CHUNK)


@triton.jit
def row_of_chunk(  # type: ignore[no-untyped-def]
    query_start_loc_ptr, num_new_ptr, rows, program, least_tokens, CHUNK: tl.constexpr, ROWS: tl.constexpr
):
    """-> the row of a program, and which of the row's chunks is the program's; `rows` for a program too many. Rows of
    fewer than `least_tokens` tokens have no chunks.
    """
    index = tl.arange(0, ROWS)  # [ROWS]
    first = tl.load(query_start_loc_ptr + index, mask=index < rows, other=0)  # [ROWS]
    tokens = tl.load(query_start_loc_ptr + index + 1, mask=index < rows, other=0) - first  # [ROWS]
    _, chunks = chunks_of_row(tokens, tl.load(num_new_ptr + index, mask=index < rows, other=0), CHUNK)  # [ROWS]
    chunks = tl.where(tokens >= least_tokens, chunks, 0)
    row = tl.sum((tl.cumsum(chunks, 0) <= program).to(tl.int32), 0)
    return tl.minimum(row, rows), program - tl.sum(tl.where(index < row, chunks, 0), 0)


@triton.jit
def unit_lower_inverse(L, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """(I + L)⁻¹ of a strictly lower triangular L [SIZE, SIZE] float32, SIZE at most 64.

    The blocks of 16 on the diagonal by forward substitution, all of them at once; then, with D their inverses and M = D
    times the rest, (I + M)⁻¹ D, in which M⁴ = 0. Powers of L itself would grow beyond float32 before they vanish.
    """
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]  # [SIZE, 1], [1, SIZE]
    in_block = i // 16 == j // 16  # [SIZE, SIZE]
    inverse = tl.where(in_block, -L, 0.0)  # [SIZE, SIZE] without the diagonal
    for r in range(1, 16):
        here = i % 16 == r  # [SIZE, 1]
        row = tl.sum(tl.where(here, inverse, 0.0), 0)  # [SIZE] row r of every block, side by side
        row += tl.sum(row[:, None] * inverse, 0)
        inverse = tl.where(here & in_block, row[None, :], inverse)
    one = (i == j).to(tl.float32)  # [SIZE, SIZE]
    inverse += one
    M = tl.dot(inverse, tl.where(in_block, 0.0, L), input_precision="tf32x3")
    twice = tl.dot(M, M, input_precision="tf32x3")
    return tl.dot(one - M, tl.dot(one + twice, inverse, input_precision="tf32x3"), input_precision="tf32x3")


@triton.jit
def running_sums(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """x [1, SIZE] -> the sums of x[0] to x[i], [SIZE, 1]. By a mask: Triton 3.6 cannot scan so narrow a tile where a
    matmul's layout holds it."""
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]  # [SIZE, 1], [1, SIZE]
    return tl.sum(tl.where(j <= i, x, 0.0), 1)[:, None]
