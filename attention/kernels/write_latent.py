"""The cache write of MLA as one Triton kernel. Imported on CUDA only, where torch brings Triton along."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.cache.kv_cache import LayerKV


@triton.jit
def _write_latent_kernel(  # type: ignore[no-untyped-def]
    key_ptr,  # [T, 1, D]
    pages_ptr,  # [pages, page_size, 1, D] contiguous
    slot_ptr,  # [T] int64
    key_token,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    column = tl.arange(0, BLOCK)  # [BLOCK]
    inside = column < DIM
    key = tl.load(key_ptr + token * key_token + column, mask=inside)  # [BLOCK]
    tl.store(pages_ptr + slot * DIM + column, key.to(pages_ptr.dtype.element_ty), mask=inside)


def write_latent(layer: LayerKV, key: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write latents [T' >= T, 1, Dk] (last dimension contiguous) to their slots [T] int64, in place.

    With one KV head a slot's numbers lie together in either page layout.
    """
    dim = key.shape[2]
    block = triton.next_power_of_2(dim)
    _write_latent_kernel[(len(slot_mapping),)](key, layer.keys, slot_mapping, key.stride(0), DIM=dim, BLOCK=block)
