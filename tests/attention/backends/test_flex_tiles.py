"""The pages that each tile of queries reads: none missing, and none taken for wholly visible that is not."""

from __future__ import annotations

import numpy as np
import pytest

from attention.backends.flex import QueryTiles, tile_size
from attention.batch.host import HostBatch
from tests.attention.batches import Batch, small_size

BATCHES = small_size() | {"a row without tokens": Batch((3, 0, 2), (4, 7, 0))}


def visible(host: HostBatch, tiles: QueryTiles, window: int | None, tile: int) -> np.ndarray:
    """[tiles, tile, S] bool: which of its row's keys each packed query sees, by the definition; padding sees none."""
    keys = np.arange(int(host.seq_lens.max()) + host.page_size)
    position = tiles.position.reshape(-1, tile)[:, :, None]
    seen = keys <= position
    return seen if window is None else seen & (keys > position - window)


def pages_of(host: HostBatch, tiles: QueryTiles) -> tuple[list[list[int]], list[list[int]]]:
    """Physical pages of each tile that `arrays` lists as partly and as wholly visible."""
    partly, pages, whole, whole_pages = tiles.arrays(host, 1000)[:4]
    return _first(partly, pages), _first(whole, whole_pages)


def _first(counts: np.ndarray, pages: np.ndarray) -> list[list[int]]:
    return [row[:n].tolist() for row, n in zip(pages, counts, strict=True)]


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("page_size", "groups"), [(1, 3), (8, 4), (16, 1)])
@pytest.mark.parametrize("window", [None, 1, 9, pytest.param(40, marks=pytest.mark.slow)])
def test_every_visible_key_is_listed_once(name: str, page_size: int, window: int | None, groups: int) -> None:
    host = BATCHES[name].host(page_size)
    tile = tile_size(int(host.query_lens.max()) * groups)
    tiles = QueryTiles.of(host, groups, tile, window)
    seen = visible(host, tiles, window, tile)
    real = tiles.position.reshape(-1, tile) >= 0
    partly, whole = pages_of(host, tiles)
    for number, row in enumerate(tiles.row):
        own = host.block_table[row, : host.page_counts[row]].tolist()
        for logical, page in enumerate(own):
            keys = seen[number, :, logical * page_size : (logical + 1) * page_size]
            listed = (page in partly[number]) + (page in whole[number])
            assert listed == int(keys.any()), (number, logical)
            assert page not in whole[number] or keys[real[number]].all()
            assert page not in partly[number] or not keys[real[number]].all(), "masked for nothing"
        assert set(partly[number]) | set(whole[number]) <= set(own)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("groups", [1, 3, 4])
def test_every_token_has_its_places(name: str, groups: int) -> None:
    host = BATCHES[name].host(16)
    tiles = QueryTiles.of(host, groups, 16, None)
    owner = np.repeat(np.arange(host.num_reqs), host.query_lens)
    at = tiles.place.reshape(host.num_tokens, groups)
    assert (tiles.token[at] == np.arange(host.num_tokens)[:, None]).all()
    assert (tiles.head[at] == np.arange(groups)).all()
    assert (tiles.position[at] == host.positions[:, None]).all()
    assert (tiles.query_row[at] == owner[:, None]).all(), "a tile holds one row only"
    assert int((tiles.position >= 0).sum()) == host.num_tokens * groups
    assert len(tiles.token) == len(tiles.row) * 16
    assert len(tiles.token) % 128 == 0, "or the compiler makes another form"


@pytest.mark.parametrize(("length", "width"), [(0, 2), (100, 6)])
def test_both_lists_of_pages_have_one_width(length: int, width: int) -> None:
    """One page is seen partly by a token at 100, six are seen whole; no size is one."""
    host = Batch((1,), (length,)).host(16)
    arrays = QueryTiles.of(host, 1, 16, None).arrays(host, 9)
    assert [array.shape for array in arrays[:4]] == [(8,), (8, width), (8,), (8, width)]
    assert all(array.dtype == np.int32 for array in arrays)
