"""Parts that the kernels of recurrences share: rows, chunks of rows, small triangular systems. Imported on CUDA only.

A launch is a set of rows with one state each. A row begins with its slot's state (zeros where start == replay), replays
tokens from its ring of inputs, then reads its own tokens; the state after the first num_new of them is stored, and the
inputs of the rest go into the ring, position p at p mod R. Programs of one row read the ring while others write it:
replayed positions and drafts are within R of each other (`FoldRule.ring_size`). Committed tokens are cut into chunks of
CHUNK, then the drafts, so that the state is stored between two chunks.

Tiles of a state with B rows and W columns are [J, B, L], W = J · L, rather than [B, W]: Triton spreads the last
dimension over the lanes of a warp first, so a sum over a row's columns takes log2(L / 4) shuffles for 128 / L rows at
once, instead of five for each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from attention.checking import CHECKS, require
from attention.kernels.launch import dependent_launch
from attention.kernels.tiles import counts_of, ended, load_where, sum_where
from attention.recurrence.state_rows import StateRows
from attention.recurrence.states import DeltaRing, ScanRing

TOKENS_OF_SHORT_ROWS = 16
"""Rows with more tokens are processed in chunks if the recurrence has a kernel for chunks."""


def inner_rows(x: Tensor, inner: int = 1) -> Tensor:
    """`x`, copied unless its last `inner` dimensions are contiguous, as in slices of a wider matmul result."""
    size = 1
    for width, stride in zip(reversed(x.shape[-inner:]), reversed(x.stride()[-inner:]), strict=True):
        if width > 1 and stride != size:
            return x.contiguous()
        size *= width
    return x


def check_launch(rows: StateRows, state: Tensor, ring: DeltaRing | ScanRing | None = None, **inputs: Tensor) -> None:
    """In check mode, check that index tensors of a launch are int32 and that state and ring are contiguous.

    state: [slots, …]; a convolution's ring. inputs: keyed by the names of the ring's tensors, which must have the same
    dtypes: a replayed token would otherwise differ from the one that was verified.

    Raises:
        InvariantError: one of this does not hold.
    """
    if not CHECKS.on:
        return
    kept: dict[str, Tensor] = {} if ring is None else vars(ring)
    for name in ("query_start_loc", "slots", "start", "replay", "num_new"):
        require(getattr(rows, name).dtype == torch.int32, f"{name} is {getattr(rows, name).dtype}, not int32")
    require(len(rows.query_start_loc) == len(rows.slots) + 1, "query_start_loc is not one longer than slots")
    for name, x in {"state" if kept else "ring": state, **{f"ring.{key}": x for key, x in kept.items()}}.items():
        require(len(x) == len(state), f"{name} has {len(x)} slots, the state {len(state)}")
        require(x.is_contiguous(), f"{name} has gaps")
    for name, given in inputs.items():
        require(given.dtype == kept[name].dtype, f"{name} is {given.dtype}, the ring that keeps it {kept[name].dtype}")


@dataclass(frozen=True)
class Inputs:
    """A call of the gated delta rule or of Mamba2's scan, as its launches read it.

    Attributes:
        q, k: [T, Hk, Dk], each head for H / Hk value heads; v: [T, H, Dv]; beta: [T, H]. Mamba2: C, B, x and dt.
        g: gates [T, H] or [T, H, Dk]; Mamba2: A of every token, whose gates are dt A.
        scale: of queries; normalize: whether q and k are divided by their lengths. Mamba2: neither.
        state: float32 [slots, H, Dv, Dk]. ring: places of k, v, g and beta; Mamba2 keeps no g, any tensor will do.
        delta: whether values are corrected by what the state knows; Mamba2's are not.
        skip: Mamba2's D [H], or None. out: [T, H, Dv].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float
    normalize: bool
    state: Tensor
    ring: tuple[Tensor, Tensor, Tensor, Tensor]
    rows: StateRows
    out: Tensor
    delta: bool = True
    skip: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """q, k, v, g, beta."""
        return self.q, self.k, self.v, self.g, self.beta

    @property
    def strides(self) -> list[int]:
        """From token to token and from head to head of each of `tensors`."""
        return [stride for x in self.tensors for stride in x.stride()[:2]]

    @property
    def constants(self) -> dict[str, Any]:
        """Constants of every launch."""
        _, key_heads, dim_k = self.k.shape
        return {
            "RING_SIZE": self.ring[0].shape[1],
            "HEADS": self.v.shape[1],
            "KEY_HEADS": key_heads,
            "DIM_K": dim_k,
            "DIM_V": self.v.shape[2],
            "WIDTH_K": max(16, triton.next_power_of_2(dim_k)),
            **dependent_launch(self.v.device),
        }


