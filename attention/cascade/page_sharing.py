"""Decides on cascade attention: which rows of a batch share pages, and whether attending these once is faster.

The constants of `CascadeCost` are fitted to 54 measured cases (`tests/attention/cascade/test_cost.py` holds them: 8, 32
and 128 rows, prefixes of 512 to 8,192 keys, 64 and 256 own keys, 1, 4 and 6 tokens; Llama-3.1-8B's heads in bfloat16),
by least squares of the logarithms. They give cascade attention's time within 20 % (6 % on average) and flat attention's
within 25 % (11 %; it takes longer with six tokens, which the rule leaves out). On another GPU all times are others, but
only their ratio decides.

The device array of a fixed shape is sent only when it changes: when rows come, go, or begin elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from attention.batch.host import HostBatch
from attention.cascade.kernel import prefix_tiling, sum_shapes
from attention.cascade.shared_pages import shared_prefixes
from attention.kernels.packed_kernel import PrefixTiling, Scratch, SharedKeys
from attention.spec import AttentionSpec
from attention.staging import on_device

LAUNCH_US = 7.7
PREFIX_LAUNCH_US = 2.0
"""Time of the packed kernel over few keys, from begin to end, and of the prefix kernel before it."""
OWN_US_PER_MB = 0.241
SHARED_US_PER_MB = 0.187
"""Reading keys: those that one row has, from memory (4.1 TB/s); those that flat attention reads for many rows, which
are in the L2 cache after the first (5.3 TB/s)."""
SUM_US_PER_MB = 2 * OWN_US_PER_MB
"""Partial sums are read where a row begins, before anything else of it can be done."""
LEAST_GAIN = 1.15
"""Two-level attention is used from this estimated speedup over flat attention on. In the measurements, every case with
an estimate below 1.05 had a speedup below 0.91, and every case with an estimate above 1.2 one above 1.36."""


@dataclass(frozen=True)
class CascadeCost:
    """Times of one layer's attention, in µs, over rows that share their first keys.

    Flat attention reads every row's keys. In two levels every program of the prefix kernel goes through its part of the
    shared keys, for a tile of queries; programs that the device has no room for wait for the others. Then each row
    reads the sums over the parts, D + 2 numbers a query head in float32, and its own keys.

    Llama-3.1-8B in bfloat16 on an H200, 32 rows of 6 tokens with 2,048 shared and 256 private keys each: 73.6 (flat)
    and 47.3 µs were measured, a gain of 1.56; with 512 shared keys 28.3 and 34.2, so flat attention is used.

    >>> cost = CascadeCost(32, 8, 128, 2, PrefixTiling(128, 64, 8, 5, 1, 22.6, parts=2, least_keys=512), 132)
    >>> [(round(cost.flat_us(32, keys, 256), 1), round(cost.cascade_us(32, 6, keys, 256), 1)) for keys in (2048, 512)]
    [(66.0, 47.1), (28.3, 32.4)]
    >>> round(cost.saved_us(32, 6, 2048, 256), 1), cost.saved_us(32, 6, 512, 256)
    (18.9, -inf)

    Attributes:
        num_q_heads, num_kv_heads, head_dim: shape of a layer. item_bytes: size of a cached element.
        tiling: of the prefix kernel, with its speed; multiprocessors: of the device.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    item_bytes: int
    tiling: PrefixTiling
    multiprocessors: int

    def _key_megabytes(self, keys: int) -> float:
        return keys * 2 * self.num_kv_heads * self.head_dim * self.item_bytes / 1e6

    def flat_us(self, rows: int, prefix_keys: int, own_keys: int) -> float:
        """Time of flat attention over `rows` rows; own_keys: average keys of a row after the prefix."""
        shared = self._key_megabytes(rows * prefix_keys)
        own = self._key_megabytes(rows * own_keys)
        return LAUNCH_US + shared * SHARED_US_PER_MB + own * OWN_US_PER_MB

    def cascade_us(self, rows: int, query_len: int, prefix_keys: int, own_keys: int) -> float:
        """Time of attention in two levels; query_len: tokens of each row."""
        tiling = self.tiling
        tokens = rows * query_len
        part_keys = max(-(-prefix_keys // tiling.parts), tiling.least_keys)
        parts = -(-prefix_keys // part_keys)
        tiles = -(-tokens * (self.num_q_heads // self.num_kv_heads) // tiling.queries)
        turns = -(-tiles * self.num_kv_heads * parts // (tiling.each * self.multiprocessors))
        prefix = PREFIX_LAUNCH_US + turns * part_keys * tiling.key_ns / 1e3
        sums = 2 * parts * tokens * self.num_q_heads * (self.head_dim + 2) * 4 / 1e6  # written and read
        own = self._key_megabytes(rows * own_keys)
        return LAUNCH_US + prefix + sums * SUM_US_PER_MB + own * OWN_US_PER_MB

    def reading_us(self, keys: int) -> float:
        """Time in which flat attention reads this many shared keys, counted once per row."""
        return self._key_megabytes(keys) * SHARED_US_PER_MB

    def saved_us(self, rows: int, query_len: int, prefix_keys: int, own_keys: int) -> float:
        """Time that two levels save over flat attention, in µs; -inf where they do not pay."""
        flat = self.flat_us(rows, prefix_keys, own_keys)
        two_levels = self.cascade_us(rows, query_len, prefix_keys, own_keys)
        return flat - two_levels if flat / two_levels >= LEAST_GAIN else -math.inf


LEAST_ROWS = 4
"""Fixed shapes with at least this many rows launch the kernel for shared pages, which costs 1 to 2 µs a layer of few
keys even if no pages are shared; with three rows it saves at most two readings of a prefix."""
LOOK_AGAIN = 32
"""Batches after which an answer that still holds is looked for again."""


Shape = tuple[int, int]
"""Rows, and tokens of each."""


class Sharing:
    """Finds shared pages for the packed kernels, and has the memory of the sums over them for one launch at a time."""

    def __init__(self, device: torch.device) -> None:
        self._room = torch.empty(0, dtype=torch.float32, device=device)
        self._none = torch.empty(0, dtype=torch.int32, device=device)

    def fixed(self, key: AttentionSpec, dtype: torch.dtype, shape: Shape, scratch: Scratch) -> SharedRows | None:
        """Shared pages for all batches of a shape, launched every time; None with few rows."""
        if shape[0] < LEAST_ROWS:
            return None
        cost = _cost(key, dtype, shape, scratch)
        pages = self._room.new_zeros(shape[0], dtype=torch.int32)
        return SharedRows(self._keys(key, shape, cost.tiling, pages), shape[1], cost)

    def of_batch(
        self, key: AttentionSpec, dtype: torch.dtype, shape: Shape, scratch: Scratch, batch: HostBatch
    ) -> BatchShared | None:
        """Shared pages of the first rows of one batch; None with few rows.

        It uses the kernels of the fixed shapes, so that rounds outside CUDA graphs compile none.
        """
        if shape[0] < LEAST_ROWS:
            return None
        cost = _cost(key, dtype, shape, scratch)
        found = worth_sharing(batch, *shape, cost)
        rows = shape[0]
        if rows > len(self._none):
            self._none = self._room.new_zeros(rows, dtype=torch.int32)
        pages = self._none[:rows]
        if found.any():
            pages = on_device(found, self._room.device)
        return BatchShared(self._keys(key, shape, cost.tiling, pages), bool(found.any()))

    @staticmethod
    def limit(key: AttentionSpec, eight_bits: bool) -> str:
        """Why layers are never attended in two levels, in words; "" where they can be. eight_bits: the cache.

        >>> plain, windowed = AttentionSpec(8, 2, 64, 64, 1.0), AttentionSpec(8, 2, 64, 64, 1.0, window=9)
        >>> Sharing.limit(plain, False), Sharing.limit(plain, True), Sharing.limit(windowed, False)
        ('', 'an 8-bit cache', 'a sliding window')
        """
        limits = (
            (eight_bits, "an 8-bit cache"),
            (key.value_in_key, "MLA"),
            (key.window is not None, "a sliding window"),
            (key.chunk_size is not None, "attention in chunks"),
            (key.has_sinks, "attention sinks"),
            (key.softcap is not None, "a softcap"),
            (key.alibi is not None, "ALiBi slopes"),
            (key.head_dim_k != key.head_dim_v, "keys and values of different widths"),
        )
        return next((name for limited, name in limits if limited), "")

    def in_words(self, key: AttentionSpec, eight_bits: bool, is_packed: bool) -> str:
        """Where layers attend shared pages once, or why never, to follow the name of their kernel."""
        limit = self.limit(key, eight_bits)
        if not limit and not is_packed:
            limit = f"rows with head dim {key.head_dim_k} are not packed here"
        if limit:
            return f"; no cascade: {limit}"
        return f"; cascade over shared pages from {LEAST_ROWS} rows on, where it pays"

    def _keys(self, key: AttentionSpec, shape: Shape, tiling: PrefixTiling, pages: Tensor) -> SharedKeys:
        """pages: [rows] int32. Buffers handed out before keep their memory."""
        sums, stats = sum_shapes(key, shape[0] * shape[1], tiling)
        sizes = math.prod(sums), math.prod(stats)
        if sum(sizes) > len(self._room):
            self._room = self._room.new_empty(sum(sizes))
        first, second = self._room[: sum(sizes)].split(sizes)
        return SharedKeys(pages, first.view(sums), second.view(stats), tiling)


def _cost(key: AttentionSpec, dtype: torch.dtype, shape: Shape, scratch: Scratch) -> CascadeCost:
    """When the kernels pay, with the tiling for the next power of two of rows, to keep kernels few."""
    rows = 1 << (shape[0] - 1).bit_length()
    queries = rows * shape[1] * key.group_size
    tiling = prefix_tiling(queries, key.num_kv_heads, scratch.multiprocessors, scratch.shared_bytes)
    heads = key.num_q_heads, key.num_kv_heads
    return CascadeCost(*heads, key.head_dim_k, dtype.itemsize, tiling, scratch.multiprocessors)


def worth_sharing(batch: HostBatch, rows: int, query_len: int, cost: CascadeCost) -> ndarray:
    """[rows] int32: leading pages that each of the first rows shares with others, where it pays; else zeros.

    The kernels serve one class of rows at a time: the class that saves the most time, if any pays. Classes come in
    order of the keys that they leave out, and a class cannot save more than reading the keys of all its rows takes.
    """
    computed = batch.num_computed_tokens[:rows]
    best = None
    most = -math.inf
    for found in shared_prefixes(batch.block_table[:rows], computed, batch.page_size):
        if cost.reading_us(2 * found.num_keys_left_out) <= most:
            break
        own = int(computed[found.rows].mean()) + query_len - found.num_keys
        saved = cost.saved_us(len(found.rows), query_len, found.num_keys, own)
        if saved > most:
            best = found
            most = saved
    return np.zeros(rows, np.int32) if best is None else best.pages_by_row(rows)


@dataclass(frozen=True)
class BatchShared:
    """The shared pages of one batch. launches: whether it has any, which are attended before the rest."""

    shared: SharedKeys
    launches: bool

    def update(self, batch: HostBatch) -> None:
        """Nothing: the pages are this batch's already."""


class SharedRows:
    """The shared pages of batches of `rows` rows of `query_len` tokens, at an address that does not change."""

    launches = True
    """A captured graph always launches the kernel, whether or not pages are shared."""

    def __init__(self, shared: SharedKeys, query_len: int, cost: CascadeCost) -> None:
        self.shared = shared
        self._query_len = query_len
        self.cost = cost
        self._sent = np.zeros(len(shared.pages), np.int32).tobytes()
        self.num_copies = 0
        self._left = 0
        self._width = 1
        self._begins = b""
        self._least = np.zeros(len(shared.pages), np.int32)  # keys that each row must have computed

    def update(self, batch: HostBatch) -> None:
        """The next launches serve this batch. Sends the pages where they changed.

        The last result is kept while it holds: the tables begin as they did, and all rows still see the pages that they
        share. To look again costs 30 µs and more; once in `LOOK_AGAIN` batches it is done nevertheless, for rows that
        could share more by now.
        """
        rows = len(self.shared.pages)
        if self._left and batch.block_table[:rows, : self._width].tobytes() == self._begins:
            self._left -= 1
            if (batch.num_computed_tokens[:rows] >= self._least).all():
                return
        pages = worth_sharing(batch, rows, self._query_len, self.cost)
        if pages.tobytes() != self._sent:
            self.send(pages)
        self._left = LOOK_AGAIN
        self._width = max(1, int(pages.max()))
        self._least = pages * batch.page_size
        self._begins = batch.block_table[:rows, : self._width].tobytes()

    def send(self, pages: ndarray) -> None:
        """The next launches find these pages; [rows] int32, see `attention.kernels.packed_kernel.SharedKeys`."""
        self._sent, self._left = b"", 0  # after an interrupt from here on, pages are looked for and sent again
        sent = torch.from_numpy(pages)
        self.shared.pages.copy_(sent.pin_memory() if self.shared.pages.is_cuda else sent, non_blocking=True)
        self.num_copies += 1
        self._sent = pages.tobytes()
