"""The MLA plan: every pair reads every key it sees once, and partial results are reduced at their places.

`walk` reads a list as the kernel does.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from fakes import examples, flashinfer_chunk_size, split_as_by_flashinfer
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.backends.flashinfer import mla_plan
from attention.backends.flashinfer.mla_plan import (
    LEAST_KEYS,
    WHOLE_KEYS,
    Arrays,
    PlanLayout,
    SplitKV,
    Tiles,
    write_all,
    write_lengths,
)
from attention.batch.host import HostBatch, rows_batch
from attention.errors import InvariantError

SMS = st.sampled_from([132, 108, 7])
HEADS = st.sampled_from([1, 4, 16, 128])
ROWS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3000)), min_size=1, max_size=12)


def host_batch(rows: list[tuple[int, int]]) -> HostBatch:
    """Rows of (query tokens, keys before them)."""
    query_lens, computed = (np.array(x) for x in zip(*rows, strict=True))
    pages = int((-(-(query_lens + computed) // 16)).max())
    table = 1 + np.arange(len(rows) * pages, dtype=np.int32).reshape(len(rows), pages)
    return rows_batch(np.concatenate([[0], np.cumsum(query_lens)]), computed, table, 16)


def planned(host: HostBatch, heads: int, sms: int, spare: int = 0) -> tuple[Tiles, SplitKV, PlanLayout, Arrays]:
    tiles = Tiles.of(host.query_start_loc, heads, sms)
    keys = tiles.keys(host.seq_lens)
    split = SplitKV.of(tiles, keys)
    layout = PlanLayout.of(tiles, len(split.tile) + spare, sms)
    arrays = layout.arrays(np.full(layout.nbytes // 4, -7, np.int32))
    write_all(arrays, tiles, split, keys, host)
    return tiles, split, layout, arrays


def walk(arrays: Arrays, tiles: Tiles, heads: int) -> dict[int, list[tuple[int, int]]]:
    """KV chunks [begin, end) that reach each (token, head) pair of the batch, reduced or written at once.

    Checks that no two partial results share a place, that places fit the workspace, and that a pair is written once.
    """
    written: dict[int, list[tuple[int, int]]] = {}
    partials: dict[int, tuple[int, int, int]] = {}
    for cluster in range(tiles.clusters):
        for item in range(arrays["work_indptr"][cluster], arrays["work_indptr"][cluster + 1]):
            a = {name: int(arrays[name][item]) for name in mla_plan.PER_ITEM}
            width = min(tiles.size, a["q_len"] * heads - a["q_start"])
            for i in range(width):
                pair = a["q_indptr"] * heads + a["q_start"] + i
                chunk = (a["kv_start"], a["kv_end"])
                if a["partial_indptr"] < 0:
                    assert pair not in written
                    written[pair] = [chunk]
                else:
                    place = a["partial_indptr"] + i
                    assert place not in partials and place < 2 * tiles.clusters * tiles.size
                    partials[place] = (pair, *chunk)
    for m in range(len(arrays["merge_partial_stride"])):
        start, stop, place, end, stride = (int(arrays[name][m]) for name in mla_plan.MERGES)
        for i in range(stop - start):
            assert start + i not in written
            found = [partials.pop(p) for p in range(place + i, end, stride)]
            assert all(pair == start + i for pair, _, _ in found)
            written[start + i] = [(begin, last) for _, begin, last in found]
    assert not partials
    return written


def check_plan(rows: list[tuple[int, int]], heads: int, sms: int) -> SplitKV:
    """Every (token, head) pair reads every key that it sees once, and the arrays say where the rows' pages are."""
    host = host_batch(rows)
    tiles, split, _, arrays = planned(host, heads, sms)
    assert len(split.tile) <= tiles.most_items
    written = walk(arrays, tiles, heads)
    assert sorted(written) == list(range(host.num_tokens * heads))
    owner = np.repeat(np.arange(host.num_reqs), host.query_lens)
    for pair, chunks in written.items():
        token = pair // heads
        ends = [0, *(end for _, end in sorted(chunks))]
        assert [begin for begin, _ in sorted(chunks)] == ends[:-1]
        assert int(host.positions[token]) < ends[-1] <= host.seq_lens[owner[token]]
    count = len(split.tile)
    assert (arrays["kv_indptr"][:count] == host.page_indptr[split.row]).all()
    assert (arrays["kv_len"][:count] == host.seq_lens[split.row]).all()
    return split


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(ROWS, HEADS, SMS)
@pytest.mark.thorough
def test_every_pair_reads_every_key_once(rows: list[tuple[int, int]], heads: int, sms: int) -> None:
    check_plan(rows, heads, sms)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("query_len", [1, 4])
