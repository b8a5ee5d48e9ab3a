"""The workspace's size against the planner's own arithmetic, over many batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from attention.backends.flashinfer.wrapper import LEAST_BYTES, PlanShape, split_bytes
from attention.spec import AttentionSpec

SMS = 132


@dataclass(frozen=True)
class Planned:
    """What FlashInfer's planner asks its float workspace for, and the rows of partial results of the batch."""

    nbytes: int
    reserved: int
    used: int


def tile_of(queries: int, dim: int) -> int:
    """FA2DetermineCtaTileQ (flashinfer-ai/flashinfer 0.7.2, utils.cuh), Ampere or newer, 16-bit caches."""
    if queries > 64 and dim < 256:
        return 128
    return 64 if queries > 16 else 16


def plan(
    key: AttentionSpec, query_lens: np.ndarray, pages: np.ndarray, page_size: int, graph: bool, uneven: bool = False
) -> Planned:
    """PrefillSplitQOKVIndptr and PrefillPlanImpl (flashinfer-ai/flashinfer 0.7.2, scheduler.cuh), without a window.

    uneven: for a graph without uniform_q_len.
    """
    group, dim = key.num_q_heads // key.num_kv_heads, key.head_dim_v
    queries, most = query_lens * group, 2 * SMS // key.num_kv_heads
    longest_query = (int(query_lens.sum()) - len(query_lens) + 1) * group if uneven else int(queries[0])
    tile = tile_of(longest_query if graph else int(queries.sum()) // len(queries), dim)
    tiles = -(-queries // tile)
    most_tiles = -(-int(queries.sum()) // tile) + len(queries) - 1 if uneven else int(tiles.sum())
    assert int(tiles.sum()) <= most_tiles
    low, high = max(128 // page_size, 1), max(int(pages.max()), 1)
    longest = high
    while low < high:
        middle = (low + high) // 2
        if int((tiles * -(-np.maximum(pages, 1) // middle)).sum()) > most:
            low = middle + 1
        else:
            high = middle
    if not (graph or low < longest):
        return Planned(0, 0, 0)
    parts = -(-np.maximum(pages, 1) // low)
    blocks = max(most, most_tiles) if graph else int((tiles * parts).sum())
    reserved = -(-blocks * tile // group)
    align = [-(-4 * key.num_q_heads * reserved * width // 16) * 16 for width in (dim, 1)]
    return Planned(sum(align), reserved, int((query_lens * parts).sum()))


@pytest.mark.parametrize("heads", [(32, 8), (16, 1), (48, 1), (71, 1), (128, 1), (28, 4), (8, 8), (64, 32)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_plan_fits(heads: tuple[int, int], dim: int) -> None:
    key, rng = AttentionSpec(*heads, dim, dim, scale=1.0), np.random.default_rng(0)
    for rows in (1, 2, 5, 16, 64, 128, 250):
        for query_len in (1, 2, 6, 17, 64):
            pages = rng.integers(1, 1 + int(rng.choice([2, 40, 600, 4000])), rows)
            ragged = rng.integers(1, query_len + 1, rows)
            for page_size in (1, 16, 64):
                fixed = plan(key, np.full(rows, query_len), pages, page_size, graph=True)
                assert fixed.nbytes <= split_bytes(key, SMS, PlanShape(rows, query_len))
                assert fixed.used <= fixed.reserved, "the transcribed planner reserves too little for itself"
                assert plan(key, ragged, pages, page_size, graph=False).nbytes <= split_bytes(key, SMS)


@pytest.mark.parametrize("heads", [(32, 8), (128, 1), (71, 1), (8, 8)])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_row_of_65_536_keys_beside_short_ones_fits(heads: tuple[int, int], page_size: int) -> None:
    """A long row is split into more parts, but there are no more blocks for them than in any other batch."""
    key, rng = AttentionSpec(*heads, 128, 128, scale=1.0), np.random.default_rng(0)
    for rows in (1, 2, 16, 33, 128):
        pages = rng.integers(1, 1 + 1200 // page_size, rows)
        pages[0] = 65_536 // page_size
        for query_len in (1, 6, 17):
            fixed = plan(key, np.full(rows, query_len), pages, page_size, graph=True)
            assert fixed.nbytes <= split_bytes(key, SMS, PlanShape(rows, query_len))
            assert 0 < fixed.used <= fixed.reserved
            assert plan(key, np.full(rows, query_len), pages, page_size, graph=False).nbytes <= split_bytes(key, SMS)


@pytest.mark.parametrize("heads", [(32, 8), (40, 8), (16, 1), (71, 1)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_virtual_rows_of_attention_in_chunks_fit(heads: tuple[int, int], dim: int) -> None:
    """Two for every row, of which the second often has no tokens."""
    key, rng = AttentionSpec(*heads, dim, dim, scale=1.0), np.random.default_rng(0)
    for rows in (1, 2, 5, 16, 64, 128):
        for query_len in (2, 6, 17, 64):
            first = rng.integers(1, query_len + 1, rows)
            lens = np.stack([first, query_len - first], 1).reshape(-1)
            pages = np.where(lens > 0, rng.integers(1, 600, 2 * rows), 1)
            fixed = plan(key, lens, pages, 16, graph=True, uneven=True)
            assert fixed.used <= fixed.reserved
            assert fixed.nbytes <= split_bytes(key, SMS, PlanShape(2 * rows, query_len, rows * query_len))


def test_the_constant_of_old_was_not_enough_for_every_batch() -> None:
    """More than 256 MiB: one KV head, 128 query heads, 31 drafts, 200 rows."""
    key = AttentionSpec(128, 1, 128, 128, scale=1.0)
    needed = plan(key, np.full(200, 32), np.full(200, 512), 16, graph=True).nbytes
    assert LEAST_BYTES < needed == split_bytes(key, SMS, PlanShape(200, 32))


def test_batches_outside_graphs_never_need_more() -> None:
    """Split tiles are at most two a multiprocessor, so that the least is enough for any model on 300 of them."""
    keys = (AttentionSpec(q, kv, d, d, 1.0) for q, kv in ((1, 1), (71, 1), (128, 1), (128, 8)) for d in (64, 128, 256))
    assert max(split_bytes(key, 300) for key in keys) < LEAST_BYTES
