"""What FlashInfer's MLA refuses; its plan is in test_mla_plan.py, the kernels are in tests/gpu."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention.backends.flashinfer.backend import check_supported
from attention.cache.kv_cache import CacheGroup
from attention.errors import UnsupportedAttentionError
from attention.spec import AttentionSpec

KEY = AttentionSpec(16, 1, 576, 512, scale=192**-0.5, value_in_key=True)


def refusal(key: AttentionSpec = KEY, dtype: torch.dtype = torch.bfloat16, page_size: int = 16) -> str:
    with pytest.raises(UnsupportedAttentionError) as error:
        check_supported(CacheGroup("target", (key,), 8, page_size), key, dtype)
    return str(error.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 4, 16, 128])
def test_what_is_offered(dtype: torch.dtype, heads: int) -> None:
    key = replace(KEY, num_q_heads=heads)
    check_supported(CacheGroup("target", (key,), 8, 16), key, dtype)


def test_refusals_name_what_was_given_and_what_is_allowed() -> None:
    assert "float32" in refusal(dtype=torch.float32) and "float16 and bfloat16" in refusal(dtype=torch.float32)
    other_rank = refusal(replace(KEY, head_dim_k=256 + 64, head_dim_v=256))
    assert "512" in other_rank and "given 256 and 64" in other_rank and "backend='torch'" in other_rank
    assert "given 512 and 32" in refusal(replace(KEY, head_dim_k=512 + 32))
    assert "given 20" in refusal(replace(KEY, num_q_heads=20))
    assert "(1, 16, 32, 64)" in refusal(page_size=8)
    for options in ({"window": 128}, {"softcap": 30.0}, {"has_sinks": True}):
        assert "no window, softcap or sinks" in refusal(replace(KEY, **options))
