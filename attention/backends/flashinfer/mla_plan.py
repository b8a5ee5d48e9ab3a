"""The decode plan of FlashInfer's MLA kernels, made on the host in numpy.

A tile is 64 (token, head) pairs of one row, or 128 shared by a cluster of two blocks where rows have more than 64 pairs
on average. A work item is a tile and a KV chunk; each cluster processes its own items. With split-KV a tile has several
items: their partial results are stored in the workspace, rounded to the output's dtype, and some blocks reduce them.

FlashInfer's planner makes KV chunks as short as 32 keys, depending on the total work of the batch, so a row's result
depends on the other rows, through the rounding of its partial results. Here KV chunks are `LEAST_KEYS` long while the
batch has no more than that many keys per cluster, and as FlashInfer's beyond; a tile of up to `WHOLE_KEYS` keys is not
split. So only in batches of more than `LEAST_KEYS` keys per cluster does a row depend on the others.

Source: flashinfer-ai/flashinfer, include/flashinfer/attention/scheduler.cuh (MLAPlan); mla_hopper.cuh for the meaning
of each array.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from attention.batch.host import HostBatch, offsets_within, owners_of, starts_of
from attention.checking import require
from attention.staging import Arrays

PAIRS = 64
LEAST_KEYS = 128
WHOLE_KEYS = 256
"""A reduction costs as much as reading some hundred keys. µs on an H200, 16 heads, KV chunks of up to 32, of 128, and
no split-KV: 200 keys in 1 row of 1 token 9.8, 12.2, 14.4; 8 rows of 4 tokens 17.9, 22.4, 15.6; 32 rows of 2 tokens
20.9, 20.8, 15.6. 640 keys: 14.4, 11.9, 23.9; 21.8, 21.9, 33.6; 21.8, 21.7, 29.8."""
LATENT_DIM = 512
PER_ITEM = ("q_indptr", "kv_indptr", "partial_indptr", "q_len", "kv_len", "q_start", "kv_start", "kv_end")
MERGES = (
    "merge_packed_offset_start",
    "merge_packed_offset_end",
    "merge_partial_packed_offset_start",
    "merge_partial_packed_offset_end",
    "merge_partial_stride",
)
ORDER = (*PER_ITEM[:3], *MERGES, *PER_ITEM[3:], "work_indptr")
"""The arrays as the kernel's plan names them, in its order."""


