"""What batch-invariant attention offers; its kernel runs in tests/test_triton_kernels.py and tests/gpu."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention.backends.base import GraphBackend
from attention.backends.invariant import InvariantBackend
from attention.cache.kv_cache import FP8, CacheGroup, KVFormat
from attention.errors import UnsupportedAttentionError
from attention.spec import AttentionSpec

KEY = AttentionSpec(8, 2, 64, 64, 0.125, window=9, softcap=3.0, has_sinks=True)
GROUP = CacheGroup("target", (KEY,), 4, 16)
HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("group", "key", "dtype", "message"),
    [
        (GROUP, KEY, torch.float32, "takes float16 and bfloat16, given torch.float32"),
        (
            GROUP,
            replace(KEY, head_dim_v=576),
            HALF,
            "takes head dims up to 512; given 64 and 576",
        ),
        (GROUP, replace(KEY, num_q_heads=5), HALF, "the 5 query heads to be a multiple of the 2 KV heads"),
        (GROUP, replace(KEY, value_in_key=True), HALF, "does not serve MLA; use backend='flashinfer'"),
        (replace(GROUP, format=KVFormat(FP8)), KEY, HALF, "has no cache in 8 bits; use kv_cache_dtype='auto'"),
    ],
)
def test_what_is_refused(group: CacheGroup, key: AttentionSpec, dtype: torch.dtype, message: str) -> None:
    backend = InvariantBackend()
    with pytest.raises(UnsupportedAttentionError, match=message):
        backend.builder(group, key, dtype)
    with pytest.raises(UnsupportedAttentionError, match=message):
        backend.fixed_builder(group, key, dtype, 4, 6)


def test_it_serves_graphs_and_says_what_it_is() -> None:
    backend = InvariantBackend()
    assert isinstance(backend, GraphBackend) and backend.batch_invariant
    assert backend.route(GROUP, KEY, HALF) == "batch-invariant Triton kernel, bfloat16, head dim 64"
