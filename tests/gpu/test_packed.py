"""The kernel of rows with short queries against the torch reference, and where it serves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from attention.backends.flashinfer.short_queries import PackedKernel, is_packed
from attention.batch.metadata import single_batch_arena, stage
from attention.cache.kv_cache import FP8, CacheGroup, KVFormat
from attention.runner import PlannedBatch
from tests.gpu.test_flashinfer import (
    CUDA,
    LIMIT,
    NUM_PAGES,
    Pair,
    attention_spec,
    host_batch,
    metadata_of,
    relative_error,
)


def packed_pair(heads: tuple[int, int] = (32, 8), dim: int = 128, *args: Any, **options: Any) -> Pair:
    """A pair without FlashInfer's own kernels, which take minutes to build."""
    from attention.backends.flashinfer.backend import FlashInferBackend

    class FixedOnly(FlashInferBackend):
        def builder(self, *args: Any) -> Any:
            return None

    dtype, *rest = args or (torch.bfloat16,)
    return Pair(attention_spec(heads, dim, **options), dtype, *rest, backend=FixedOnly(CUDA))


def kernel_of(pair: Pair, rows: int, query_len: int) -> object:
    builder: Any = pair.flashinfer.fixed_planner(rows, query_len).builders[pair.key]
    return builder._kernel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("heads", "dim", "page_size", "query_len"),
    [((32, 8), 128, 16, 6), ((32, 8), 128, 16, 1), ((32, 8), 64, 64, 8), ((8, 8), 128, 1, 3), ((28, 4), 128, 32, 4)],
)
def test_equals_the_reference(
    heads: tuple[int, int], dim: int, page_size: int, query_len: int, layout: str, dtype: torch.dtype
) -> None:
    """Replays of one captured launch, for rows of all lengths up to several tiles of keys."""
    rows = 70 if heads[1] == 4 else 40
    pair = packed_pair(heads, dim, dtype, page_size, layout)
    assert isinstance(kernel_of(pair, rows, query_len), PackedKernel)
    planner = pair.flashinfer.fixed_planner(rows, query_len)
    rng = np.random.default_rng(rows)
    arena, bucket = single_batch_arena(rows, rows * query_len, 600, CUDA)
    static = pair.states(rows * query_len)
    metadata = stage(host_batch([query_len] * rows, [0] * rows, page_size), arena, bucket)
    plan = planner.plan(metadata)
    pair.flashinfer.attend(plan, 0, *static)
    pair.expected(metadata, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = pair.flashinfer.attend(plan, 0, *static)
    for longest in (5, 130, 400):
        computed = rng.integers(0, longest, rows)
        computed[0] = longest // 128 * 128 + 128 - query_len if longest > 128 else 0  # ends with a tile of keys
        metadata = stage(host_batch([query_len] * rows, computed.tolist(), page_size, seed=longest), arena, bucket)
        planner.replan(metadata.host)
        graph.replay()
        expected = pair.expected(metadata, static)
        for row in range(rows):  # a row by itself: a wrong one must not hide behind the others
            tokens = slice(row * query_len, (row + 1) * query_len)
            assert relative_error(out[tokens], expected[tokens]) <= 2 * LIMIT[dtype]
        assert relative_error(out, expected) <= LIMIT[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "query_len", "window"), [(1, 16, None), (8, 8, None), (32, 16, 9), (40, 7, 300)])
def test_blocks_attend_both_ways(rows: int, query_len: int, window: int | None, dtype: torch.dtype) -> None:
    """As a graph holds it and planned for one batch; rows of one page and of many."""
    pair = packed_pair((32, 8), 128, dtype, causal=False, window=window)
    computed = np.random.default_rng(rows).integers(0, 900, rows).tolist()
    computed[0] = 0
    metadata = metadata_of(host_batch([query_len] * rows, computed, 16))
    states = pair.states(query_len * rows)
    expected = pair.expected(metadata, states)
    from attention.backends.flashinfer.backend import FlashInferBackend

    plans = [pair.flashinfer.fixed_planner(rows, query_len).plan(metadata)]
    builder = FlashInferBackend(CUDA).builder(pair.flashinfer.group, pair.key, dtype)
    plans.append(PlannedBatch(metadata, {pair.key: builder.build(metadata)}, {pair.key: metadata}))
    for plan in plans:
        out = pair.flashinfer.attend(plan, 0, *states)
        for row in range(rows):
            tokens = slice(row * query_len, (row + 1) * query_len)
            assert relative_error(out[tokens], expected[tokens]) <= 2 * LIMIT[dtype]
        assert relative_error(out, expected) <= LIMIT[dtype]


@pytest.mark.parametrize("rows", [1, 2, 8, 16, 40, 90])
def test_long_rows_beside_short_ones(rows: int) -> None:
    """Rows in parts, one for a program or several, and whole rows; twice, since the last part of a row clears up."""
    pair = packed_pair()
    metadata = metadata_of(host_batch([6] * rows, ([3000, 700, 3, 1500] + [60] * rows)[:rows], 16))
    states = pair.states(6 * rows)
    plan, expected = pair.flashinfer.fixed_planner(rows, 6).plan(metadata), pair.expected(metadata, states)
    for _ in range(2):
        out = pair.flashinfer.attend(plan, 0, *states)
        for row in range(rows):
            tokens = slice(6 * row, 6 * row + 6)
            assert relative_error(out[tokens], expected[tokens]) <= 6e-3
        assert relative_error(out, expected) <= 3e-3


def test_the_comparison_can_fail() -> None:
    """A key of another row's page counts."""
    rows = 40
    pair = packed_pair()
    batch = host_batch([6] * rows, [100] * rows, 16)
    metadata, states = metadata_of(batch), pair.states(6 * rows)
    planner = pair.flashinfer.fixed_planner(rows, 6)
    plan = planner.plan(metadata)
    metadata.page_indices[0] = int(batch.block_table[1, 0])
    out = pair.flashinfer.attend(plan, 0, *states)
    metadata.page_indices[0] = int(batch.block_table[0, 0])
    assert relative_error(out[:6], pair.expected(metadata, states)[:6]) > 3e-3


@pytest.mark.parametrize(
    ("options", "format", "query_len"),
    [
        ({}, None, 9),
        ({}, FP8, 6),
        ({"window": 100}, None, 6),
        ({"softcap": 30.0}, None, 6),
        ({"has_sinks": True}, None, 6),
    ],
    ids=["many tokens", "8 bits", "window", "softcap", "sinks"],
)
def test_all_else_is_flashinfers(options: dict[str, object], format: torch.dtype | None, query_len: int) -> None:
    key = attention_spec(**options)
    group = CacheGroup("test", (key,), NUM_PAGES, 16, format=KVFormat(format))
    assert not is_packed(group, key, torch.bfloat16, query_len)


def test_the_public_shape_is_served() -> None:
    key = attention_spec()
    assert is_packed(CacheGroup("test", (key,), NUM_PAGES, 16), key, torch.bfloat16, 6)


def test_the_route_names_it() -> None:
    from attention.backends.flashinfer.backend import FlashInferBackend

    backend, plain, windowed = FlashInferBackend(CUDA), attention_spec(), attention_spec(window=100)
    group = CacheGroup("test", (plain, windowed), NUM_PAGES, 16)
    assert "packed (up to 32 queries a KV head)" in backend.route(group, plain, torch.bfloat16)
    assert "packed" not in backend.route(group, windowed, torch.bfloat16)
