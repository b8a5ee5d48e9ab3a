"""What the FlashInfer backend refuses, before anything is allocated."""

from __future__ import annotations

import torch

from attention.backends.flashinfer.mla import check_mla_supported
from attention.backends.limits import HALF, check_heads, has_flashinfer_heads
from attention.cache.kv_cache import CacheGroup
from attention.errors import UnsupportedAttentionError
from attention.spec import AttentionSpec

PAGE_SIZES = (1, 16, 32, 64)


def check_supported(group: CacheGroup, key: AttentionSpec, dtype: torch.dtype) -> None:
    """Refuse what this backend does not offer, before anything is allocated.

    Raises:
        UnsupportedAttentionError: dtype, heads, or MLA; for heads that FlashInfer has a kernel for, page size and sinks
            with softcap as well.
    """
    if key.value_in_key:
        check_mla_supported(group, key, dtype)
        return
    where = f"group {group.name}: FlashInfer"
    elsewhere = "; use backend='torch'"
    if dtype not in HALF:
        names = " and ".join(str(d).removeprefix("torch.") for d in HALF)
        raise UnsupportedAttentionError(f"{where} has no {dtype} attention, only {names}{elsewhere}")
    check_heads(key, where, elsewhere)
    if not has_flashinfer_heads(key):
        return  # our own kernel, which has no further limits
    if group.page_size not in PAGE_SIZES:
        raise UnsupportedAttentionError(f"{where} takes page sizes {PAGE_SIZES}; given {group.page_size}")
    if key.has_sinks and key.softcap is not None:
        raise UnsupportedAttentionError(f"{where} has no attention sinks together with a softcap{elsewhere}")
