"""Parts common to kernels: numbers of programs and elements; over a paged cache, addresses of keys and the online
softmax. Imported on CUDA only."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def long_program_id(axis: constexpr):  # type: ignore[no-untyped-def]
    """As `tl.program_id`, int64: for offsets beyond 2^31."""
    return tl.program_id(axis).to(tl.int64)


@triton.jit
def block_of(number, SIZE: constexpr):  # type: ignore[no-untyped-def]
    """The elements [SIZE] of a block, by their numbers among those of all blocks."""
    return number * SIZE + tl.arange(0, SIZE)


@triton.jit
def at_most_last(index, count):  # type: ignore[no-untyped-def]
    """Numbers of `count` elements, int64: the last one's for those beyond it."""
    return tl.minimum(index, count - 1).to(tl.int64)


@triton.jit
def load_where(ptr, mask):  # type: ignore[no-untyped-def]
    """What lies at the pointers, with 0 outside of `mask`."""
    return tl.load(ptr, mask=mask, other=0.0)


@triton.jit
def load_float(ptr, mask):  # type: ignore[no-untyped-def]
    """As `load_where`, in float32."""
    return load_where(ptr, mask).to(tl.float32)


@triton.jit
def sum_where(x, mask):  # type: ignore[no-untyped-def]
    """The sum of what the mask leaves, along the first dimension."""
    return tl.sum(tl.where(mask, x, 0), 0)


@triton.jit
def ended(sizes, place):  # type: ignore[no-untyped-def]
    """How many of sizes [N], laid end to end, end at a place or before it."""
    return tl.sum((tl.cumsum(sizes, 0) <= place).to(tl.int32), 0)


@triton.jit
def row_keys(page_indptr_ptr, last_page_len_ptr, row, PAGE_SIZE: constexpr):  # type: ignore[no-untyped-def]
    """page_indptr [B+1], last_page_len [B] -> the row's first index into page_indices, and its number of keys."""
    first_page = tl.load(page_indptr_ptr + row)  # scalar
    pages = tl.load(page_indptr_ptr + row + 1) - first_page  # scalar
    return first_page, (pages - 1) * PAGE_SIZE + tl.load(last_page_len_ptr + row)


@triton.jit
def counts_of(starts_ptr, index, rows):  # type: ignore[no-untyped-def]
    """starts [rows + 1] -> from each row's start to the next one's, for the rows `index` [ROWS]; 0 from `rows` on."""
    first = load_where(starts_ptr + index, index < rows)  # [ROWS]
    return load_where(starts_ptr + index + 1, index < rows) - first


@triton.jit
def rows_at(pointer, at, column, mask):  # type: ignore[no-untyped-def]
    """Rows that begin at offsets `at` [R], column by column: [R, W], zeros outside of `mask`."""
    return load_where(pointer + at[:, None] + column[None, :], mask)


@triton.jit
def no_keys(QUERIES: constexpr, WIDTH: constexpr):  # type: ignore[no-untyped-def]
    """m, l and acc of `attend_tile` before the first tile."""
    m = tl.full((QUERIES,), -1e30, tl.float32)  # [M]; finite, so that m - m_new is never NaN
    return m, tl.zeros((QUERIES,), tl.float32), tl.zeros((QUERIES, WIDTH), tl.float32)


@triton.jit
def key_places(  # type: ignore[no-untyped-def]
    page_indices_ptr, first_page, position, inside, page_stride, slot_stride, PAGE_SIZE: constexpr
):
    """position [N], inside [N] bool -> offsets [N] int64 of the positions' slots in the cache tensor."""
    page = load_where(page_indices_ptr + first_page + position // PAGE_SIZE, inside).to(tl.int64)  # [N]
    return page * page_stride + (position % PAGE_SIZE) * slot_stride


@triton.jit
def without_padding(rows, column, DIM: constexpr):  # type: ignore[no-untyped-def]
    """rows [R, 1] bool, column [W] -> [R, W] bool: a row's first DIM columns, or `rows` where W is DIM."""
    if column.shape[0] == DIM:
        return rows
    else:  # noqa: RET505 - two shapes, one compiled each
        return rows & (column < DIM)[None, :]


@triton.jit
def attend_tile(s, v, m, l, acc):  # type: ignore[no-untyped-def]  # noqa: E741
    """One step of the online softmax over a tile of N keys.

    s [M, N]: scores times log2(e); v [N, D]. m [M]: running maximum; l [M]: running sum of weights; acc [M, D]: running
    weighted sum of values. Returns the new m, l, acc.

    Source: Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 1.
    """
    m_new = tl.maximum(m, tl.max(s, 1))  # [M]
    p = tl.exp2(s - m_new[:, None])  # [M, N]
    alpha = tl.exp2(m - m_new)  # [M], rescales what was summed under the old maximum
    l = l * alpha + tl.sum(p, 1)  # noqa: E741
    return m_new, l, tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
