"""Page lists that begin near what a query sees, a window or its chunk, give what whole rows give under it, and read no
freed page."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import free_pages
from hypothesis import given, settings
from hypothesis import strategies as st

import attention.batch.transforms.windowed as windowed_module
from attention.backends.reference import TorchBackend, attend
from attention.batch.host import rows_batch, slots_of
from attention.batch.metadata import single_batch_arena, stage
from attention.batch.transforms.decode_first import decode_first_swaps, swapped
from attention.batch.transforms.slices import request_slices, token_slices
from attention.batch.transforms.windowed import first_listed, most_listed_pages, windowed_batch
from attention.cache.kv_cache import CacheGroup, write
from attention.cache.windowed import WindowedTables
from attention.runner import GroupRunner
from attention.spec import AttentionSpec, Reach

CPU = torch.device("cpu")


def attended(
    computed: list[int], lens: list[int], kind: dict[str, int], page: int, tile: int, early: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Paged attention of rows whose pages before what is seen are freed and NaN, and dense attention with a mask.

    kind: the window or the chunk_size. early: tokens by which pages are freed too early.
    """
    spec = AttentionSpec(4, 2, 8, 8, scale=8**-0.5, **kind)  # type: ignore[arg-type]
    reach = spec.reach
    assert reach is not None
    seqs = np.array(computed) + lens
    rows, total = len(lens), int((seqs // page + 2).sum())
    tables = WindowedTables(total, rows, int(seqs.max()) + page, page, reach)
    tables.resize(range(rows), seqs)
    runner = GroupRunner(TorchBackend(CPU), CacheGroup("g", (spec,), total, page), torch.float64, CPU)
    layer, generator = runner.layers[0], torch.Generator().manual_seed(0)
    layer.keys[1:], layer.values[1:] = float("nan"), float("nan")
    states = [[torch.randn(n, h, 8, generator=generator, dtype=torch.float64) for h in (4, 2, 2)] for n in seqs]
    for row, (_, k, v) in enumerate(states):
        places = np.arange(computed[row])
        slots = slots_of(tables.table, np.full(len(places), row), places, page)
        write(layer, k[: len(places)], v[: len(places)], torch.from_numpy(slots))
    tables.free_behind(np.arange(rows), np.array(computed) + early)
    freed = torch.tensor(free_pages(tables.allocator), dtype=torch.int64)
    layer.keys[freed], layer.values[freed] = float("nan"), float("nan")
    starts = np.concatenate([[0], np.cumsum(lens)])
    whole = rows_batch(starts, np.array(computed), tables.table, page)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windowed_module, "TILE_KEYS", tile)
        batch = windowed_batch(whole, tables.table, np.arange(rows), reach)
        batch.validate()
        most = max(most_listed_pages(reach, n, page) for n in lens)
        assert int(batch.page_counts.max()) <= most
    plain = replace(whole, block_table=batch.block_table, seq_lens=batch.seq_lens)
    assert batch.page_indices.tolist() == plain.page_indices.tolist(), "the list is the table's"
    assert batch.page_indptr.tolist() == plain.page_indptr.tolist()
    assert batch.last_page_len.tolist() == whole.last_page_len.tolist(), "which therefore travels once"
    arena, bucket = single_batch_arena(rows, len(whole.positions), batch.block_table.shape[1], CPU)
    planned = runner.plan(stage(batch, arena, bucket))
    flat = [torch.cat([own[i][n:] for own, n in zip(states, computed, strict=True)]) for i in range(3)]
    ours = runner.attend(planned, 0, *flat)
    right, (size,) = [], kind.values()
    for (q, k, v), n in zip(states, computed, strict=True):
        place, key = np.arange(n, len(k))[:, None], np.arange(len(k))
        seen = key > place - size if "window" in kind else key // size == place // size
        mask = torch.from_numpy((key <= place) & seen)[None, None]
        right.append(attend(*(x.transpose(0, 1)[None] for x in (q[n:], k, v)), mask, spec)[0].transpose(0, 1))
    return ours, torch.cat(right)


ROWS = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 25)), min_size=1, max_size=4)


@settings(deadline=None)
@given(ROWS, st.integers(1, 40), st.sampled_from([1, 3, 4, 16]), st.sampled_from([1, 8, 128]))
def test_the_window_and_nothing_else_is_attended(
    rows: list[tuple[int, int]], window: int, page: int, tile: int
) -> None:
    ours, right = attended([n for n, _ in rows], [n for _, n in rows], {"window": window}, page, tile)
    torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-9)