@triton.jit
def row_tokens(query_start_loc_ptr, row):  # type: ignore[no-untyped-def]
    """query_start_loc [rows + 1] -> a row's first token (int64) and its number of tokens."""
    first = tl.load(query_start_loc_ptr + row)
    return first.to(tl.int64), tl.load(query_start_loc_ptr + row + 1) - first


@triton.jit
def row_of_program(counts, index, rows, program):  # type: ignore[no-untyped-def]
    """counts [ROWS], programs of each row, index 0 … ROWS-1 -> the row of a program, and which of the row's programs it
    is; `rows` for surplus programs."""
    row = ended(counts, program)
    return tl.minimum(row, rows), program - sum_where(counts, index < row)


@triton.jit
def row_of_block(query_start_loc_ptr, rows, program, BLOCK: constexpr, ROWS: constexpr):  # type: ignore[no-untyped-def]
    """query_start_loc [rows + 1] -> the row of a program, and which of the row's blocks of BLOCK tokens is the
    program's; `rows` for surplus programs. The number of blocks is at most tokens // BLOCK + rows.
    """
    index = tl.arange(0, ROWS)  # [ROWS]
    tokens = counts_of(query_start_loc_ptr, index, rows)  # [ROWS]
    return row_of_program(tl.where(index < rows, tl.cdiv(tokens, BLOCK), 0), index, rows, program)


@triton.jit
def facts_of_row(query_start_loc_ptr, slots_ptr, start_ptr, replay_ptr, num_new_ptr, row):  # type: ignore[no-untyped-def]
    """-> a row's first token (int64), number of tokens, slot (int64), start, replay and num_new."""
    first, tokens = row_tokens(query_start_loc_ptr, row)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    return first, tokens, slot, tl.load(start_ptr + row), tl.load(replay_ptr + row), tl.load(num_new_ptr + row)


@dataclass(frozen=True)
class StateTiling:
    """Rows of the state a program holds, columns in a piece of it (L), its warps, and registers a thread."""

    block: int
    piece: int
    warps: int
    registers: int | None = None


_FEW_UNITS = 256
"""Up to this many heads over all rows, a program holds half as much, so that enough programs run."""


def state_tiling(units: int, rows: int, columns: int) -> StateTiling:
    """The tiling for `units` (rows times heads), whose states have these rows and columns, read token by token.

    With 8 lanes to a row of the state, 8 warps hold 32 rows of it, and fetch keys and queries of up to 128 numbers
    straight into the registers that use them: Triton exchanges through shared memory tensors that have at least as many
    numbers as the program has threads. With 80 registers a multiprocessor of 65,536 holds three programs; Triton 3.6
    and its ptxas spill 28 bytes of the larger, none of the smaller.
    """
    width, most = triton.next_power_of_2(columns), triton.next_power_of_2(rows)
    block = min(32 if units <= _FEW_UNITS else 64, most)
    return StateTiling(block, min(32, width), 8 if width <= 128 else 16, 80 if width <= 128 else None)


@triton.jit
def zero_padding(out_at, end_ptr, total_tokens, STEP: constexpr, mask):  # type: ignore[no-untyped-def]
    """Zeros for the outputs of tokens of no row. out_at: where token 0's are; end_ptr: of the last row's end; STEP:
    numbers from one token to the next."""
    end = tl.load(end_ptr)
    at = out_at + end.to(tl.int64) * STEP
    for _ in range(total_tokens - end):
        tl.store(at, 0.0, mask=mask)
        at += STEP


@triton.jit
def times(S, x):  # type: ignore[no-untyped-def]
    """S [J, B, L] times x [J, 1, L], summed over J and L -> [1, B, 1]; each thread first reduces its own elements."""
    return tl.sum(tl.sum(S * x, 0, keep_dims=True), 2, keep_dims=True)


