"""Cache writes as a Triton kernel: keys and values, rounded to 8 bits or not, or MLA's latents. On CUDA only."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from attention.cache.kv_cache import FP8, FP8_MAX, LayerKV
from attention.kernels.launch import dependent_launch, wait_for_predecessor


@triton.jit
def _write_kernel(  # type: ignore[no-untyped-def]
    key_ptr,  # [T, Hkv, Dk]
    value_ptr,  # [T, Hkv, Dv]
    keys_ptr,  # [pages, page_size, Hkv, Dk], or [pages, Hkv, page_size, Dk]: see the strides
    values_ptr,  # as keys, Dv wide
    slot_ptr,  # [T] int64
    key_token, key_head, value_token, value_head, page_stride, slot_stride, head_stride, value_page, value_slot,
    value_head_stride, key_inverse, value_inverse, limit,
    HAS_VALUES: constexpr,  # a latent has none
    EIGHT_BITS: constexpr, PAGE_SIZE: constexpr, HEADS: constexpr, DIM: constexpr, DIM_V: constexpr,
    BLOCK: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    at = tl.arange(0, BLOCK)  # [BLOCK] all heads of one token
    head, column = at // DIM, at % DIM  # [BLOCK], [BLOCK]
    inside = at < HEADS * DIM  # [BLOCK]
    place = (slot // PAGE_SIZE) * page_stride + (slot % PAGE_SIZE) * slot_stride + head * head_stride + column
    key = tl.load(key_ptr + token * key_token + head * key_head + column, mask=inside)  # [BLOCK]
    if HAS_VALUES:
        value_place, value_inside = place, inside
        if DIM_V != DIM:  # the same for values, whose heads are of another width
            head, column, value_inside = at // DIM_V, at % DIM_V, at < HEADS * DIM_V
            value_place = (slot // PAGE_SIZE) * value_page + (slot % PAGE_SIZE) * value_slot
            value_place += head * value_head_stride + column
        value = tl.load(value_ptr + token * value_token + head * value_head + column, mask=value_inside)  # [BLOCK]
        if EIGHT_BITS:
            value = tl.minimum(tl.maximum(value.to(tl.float32) * value_inverse, -limit), limit)
        tl.store(values_ptr + value_place, value, mask=value_inside)
    if EIGHT_BITS:
        key = tl.minimum(tl.maximum(key.to(tl.float32) * key_inverse, -limit), limit)
    tl.store(keys_ptr + place, key, mask=inside)


def write_kv(layer: LayerKV, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    """Write key [T' >= T, Hkv, Dk] and value [T', Hkv, Dv] (last dimension contiguous) to their slots [T] int64, in
    place. Where values are in the keys (MLA), `value` is not read.

    8-bit caches follow the rule of `attention.cache.kv_cache.KVFormat`.
    """
    _, heads, dim = key.shape
    pages, values, (slot, head) = layer.keys, layer.values, layer.slot_and_head
    _write_kernel[(len(slot_mapping),)](
        key, value, pages, values, slot_mapping, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        pages.stride(0), pages.stride(slot), pages.stride(head), values.stride(0), values.stride(slot),
        values.stride(head), 1 / layer.key_scale, 1 / layer.value_scale, FP8_MAX, HAS_VALUES=not layer.value_in_key,
        EIGHT_BITS=pages.dtype == FP8, PAGE_SIZE=pages.shape[slot], HEADS=heads, DIM=dim, DIM_V=value.shape[2],
        BLOCK=triton.next_power_of_2(heads * max(dim, value.shape[2])), **dependent_launch(key.device),
    )  # fmt: skip