@dataclass(frozen=True)
class Tiles:
    """The tiles of a batch, the part of a plan that depends only on query lengths.

    Attributes:
        cluster: blocks per cluster, 1 or 2; clusters: their number; size: most (token, head) pairs of a tile.
        query_lens: [B]; query_start_loc: [B+1].
        row: [T] the row of each tile; first: [T] its first pair, in the row; width: [T] its pairs.
        start: [T] its first pair, in the batch; unseen: [T] keys at the end of the row that are masked for all
            its pairs.
    """

    cluster: int
    clusters: int
    size: int
    query_lens: ndarray
    query_start_loc: ndarray
    row: ndarray
    first: ndarray
    width: ndarray
    start: ndarray
    unseen: ndarray

    @classmethod
    def of(cls, query_start_loc: ndarray, heads: int, sms: int) -> Tiles:
        """query_start_loc [B+1]; `sms` multiprocessors."""
        query_lens = np.diff(query_start_loc)
        pairs = query_lens.astype(np.int64) * heads
        cluster = 2 if int(pairs.sum()) // len(pairs) > PAIRS else 1
        size = PAIRS * cluster
        counts = -(-pairs // size)
        row = owners_of(counts)
        number = offsets_within(counts)
        first = number * size
        seen = -(-(first + size) // heads)
        return cls(
            cluster=cluster,
            clusters=sms // cluster,
            size=size,
            query_lens=query_lens,
            query_start_loc=query_start_loc,
            row=row,
            first=first,
            width=np.minimum(size, pairs[row] - first),
            start=query_start_loc[row].astype(np.int64) * heads + first,
            unseen=np.where(number + 1 == counts[row], 0, np.maximum(query_lens[row] - seen, 0)),
        )

    @property
    def most_items(self) -> int:
        """Most items of a batch of these tiles: split-KV adds no more than one per cluster."""
        return len(self.row) + self.clusters

    def keys(self, seq_lens: ndarray) -> ndarray:
        """[T] keys that each tile reads, of rows with seq_lens [B]."""
        return np.maximum(seq_lens[self.row] - self.unseen, 0)

    def chunk_size(self, keys: ndarray) -> int:
        """Most keys of an item, for tiles with keys [T]."""
        mean = max(-(-int(keys.sum()) // self.clusters), 1)
        return LEAST_KEYS if mean <= LEAST_KEYS else -(-mean // 256) * 256


@dataclass(frozen=True)
class SplitKV:
    """The KV chunks of every tile, and their distribution over the clusters.

    Attributes:
        chunk_size: KV chunk size of a split tile; num_chunks: [T] KV chunks of each tile.
        tile, row: [N] the tile of each item, clusters one after the other, and its row; begin: [N] its first key;
            limit: [N] the key after its last, without a bound in a tile's only chunk.
        starts: [clusters+1] item `starts[c]` is the first of cluster c.
        place: [T] offset of a split tile's partial results in the workspace, in pairs.
    """

    chunk_size: int
    num_chunks: ndarray
    tile: ndarray
    row: ndarray
    begin: ndarray
    limit: ndarray
    starts: ndarray
    place: ndarray

    @classmethod
    def of(cls, tiles: Tiles, keys: ndarray) -> SplitKV:
        """keys: [T]."""
        chunk_size = tiles.chunk_size(keys)
        num_chunks = _num_chunks(keys, chunk_size)
        tile = owners_of(num_chunks)
        begin = offsets_within(num_chunks) * chunk_size
        # The end of a tile's only chunk is left open: growing rows then change kv_end, and the chunks stay.
        limit = np.where(num_chunks[tile] > 1, begin + chunk_size, np.iinfo(np.int32).max)
        order, starts = _shared_out(np.minimum(limit, keys[tile]) - begin, tiles.clusters)
        size = np.where(num_chunks > 1, num_chunks * tiles.width, 0)
        tile = tile[order]
        return cls(
            chunk_size, num_chunks, tile, tiles.row[tile], begin[order], limit[order], starts, np.cumsum(size) - size
        )

    def serves(self, tiles: Tiles, keys: ndarray) -> bool:
        """Whether rows of other lengths have the same KV chunks."""
        chunk_size = tiles.chunk_size(keys)
        return chunk_size == self.chunk_size and bool((_num_chunks(keys, chunk_size) == self.num_chunks).all())


def _num_chunks(keys: ndarray, chunk_size: int) -> ndarray:
    return np.where(keys <= WHOLE_KEYS, 1, -(-keys // chunk_size))


def _shared_out(keys: ndarray, clusters: int) -> tuple[ndarray, ndarray]:
    """The order of items with `keys` [N] by cluster, and where each cluster's begin [clusters+1].

    One per cluster while that is enough; otherwise longest first, in alternating direction over the clusters.
    """
    count = len(keys)
    if count <= clusters:
        return np.arange(count), np.minimum(np.arange(clusters + 1), count)
    # Longest first in alternating direction evens out the load without a heap: a few numpy calls.
    turn, place = np.divmod(np.arange(count), clusters)
    cluster = np.where(turn % 2, clusters - 1 - place, place)
    order = np.argsort(-keys, kind="stable")[np.argsort(cluster, kind="stable")]
    return order, starts_of(np.bincount(cluster, minlength=clusters))


@dataclass(frozen=True)
class PlanLayout:
    """Offsets of a plan's arrays in one buffer, each at a multiple of 16 bytes.

    Attributes:
        info: arguments of a launch: the grid, the arrays' byte offsets, and the offsets in the workspace of the partial
            results and of their log-sum-exps. starts: the arrays' first entries; counts: their numbers of entries;
            nbytes: size of the buffer.
    """

    info: tuple[int, ...]
    starts: Mapping[str, int]
    counts: Mapping[str, int]
    nbytes: int

    @classmethod
    def of(cls, tiles: Tiles, items: int, sms: int) -> PlanLayout:
        """Room for `items` items."""
        counts = dict.fromkeys(PER_ITEM, items) | dict.fromkeys(MERGES, sms) | {"work_indptr": tiles.clusters + 1}
        starts = {}
        end = 0
        for name in ORDER:
            starts[name] = end
            end += -(-counts[name] // 4) * 4
        places = [4 * start for start in starts.values()]
        partial_bytes = 2 * tiles.clusters * tiles.size * LATENT_DIM * 2
        return cls((tiles.cluster, tiles.clusters, *places, 0, partial_bytes), starts, counts, 4 * end)

    def arrays(self, out: ndarray) -> Arrays:
        """The arrays in `out`, int32."""
        return {name: out[start : start + self.counts[name]] for name, start in self.starts.items()}


def write_all(arrays: Arrays, tiles: Tiles, split: SplitKV, keys: ndarray, host: HostBatch) -> None:
    """Write a whole plan for tiles with keys [T] of a batch; entries past the last item stay as they are."""
    tile = split.tile
    count = len(split.tile)
    require(count <= len(arrays["q_len"]), f"a plan has no room for {count} items")
    arrays["q_indptr"][:count] = tiles.query_start_loc[split.row]
    arrays["q_len"][:count] = tiles.query_lens[split.row]
    arrays["q_start"][:count] = tiles.first[tile]
    arrays["kv_start"][:count] = split.begin
    places = split.place[tile] + split.begin // split.chunk_size * tiles.width[tile]
    arrays["partial_indptr"][:count] = np.where(split.num_chunks[tile] > 1, places, -1)
    arrays["work_indptr"][:] = split.starts
    for name, values in zip(MERGES, _merges(tiles, split, keys), strict=True):
        arrays[name][:] = 0
        arrays[name][: len(values)] = values
    write_lengths(arrays, split, keys, host)


def write_lengths(arrays: Arrays, split: SplitKV, keys: ndarray, host: HostBatch) -> None:
    """Update a plan whose KV chunks stay for other lengths: page offsets, lengths and last keys."""
    count = len(split.tile)
    arrays["kv_indptr"][:count] = host.page_indptr[split.row]
    arrays["kv_len"][:count] = host.seq_lens[split.row]
    np.minimum(split.limit, keys[split.tile], out=arrays["kv_end"][:count], casting="unsafe")


def _merges(tiles: Tiles, split: SplitKV, keys: ndarray) -> ndarray:
    """[5, M] int64, one column per block that reduces some pairs of a split tile, in the order of `MERGES`."""
    split_tiles = np.flatnonzero(split.num_chunks > 1)
    width = tiles.width[split_tiles]
    wanted = np.maximum(keys[split_tiles] * tiles.cluster // split.chunk_size, 1)
    share = -(-width // wanted)
    counts = -(-width // share)
    at = owners_of(counts)
    offset = offsets_within(counts) * share[at]
    tile = split_tiles[at]
    width = width[at]
    start = tiles.start[tile]
    place = split.place[tile]
    stop = start + np.minimum(offset + share[at], width)
    return np.stack([start + offset, stop, place + offset, place + split.num_chunks[tile] * width, width])