def precision_of(dtype: torch.dtype) -> str:
    """How matmuls of float32 states are computed: as float32 on tensor cores (three products of TF32 each) where the
    inputs have as many bits, else in TF32, which has more bits than half precision."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


@cache
def stages(device: torch.device, width: int) -> int:
    """Pipeline stages of a loop over chunks: the next chunk's loads run ahead if shared memory holds both chunks. Two
    of 128 numbers a token take up to 221,440 bytes (Triton 3.6); Hopper has 232,448."""
    if device.type != "cuda":
        return 1
    bytes_ = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)  # not on ROCm
    return 2 if bytes_ >= 225_000 and width <= 128 else 1


@triton.jit
def chunk_of_row(tokens, num_new, chunk, CHUNK: constexpr):  # type: ignore[no-untyped-def]
    """-> where a row's chunk begins and ends, among the row's tokens; an empty one after the last."""
    new = tl.minimum(num_new, tokens)
    committed = tl.cdiv(new, CHUNK)
    begin = tl.where(chunk < committed, chunk * CHUNK, new + (chunk - committed) * CHUNK)
    return begin, tl.minimum(begin + CHUNK, tl.where(chunk < committed, new, tokens))


@triton.jit
def chunks_of_row(tokens, num_new, CHUNK: constexpr):  # type: ignore[no-untyped-def]
    """-> the number of chunks of committed tokens, and of all."""
    new = tl.minimum(num_new, tokens)
    committed = tl.cdiv(new, CHUNK)
    return committed, committed + tl.cdiv(tokens - new, CHUNK)


@triton.jit
def row_of_chunk(  # type: ignore[no-untyped-def]
    query_start_loc_ptr, num_new_ptr, rows, program, least_tokens, CHUNK: constexpr, ROWS: constexpr
):
    """-> a program's row, and which of the row's chunks is its own; `rows` for a program too many. Rows of fewer than
    `least_tokens` tokens have no chunks."""
    index = tl.arange(0, ROWS)  # [ROWS]
    tokens = counts_of(query_start_loc_ptr, index, rows)  # [ROWS]
    _, chunks = chunks_of_row(tokens, load_where(num_new_ptr + index, index < rows), CHUNK)  # [ROWS]
    return row_of_program(tl.where(tokens >= least_tokens, chunks, 0), index, rows, program)


@triton.jit
def square(SIZE: constexpr):  # type: ignore[no-untyped-def]
    """The rows [SIZE, 1] and the columns [1, SIZE] of a square, by number."""
    number = tl.arange(0, SIZE)
    return number[:, None], number[None, :]


@triton.jit
def unit_lower_inverse(L, SIZE: constexpr):  # type: ignore[no-untyped-def]
    """(I + L)⁻¹ of a strictly lower triangular L [SIZE, SIZE] float32, SIZE at most 32.

    The blocks of 16 on the diagonal by forward substitution, both at once; then, with D their inverses and R the rest,
    D - D R D. Powers of L would grow beyond float32 before they vanish.
    """
    i, j = square(SIZE)  # [SIZE, 1], [1, SIZE]
    in_block = i // 16 == j // 16  # [SIZE, SIZE]
    inverse = tl.where(in_block, -L, 0.0)  # [SIZE, SIZE] without the diagonal
    for r in range(1, 16):
        here = i % 16 == r  # [SIZE, 1]
        row = sum_where(inverse, here)  # [SIZE] row r of every block, side by side
        row += tl.sum(row[:, None] * inverse, 0)
        inverse = tl.where(here & in_block, row[None, :], inverse)
    inverse += (i == j).to(tl.float32)
    below = tl.dot(tl.where(in_block, 0.0, L), inverse, input_precision="tf32x3")
    return inverse - tl.dot(inverse, below, input_precision="tf32x3")


@triton.jit
def running_sums(x, SIZE: constexpr):  # type: ignore[no-untyped-def]
    """x [1, SIZE] -> the sums of x[0] to x[i], [SIZE, 1]. By a mask: Triton 3.6 cannot scan so narrow a tile where a
    matmul's layout holds it."""
    i, j = square(SIZE)  # [SIZE, 1], [1, SIZE]
    return tl.sum(tl.where(j <= i, x, 0.0), 1)[:, None]
