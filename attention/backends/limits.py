"""Limits that the GPU kernels share: supported dtypes and head dimensions."""

from __future__ import annotations

import torch

from attention.errors import UnsupportedAttentionError
from attention.spec import AttentionSpec

HALF = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
"""Head dims of FlashInfer's paged kernels, equal for keys and values."""
WIDEST_HEAD = 512
"""Widest head of specdec's own kernel (`attention/kernels/invariant_kernel.py`), of keys and of values."""


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype in a word."""
    return str(dtype).removeprefix("torch.")


def has_flashinfer_heads(key: AttentionSpec) -> bool:
    """Whether FlashInfer has a paged kernel for heads of this width; all others take specdec's kernel."""
    return key.head_dim_k == key.head_dim_v and key.head_dim_k in HEAD_DIMS


def check_causal(key: AttentionSpec, group: str, backend: str) -> None:
    """Raises UnsupportedAttentionError for tokens that see those after them; see `AttendsBothWays`."""
    if not key.causal:
        raise UnsupportedAttentionError(
            f"group {group}: backend {backend!r} has causal attention alone, and AttentionSpec.causal is False; use "
            "backend='torch', or on CUDA 'flashinfer'"
        )


def check_query_heads(key: AttentionSpec, where: str) -> None:
    """Raises UnsupportedAttentionError, whose message begins with `where`: Hq is not a multiple of Hkv."""
    if key.num_q_heads % key.num_kv_heads:
        raise UnsupportedAttentionError(
            f"{where} needs the {key.num_q_heads} query heads to be a multiple of the {key.num_kv_heads} KV heads"
        )


def check_heads(key: AttentionSpec, where: str, elsewhere: str = "") -> None:
    """Refuse heads that no kernel is built for. `where` begins the message, the advice `elsewhere` ends it.

    Raises:
        UnsupportedAttentionError: head counts or head dims, or slopes by distance, which no kernel here adds.
    """
    if key.alibi is not None:
        raise UnsupportedAttentionError(f"{where} has no ALiBi slopes; use backend='flex' or 'torch'")
    check_query_heads(key, where)
    if max(key.head_dim_k, key.head_dim_v) > WIDEST_HEAD:
        raise UnsupportedAttentionError(
            f"{where} takes head dims up to {WIDEST_HEAD}; given {key.head_dim_k} and {key.head_dim_v}{elsewhere}"
        )