@settings(deadline=None)
@given(ROWS, st.integers(1, 12), st.sampled_from([1, 3, 4, 16]), st.sampled_from([1, 8, 128]))
def test_the_chunk_and_nothing_else_is_attended(rows: list[tuple[int, int]], pages: int, page: int, tile: int) -> None:
    """Of `pages` pages each: rows within one chunk and over several, lists from a chunk on and from before it."""
    ours, right = attended([n for n, _ in rows], [n for _, n in rows], {"chunk_size": pages * page}, page, tile)
    torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-9)


def test_a_page_freed_too_early_shows() -> None:
    """The last token before the page's end was the first key of the window."""
    right = attended([21], [2], {"window": 10}, 4, 1)
    torch.testing.assert_close(*right)
    ours, dense = attended([22], [2], {"window": 10}, 4, 1, early=3)
    assert not torch.allclose(ours, dense, equal_nan=False)


def test_a_chunk_freed_a_token_too_early_shows() -> None:
    """At 23 the chunk of 12 … 23 is seen once more, at 24 never again."""
    for computed in (23, 24):
        torch.testing.assert_close(*attended([computed], [2], {"chunk_size": 12}, 4, 1))
    ours, dense = attended([23], [2], {"chunk_size": 12}, 4, 1, early=1)
    assert not torch.allclose(ours, dense, equal_nan=False)


@given(st.integers(0, 5000), st.integers(1, 2000), st.sampled_from([1, 16, 64, 256]))
def test_lists_begin_on_a_tile_and_a_page_before_the_window(start: int, window: int, page: int) -> None:
    first = int(first_listed(np.array([start]), Reach(window), page)[0])
    assert first % 128 == 0 and first % page == 0 and 0 <= first <= max(start - window + 1, 0)
    assert max(start - window + 1, 0) - first < max(128, page)


@given(st.integers(0, 50000), st.integers(1, 600), st.sampled_from([1, 16, 64, 256]), st.integers(1, 40))
def test_lists_begin_on_a_chunk_a_tile_and_a_page(start: int, pages: int, page: int, query_len: int) -> None:
    """With chunks of whole tiles, as Llama 4's of 8,192, exactly where the chunk of the first query does."""
    chunk, seen = pages * page, start - start % (pages * page)
    first = int(first_listed(np.array([start]), Reach(chunk, chunk), page)[0])
    assert first % chunk == first % 128 == first % page == 0 and 0 <= first <= seen
    assert first == seen or chunk % 128
    assert -(-(start + query_len - first) // page) <= most_listed_pages(Reach(chunk, chunk), query_len, page)


def test_slices_and_reordered_rows_keep_their_groups() -> None:
    """Cutting or reordering the batch is cutting or reordering each group's."""
    tables = np.arange(1, 161, dtype=np.int32).reshape(2, 80)
    whole = rows_batch(np.array([0, 20, 23]), np.array([100, 250]), tables, 4)
    group = windowed_batch(whole, tables[::-1].copy(), np.arange(2), Reach(30))
    batch = replace(whole, other_groups=(group,))
    made = [*zip(request_slices(batch, [1]), request_slices(group, [1]), strict=True)]
    made += [*zip(token_slices(batch, [7]), token_slices(group, [7]), strict=True)]
    swaps = decode_first_swaps(batch.query_lens, 16)
    made.append((swapped(batch, swaps), swapped(group, swaps)))
    for found, right in made:
        (own,) = found.other_groups
        own.validate()
        assert own.page_indices.tolist() == right.page_indices.tolist()
        assert own.slot_mapping.tolist() == right.slot_mapping.tolist()
        assert own.query_start_loc.tolist() == found.query_start_loc.tolist()


def test_keys_are_written_to_the_rows_own_pages_wherever_it_is_in_the_table() -> None:
    own = rows_batch(np.array([0, 2, 3]), np.array([30, 9]), np.arange(1, 9, dtype=np.int32).reshape(2, 4), 16)
    table = np.arange(100, 116, dtype=np.int32).reshape(4, 4)
    found = windowed_batch(own, table, np.array([3, 1]), Reach(32))
    assert found.slot_mapping.tolist() == [113 * 16 + 14, 113 * 16 + 15, 104 * 16 + 9]
    assert found.page_indices.tolist() == [112, 113, 104]
