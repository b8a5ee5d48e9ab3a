"""What attention kernels over pages share: where keys lie, and the running softmax. Imported on CUDA only."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_keys(page_indptr_ptr, last_page_len_ptr, row, PAGE_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the pages of a row begin in the list of all, and how many keys the row has."""
    first_page = tl.load(page_indptr_ptr + row)
    pages = tl.load(page_indptr_ptr + row + 1) - first_page
    return first_page, (pages - 1) * PAGE_SIZE + tl.load(last_page_len_ptr + row)


@triton.jit
def key_places(  # type: ignore[no-untyped-def]
    page_indices_ptr, first_page, position, inside, page_stride, slot_stride, PAGE_SIZE: tl.constexpr
):
    """Where the slots of a row's positions begin, int64."""
    page = tl.load(page_indices_ptr + first_page + position // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
    return page * page_stride + (position % PAGE_SIZE) * slot_stride


@triton.jit
def attend_tile(scores, value, highest, total, out):  # type: ignore[no-untyped-def]
    """A tile of keys more: scores [Q, K] in powers of two and value [K, D] -> highest, total [Q] and out [Q, D].

    Source: Dao et al., FlashAttention-2, algorithm 1.
    """
    higher = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(highest - higher)
    total = total * shrink + tl.sum(weights, 1)
    return higher, total, tl.dot(weights.to(value.dtype), value, out * shrink[:, None])
