"""What every backend refuses by name."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attention.backends import flex, invariant
from attention.backends.flashinfer import backend as flashinfer
from attention.backends.reference import TorchBackend
from attention.batch.host import rows_batch
from attention.batch.metadata import single_batch_arena, stage
from attention.cache.kv_cache import FP8, CacheGroup, KVFormat
from attention.errors import InvalidInputError, UnsupportedAttentionError
from attention.runner import GroupRunner
from attention.spec import AttentionSpec

CAUSAL = AttentionSpec(2, 1, 64, 64, 0.125)
CPU = torch.device("cpu")
CHECKS = {
    "batch_invariant on a CPU": lambda group, key: TorchBackend(CPU, exact=True).builder(group, key, torch.float16),
    "flex": lambda group, key: flex.check_supported(group, key, torch.float16, CPU),
    "batch_invariant": lambda group, key: invariant.check_supported(group, key, torch.float16),
    "flashinfer": lambda group, key: flashinfer.check_supported(group, key, torch.float16),
}


@pytest.mark.parametrize("name", [name for name in CHECKS if name != "flashinfer"])
@pytest.mark.parametrize("key", [CAUSAL, replace(CAUSAL, num_kv_heads=1, value_in_key=True)])
def test_tokens_that_see_those_after_them_are_refused_by_name(name: str, key: AttentionSpec) -> None:
    group = CacheGroup("heads", (key,), 16, 16)
    backend = name.split()[0]
    with pytest.raises(
        UnsupportedAttentionError, match=rf"group heads: backend '{backend}' has causal attention alone"
    ):
        CHECKS[name](group, replace(key, causal=False))


@pytest.mark.parametrize(
    ("changes", "format", "reason"),
    [
        ({"num_kv_heads": 1, "value_in_key": True}, None, "has heads of 64 and 128 numbers"),
        ({"head_dim_k": 80, "head_dim_v": 80}, None, "has heads of 64 and 128 numbers"),
        ({}, FP8, "has no cache in 8 bits"),
        ({"softcap": 30.0}, None, "has no softcap and no sinks"),
        ({"has_sinks": True}, None, "has no softcap and no sinks"),
    ],
)
def test_what_the_packed_kernel_lacks_is_refused(changes: dict[str, Any], format: Any, reason: str) -> None:
    key = replace(CAUSAL, causal=False, **changes)
    group = CacheGroup("heads", (key,), 16, 16, format=KVFormat(format))
    with pytest.raises(UnsupportedAttentionError, match=f"group heads: attention that is not causal {reason}"):
        flashinfer.check_supported(group, key, torch.float16)
    windowed = replace(CAUSAL, causal=False, window=100)
    flashinfer.check_supported(CacheGroup("heads", (windowed,), 16, 16), windowed, torch.float16)


@pytest.mark.parametrize("name", CHECKS)
def test_causal_ones_are_not(name: str) -> None:
    CHECKS[name](CacheGroup("heads", (CAUSAL,), 16, 16), CAUSAL)


def test_a_registered_backend_is_refused_unless_it_says_that_it_serves_them() -> None:
    group = CacheGroup("heads", (CAUSAL, replace(CAUSAL, causal=False)), 16, 16)
    elsewhere: Any = SimpleNamespace(name="elsewhere", builder=TorchBackend(CPU).builder)
    with pytest.raises(UnsupportedAttentionError, match="backend 'elsewhere' has causal attention alone"):
        GroupRunner(elsewhere, group, torch.float16, CPU)
    runner = GroupRunner(TorchBackend(CPU), group, torch.float16, CPU)
    assert len(runner.routes) == 1, "one kernel"
    batch = rows_batch(np.array([0, 2]), np.array([0]), np.array([[1]]), 16)
    planned = runner.plan(stage(batch, *single_batch_arena(1, 2, 1, CPU)))
    assert planned.plans is not None and len(planned.plans) == 2, "but a plan for each"


@pytest.mark.parametrize("what", [{"chunk_size": 4}, {"alibi": (0.5, 0.25)}])
def test_neither_slopes_nor_chunks_go_both_ways(what: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="causal=False has no ALiBi slopes and no chunks"):
        replace(CAUSAL, causal=False, **what)
