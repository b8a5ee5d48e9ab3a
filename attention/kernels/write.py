"""The cache write as one Triton kernel for keys and values, rounding to 8 bits where the cache has them.

Imported on CUDA only, where torch brings Triton along.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.cache.kv_cache import FP8, FP8_MAX, LayerKV
from attention.kernels.pdl import dependent_launch, wait_for_predecessor


@triton.jit
def _write_kernel(  # type: ignore[no-untyped-def]
    key_ptr,  # [T, Hkv, D]
    value_ptr,  # [T, Hkv, D]
    keys_ptr,  # [pages, page_size, Hkv, D], or [pages, Hkv, page_size, D]: see the strides
    values_ptr,  # as keys
    slot_ptr,  # [T] int64
    key_token,
    key_head,
    value_token,
    value_head,
    page_stride,
    slot_stride,
    head_stride,
    key_inverse,
    value_inverse,
    limit,
    EIGHT_BITS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_predecessor(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    at = tl.arange(0, BLOCK)  # [BLOCK] all heads of one token
    head, column = at // DIM, at % DIM  # [BLOCK], [BLOCK]
    inside = at < HEADS * DIM  # [BLOCK]
    place = (slot // PAGE_SIZE) * page_stride + (slot % PAGE_SIZE) * slot_stride + head * head_stride + column
    key = tl.load(key_ptr + token * key_token + head * key_head + column, mask=inside)  # [BLOCK]
    value = tl.load(value_ptr + token * value_token + head * value_head + column, mask=inside)  # [BLOCK]
    if EIGHT_BITS:
        key = tl.minimum(tl.maximum(key.to(tl.float32) * key_inverse, -limit), limit)
        value = tl.minimum(tl.maximum(value.to(tl.float32) * value_inverse, -limit), limit)
    tl.store(keys_ptr + place, key.to(keys_ptr.dtype.element_ty), mask=inside)
    tl.store(values_ptr + place, value.to(values_ptr.dtype.element_ty), mask=inside)


def write_kv(layer: LayerKV, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write key and value [T' >= T, Hkv, D] (last dimension contiguous) to their slots [T] int64, in place.

    The cache tensors of keys and values have the same shape and strides. The rule of 8-bit caches is that of
    `attention.cache.kv_cache.KVFormat`.
    """
    _, heads, dim = key.shape
    pages, (slot, head) = layer.keys, layer.slot_and_head
    _write_kernel[(len(slot_mapping),)](
        key,
        value,
        pages,
        layer.values,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        pages.stride(0),
        pages.stride(slot),
        pages.stride(head),
        1 / layer.key_scale,
        1 / layer.value_scale,
        FP8_MAX,
        EIGHT_BITS=pages.dtype == FP8,
        PAGE_SIZE=pages.shape[slot],
        HEADS=heads,
        DIM=dim,
        BLOCK=triton.next_power_of_2(heads * dim),
        **dependent_launch(key.device),
    )
