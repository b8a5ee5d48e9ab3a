"""GroupRunner: equal layers share a plan, and what a backend cannot do is refused before anything is allocated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import attention.runner
from attention.backends.reference import TorchBackend
from attention.batch.metadata import CommonAttentionMetadata, single_batch_arena, stage
from attention.cache.kv_cache import CacheGroup
from attention.errors import InvariantError, UnsupportedAttentionError
from attention.runner import GroupRunner
from attention.spec import AttentionSpec
from drafters.loops.chain.index import rows_batch

CPU = torch.device("cpu")
PLAIN = AttentionSpec(2, 1, 8, 8, scale=0.3)
WINDOW = replace(PLAIN, window=3)


def group(*specs: AttentionSpec) -> CacheGroup:
    return CacheGroup("g", specs, num_pages=4, page_size=4)


def metadata() -> CommonAttentionMetadata:
    """One row of three tokens on page 1."""
    batch = rows_batch(np.array([0, 3]), np.array([0]), np.array([[1]], np.int32), 4)
    return stage(batch, *single_batch_arena(1, 3, 1, CPU))


def test_layers_with_equal_specs_share_a_plan() -> None:
    runner = GroupRunner(TorchBackend(CPU), group(PLAIN, WINDOW, PLAIN), torch.float32, CPU)
    assert len(runner.layers) == 3
    assert list(runner.plan(metadata()).plans) == [PLAIN, WINDOW]


def test_each_layer_attends_with_its_own_spec_and_pages() -> None:
    runner = GroupRunner(TorchBackend(CPU), group(PLAIN, replace(PLAIN, window=1), PLAIN), torch.float32, CPU)
    planned = runner.plan(metadata())
    query, key, value = torch.randn(3, 2, 8), torch.randn(3, 1, 8), torch.randn(3, 1, 8)
    wide, narrow = (runner.attend(planned, layer, query, key, value) for layer in (0, 1))
    torch.testing.assert_close(narrow, value.expand(3, 2, 8))  # a window of one: the token's own value
    assert not torch.allclose(wide[1:], narrow[1:])
    assert runner.layers[0].keys[1].any() and not runner.layers[2].keys.any()


def test_a_variant_that_a_backend_lacks_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Narrow(TorchBackend):
        def builder(self, group: CacheGroup, key: AttentionSpec, dtype: torch.dtype) -> Any:
            if key.window is not None:
                raise UnsupportedAttentionError("no windows")
            return super().builder(group, key, dtype)

    allocated: list[Any] = []
    monkeypatch.setattr(attention.runner, "allocate", lambda *args: allocated.append(args))
    with pytest.raises(UnsupportedAttentionError, match="no windows"):
        GroupRunner(Narrow(CPU), group(PLAIN, WINDOW), torch.float32, CPU)
    assert allocated == []


def test_a_backend_without_graphs_has_no_fixed_plans() -> None:
    runner = GroupRunner(TorchBackend(CPU), group(PLAIN), torch.float32, CPU)
    with pytest.raises(UnsupportedAttentionError, match="'torch' has no plans that a CUDA graph can hold"):
        runner.fixed_planner(2, 4)


def test_attention_that_is_not_contiguous_is_noticed() -> None:
    class Strided(TorchBackend):
        def run(self, *args: Any) -> torch.Tensor:
            return super().run(*args).transpose(0, 1).contiguous().transpose(0, 1)

    runner = GroupRunner(Strided(CPU), group(PLAIN), torch.float32, CPU)
    with pytest.raises(InvariantError, match="'torch' returned attention that is not contiguous"):
        runner.attend(runner.plan(metadata()), 0, torch.randn(3, 2, 8), torch.randn(3, 1, 8), torch.randn(3, 1, 8))
