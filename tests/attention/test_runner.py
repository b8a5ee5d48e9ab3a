"""GroupRunner: equal layers share a plan, and what a backend cannot do is refused before anything is allocated."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import attention.runner
from attention.backends.reference import TorchBackend, attend
from attention.batch.host import rows_batch
from attention.batch.metadata import CommonAttentionMetadata, single_batch_arena, stage
from attention.cache.kv_cache import CacheGroup
from attention.errors import InvalidInputError, InvariantError, UnsupportedAttentionError
from attention.runner import GroupRunner
from attention.spec import AttentionSpec, TemperatureTuning

CPU = torch.device("cpu")
PLAIN = AttentionSpec(2, 1, 8, 8, scale=0.3)
WINDOW = replace(PLAIN, window=3)
LOCAL = replace(PLAIN, chunk_size=4)
TUNED = replace(PLAIN, temperature=TemperatureTuning(scale=2.0, floor=3.0))


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


def test_layers_in_chunks_and_tuned_ones_beside_plain_ones() -> None:
    """Rows of 11 and 6 tokens, read in two batches; every layer against dense attention with a mask of its own."""
    specs = (PLAIN, LOCAL, TUNED, replace(LOCAL, chunk_size=8, temperature=TUNED.temperature))
    runner = GroupRunner(TorchBackend(CPU), CacheGroup("g", specs, num_pages=6, page_size=4), torch.float32, CPU)
    table, stops = np.array([[3, 1, 5], [2, 4, 0]], np.int32), np.array([11, 6])
    query, key, value = (torch.randn(2, 11, heads, 8) for heads in (2, 1, 1))
    place = np.arange(11)
    factor = torch.from_numpy(1 + 2.0 * np.log1p((place + 1) // 3)).float()[:, None, None]
    for first, stop in ((np.array([0, 0]), np.array([7, 1])), (np.array([7, 1]), stops)):
        starts = np.concatenate([[0], np.cumsum(stop - first)])
        batch = rows_batch(starts, first, table, 4)
        planned = runner.plan(stage(batch, *single_batch_arena(2, batch.num_tokens, 3, CPU)))
        spans = [slice(a, b) for a, b in zip(first.tolist(), stop.tolist(), strict=True)]
        states = [torch.cat([x[row, span] for row, span in enumerate(spans)]) for x in (query, key, value)]
        for layer, spec in enumerate(specs):
            ours = runner.attend(planned, layer, *states)
            chunk = place // (spec.chunk_size or 99)
            mask = torch.from_numpy((place <= place[:, None]) & (chunk == chunk[:, None]))[None, None]
            q = query if spec.temperature is None else query * factor
            dense = attend(*(x.transpose(1, 2) for x in (q, key, value)), mask, PLAIN).transpose(1, 2)
            right = torch.cat([dense[row, span] for row, span in enumerate(spans)])
            torch.testing.assert_close(ours, right, msg=lambda text, spec=spec: f"{spec}: {text}")  # type: ignore[misc]


def test_a_backend_is_given_the_rows_that_a_layer_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels without a plan read lengths and pages from the metadata that they run with."""
    runner = GroupRunner(TorchBackend(CPU), group(PLAIN, LOCAL), torch.float32, CPU)
    given: list[CommonAttentionMetadata] = []
    monkeypatch.setattr(TorchBackend, "run", lambda self, *args: given.append(args[6]) or torch.zeros(6, 2, 8))
    batch = rows_batch(np.array([0, 6]), np.array([0]), np.array([[1, 2]], np.int32), 4)
    planned = runner.plan(stage(batch, *single_batch_arena(1, 6, 2, CPU)))
    for layer in (0, 1):
        runner.attend(planned, layer, *torch.zeros(3, 6, 2, 8))
    assert [metadata.seq_lens.tolist() for metadata in given] == [[6], [4, 2]]


def test_rows_within_their_first_chunk_are_not_sent_again() -> None:
    far = replace(LOCAL, chunk_size=8)
    runner = GroupRunner(TorchBackend(CPU), group(LOCAL, far), torch.float32, CPU)
    batch = rows_batch(np.array([0, 5, 7]), np.array([0, 0]), np.array([[1, 2], [3, 0]], np.int32), 4)
    sent = stage(batch, *single_batch_arena(2, 7, 2, CPU))
    planned = runner.plan(sent)
    assert planned.rows[far] is sent and planned.rows[LOCAL].seq_lens.tolist() == [4, 1, 2]


def test_the_factors_of_queries_are_those_of_transformers() -> None:
    tuning = TemperatureTuning(scale=0.1, floor=8192.0)
    runner = GroupRunner(TorchBackend(CPU), group(replace(PLAIN, temperature=tuning)), torch.float32, CPU)
    batch = rows_batch(np.array([0, 1]), np.array([3]), np.array([[1]], np.int32), 4)
    far = replace(batch, positions=np.array([40_000]))
    planned = runner.plan(stage(far, *single_batch_arena(1, 1, 1, CPU)))
    query, state = torch.randn(1, 2, 8), torch.randn(1, 1, 8)
    runner.attend(planned, 0, query, state, state)
    (factors,) = planned.temperatures.values()
    assert factors.shape == (1, 1, 1) and factors.item() == pytest.approx(1 + 0.1 * math.log(1 + 4))


def test_padding_has_a_factor_too() -> None:
    """Queries of a graph by segments are as many as its bucket has tokens."""
    runner = GroupRunner(TorchBackend(CPU), group(TUNED), torch.float32, CPU)
    states = [torch.randn(5, heads, 8) for heads in (2, 1, 1)]
    padded = runner.attend(runner.plan(metadata()), 0, *states, None, torch.zeros(5, 2, 8))
    assert torch.equal(padded[:3], runner.attend(runner.plan(metadata()), 0, *(x[:3] for x in states)))
    assert not padded[3:].any()


def test_local_and_tuned_layers_are_refused_where_they_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.runner, "allocate", lambda *args: pytest.fail("allocated"))
    with pytest.raises(
        InvalidInputError, match="chunks of 6 tokens needs a page size that divides 6; given pages of 4"
    ):
        GroupRunner(TorchBackend(CPU), group(PLAIN, replace(LOCAL, chunk_size=6)), torch.float32, CPU)


def test_routes_name_the_chunks() -> None:
    runner = GroupRunner(TorchBackend(CPU), group(PLAIN, LOCAL), torch.float32, CPU)
    assert runner.routes == ("torch reference, cache float32", "torch reference, cache float32, in chunks of 4 tokens")


def test_attention_that_is_not_contiguous_is_noticed() -> None:
    class Strided(TorchBackend):
        def run(self, *args: Any) -> torch.Tensor:
            return super().run(*args).transpose(0, 1).contiguous().transpose(0, 1)

    runner = GroupRunner(Strided(CPU), group(PLAIN), torch.float32, CPU)
    with pytest.raises(InvariantError, match="'torch' returned attention that is not contiguous"):
        runner.attend(runner.plan(metadata()), 0, torch.randn(3, 2, 8), torch.randn(3, 1, 8), torch.randn(3, 1, 8))
