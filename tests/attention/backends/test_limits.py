"""What every backend refuses by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention.backends import flex, invariant
from attention.backends.flashinfer import backend as flashinfer
from attention.backends.reference import TorchBackend
from attention.cache.kv_cache import CacheGroup
from attention.errors import UnsupportedAttentionError
from attention.spec import AttentionSpec

CAUSAL = AttentionSpec(2, 1, 64, 64, 0.125)
CPU = torch.device("cpu")
CHECKS = {
    "torch": lambda group, key: TorchBackend(CPU).builder(group, key, torch.float16),
    "flex": lambda group, key: flex.check_supported(group, key, torch.float16, CPU),
    "batch_invariant": lambda group, key: invariant.check_supported(group, key, torch.float16),
    "flashinfer": lambda group, key: flashinfer.check_supported(group, key, torch.float16),
}


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("key", [CAUSAL, replace(CAUSAL, num_kv_heads=1, value_in_key=True)])
def test_tokens_that_see_those_after_them_are_refused_by_name(name: str, key: AttentionSpec) -> None:
    group = CacheGroup("heads", (key,), 16, 16)
    with pytest.raises(UnsupportedAttentionError, match=rf"group heads: backend '{name}' has causal attention alone"):
        CHECKS[name](group, replace(key, causal=False))


@pytest.mark.parametrize("name", CHECKS)
def test_causal_ones_are_not(name: str) -> None:
    CHECKS[name](CacheGroup("heads", (CAUSAL,), 16, 16), CAUSAL)