def test_a_row_of_65_536_keys_beside_short_ones(query_len: int, heads: int) -> None:
    """Its KV chunks go to most clusters, and their partial results fit the workspace (see `walk`)."""
    rows = [(query_len, 65_536 - query_len), *((query_len, n) for n in (5, 800, 16, 300, 37, 1200, 64))]
    split = check_plan(rows, heads, 132)
    busy = int((np.diff(split.starts) > 0).sum())
    assert busy > 0.6 * (len(split.starts) - 1)


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(ROWS, st.integers(1, 12), HEADS, SMS)
@pytest.mark.thorough
def test_a_split_that_stays_is_that_of_the_new_lengths(
    rows: list[tuple[int, int]], more: int, heads: int, sms: int
) -> None:
    """Rows grow; where the split serves, writing the lengths gives the list that would be made anew."""
    tiles, split, _, arrays = planned(host_batch(rows), heads, sms)
    grown = host_batch([(query, computed + more) for query, computed in rows])
    keys = tiles.keys(grown.seq_lens)
    if not split.serves(tiles, keys):
        return
    write_lengths(arrays, split, keys, grown)
    written = walk(arrays, tiles, heads)
    _, _, _, anew = planned(grown, heads, sms)
    assert {p: sorted(s) for p, s in written.items()} == {p: sorted(s) for p, s in walk(anew, tiles, heads).items()}


@given(st.integers(1, 30), st.integers(0, 26), st.integers(0, 400))
def test_a_row_is_split_by_itself_while_the_batch_is_small(own: int, others: int, computed: int) -> None:
    """Up to 128 keys a cluster, neighbours and a longer query of the same row change no boundary."""
    alone = planned(host_batch([(1, computed)]), 16, 132)
    beside = planned(host_batch([(1, computed), *((1, 600 + i) for i in range(others))]), 16, 132)
    drafted = planned(host_batch([(4, computed), (4, own)]), 16, 132)

    def boundaries(found: tuple[Tiles, SplitKV, PlanLayout, Arrays]) -> set[int]:
        tiles, _, _, arrays = found
        return {begin for begin, _ in walk(arrays, tiles, 16)[0]}

    assert (
        boundaries(alone)
        == boundaries(beside)
        == set(range(0, computed + 1, LEAST_KEYS) if computed >= WHOLE_KEYS else [0])
    )
    inside = {begin for begin in boundaries(drafted) if begin <= computed}
    assert boundaries(alone) == inside or computed < WHOLE_KEYS < computed + 4


@given(ROWS, HEADS, SMS)
def test_without_a_least_chunk_size_the_split_is_flashinfers(rows: list[tuple[int, int]], heads: int, sms: int) -> None:
    host = host_batch(rows)
    with split_as_by_flashinfer():
        tiles, split, _, _ = planned(host, heads, sms)
    expected: list[tuple[int, int]] = []
    cluster = 2 if host.num_tokens * heads // host.num_reqs > 64 else 1
    tile, clusters = 64 * cluster, sms // cluster
    for row, (query, seq) in enumerate(zip(host.query_lens.tolist(), host.seq_lens.tolist(), strict=True)):
        count = -(-query * heads // tile)
        for t in range(count):
            expected.append((row, seq if t + 1 == count else min(seq - query + -(-(t + 1) * tile // heads), seq)))
    mean = max(-(-sum(keys for _, keys in expected) // clusters), 1)
    limit = flashinfer_chunk_size(mean)
    assert tiles.chunk_size(tiles.keys(host.seq_lens)) == (limit if mean > LEAST_KEYS else LEAST_KEYS)
    items = Counter((row, begin) for row, keys in expected for begin in range(0, max(keys, 1), limit))
    assert Counter(zip(split.row.tolist(), split.begin.tolist(), strict=True)) == items


def test_the_longest_items_come_first_and_clusters_share_evenly() -> None:
    tiles, split, _, _ = planned(host_batch([(1, 100 + 7 * i) for i in range(200)]), 16, 132)
    keys = tiles.keys(np.array([101 + 7 * i for i in range(200)]))[split.tile] - split.begin
    keys = np.minimum(keys, split.chunk_size)
    loads = [int(keys[a:b].sum()) for a, b in zip(split.starts[:-1], split.starts[1:], strict=True)]
    assert max(loads) <= np.mean(loads) + split.chunk_size
    assert keys[split.starts[:-1]].tolist() == sorted(keys[split.starts[:-1]], reverse=True)


def test_arrays_lie_on_multiples_of_16_bytes_in_the_plans_order() -> None:
    _, _, layout, arrays = planned(host_batch([(4, 900), (4, 80)]), 16, 132, spare=3)
    places = layout.info[2:16]
    assert layout.info[:2] == (1, 132) and layout.info[16:] == (0, 2 * 132 * 64 * 512 * 2)
    assert list(places) == sorted(places) and all(place % 16 == 0 for place in places)
    assert list(arrays) == list(mla_plan.ORDER) and places[-1] + 4 * 133 <= layout.nbytes


def test_more_items_than_the_list_has_room_for_raise() -> None:
    host = host_batch([(4, 900)])
    tiles, split, _, _ = planned(host, 16, 132)
    small = PlanLayout.of(tiles, len(split.tile) - 1, 132)
    with pytest.raises(InvariantError, match="no room for 8 items"):
        write_all(small.arrays(np.zeros(small.nbytes // 4, np.int32)), tiles, split, tiles.keys(host.seq_lens), host)
