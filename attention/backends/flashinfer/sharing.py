"""Which rows of a batch share which pages, for the packed kernels: found on the host, kept on the device.

The device array of a fixed shape is sent when it changes: when rows come, go, or begin elsewhere. From one round of the
same requests to the next it does not, so that a round sends nothing more than before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from attention.backends.cascade_cost import CascadeCost, PrefixWork
from attention.batch.host import HostBatch
from attention.batch.transforms.cascade import shared_prefixes
from attention.spec import AttentionSpec

if TYPE_CHECKING:
    from attention.kernels.cascade import PrefixTiling, SharedKeys
    from attention.kernels.packed import Scratch

LEAST_ROWS = 4
"""Rows of a fixed shape from which on it has a launch for shared pages, which costs 1 to 2 µs a layer of few keys where
there are none: three rows save at most two readings of a prefix."""
_RING = 2
LOOK_AGAIN = 32
"""Batches after which an answer that still holds is looked for again."""


class Sharing:
    """Finds shared pages for the packed kernels of a device, and keeps memory for the sums over them: one launch at a
    time uses it."""

    def __init__(self, device: torch.device) -> None:
        self._room = torch.empty(0, dtype=torch.float32, device=device)
        self._none = torch.empty(0, dtype=torch.int32, device=device)

    def fixed(
        self, key: AttentionSpec, dtype: torch.dtype, shape: tuple[int, int], scratch: Scratch
    ) -> SharedRows | None:
        """For all batches of a shape, (rows, query_len), which has a launch for them; None with few rows."""
        if shape[0] < LEAST_ROWS:
            return None
        tiling = _tiling(key, shape, scratch)
        pages = torch.zeros(shape[0], dtype=torch.int32, device=self._room.device)
        return SharedRows(self._keys(key, shape, tiling, pages), shape[1], _cost(key, dtype, tiling, scratch))

    def of_batch(
        self, key: AttentionSpec, dtype: torch.dtype, shape: tuple[int, int], scratch: Scratch, batch: HostBatch
    ) -> BatchShared | None:
        """For the first rows of one batch; None with few rows.

        The kernels are those of fixed shapes, so that rounds beside graphs compile none.
        """
        if shape[0] < LEAST_ROWS:
            return None
        tiling = _tiling(key, shape, scratch)
        found = worth_sharing(batch, *shape, _cost(key, dtype, tiling, scratch))
        pages = self._no_pages(shape[0])
        if found.any():
            pages = torch.from_numpy(found)
            if self._room.is_cuda:
                pages = pages.pin_memory().to(self._room.device, non_blocking=True)
        return BatchShared(self._keys(key, shape, tiling, pages), bool(found.any()))

    def _no_pages(self, rows: int) -> torch.Tensor:
        if rows > len(self._none):
            self._none = torch.zeros(rows, dtype=torch.int32, device=self._room.device)
        return self._none[:rows]

    def _keys(
        self, key: AttentionSpec, shape: tuple[int, int], tiling: PrefixTiling, pages: torch.Tensor
    ) -> SharedKeys:
        """pages: [rows] int32. What was handed out before keeps its memory."""
        from attention.kernels.cascade import SharedKeys, sum_shapes

        sums, stats = sum_shapes(key, shape[0] * shape[1], tiling)
        sizes = math.prod(sums), math.prod(stats)
        if sum(sizes) > len(self._room):
            self._room = torch.empty(sum(sizes), dtype=torch.float32, device=self._room.device)
        first, second = self._room[: sum(sizes)].split(sizes)
        return SharedKeys(pages, first.view(sums), second.view(stats), tiling)


def _tiling(key: AttentionSpec, shape: tuple[int, int], scratch: Scratch) -> PrefixTiling:
    """Of the next power of two of rows, so that there are few kernels; shape: (rows, query_len)."""
    from attention.kernels.cascade import prefix_tiling

    rows = 1 << (shape[0] - 1).bit_length()
    queries = rows * shape[1] * key.num_q_heads // key.num_kv_heads
    return prefix_tiling(queries, key.num_kv_heads, scratch.multiprocessors, scratch.shared_bytes)


def _cost(key: AttentionSpec, dtype: torch.dtype, tiling: PrefixTiling, scratch: Scratch) -> CascadeCost:
    """When the kernels with this tiling pay."""
    heads = key.num_q_heads, key.num_kv_heads
    tile = tiling.tile
    work = PrefixWork(tile.queries, tiling.parts, tiling.least_keys, tile.each * scratch.multiprocessors, tile.key_ns)
    return CascadeCost(*heads, key.head_dim_k, dtype.itemsize, work)


def worth_sharing(batch: HostBatch, rows: int, query_len: int, cost: CascadeCost) -> np.ndarray:
    """[rows] int32: leading pages that each of the first rows shares with others, where it pays; else zeros.

    The kernels serve one class of rows at once: of those that pay the one that saves most time. Classes come in order
    of the keys that they leave out, and a class cannot save more than reading the keys of all its rows takes.
    """
    computed, best, most = batch.num_computed_tokens[:rows], None, -math.inf
    for found in shared_prefixes(batch.block_table[:rows], computed, batch.page_size):
        if cost.reading_us(2 * found.num_keys_left_out) <= most:
            break
        own = int(computed[found.rows].mean()) + query_len - found.num_keys
        sizes = (len(found.rows), query_len, found.num_keys, own)
        if cost.saved_us(*sizes) > most and cost.pays(*sizes):
            best, most = found, cost.saved_us(*sizes)
    return np.zeros(rows, np.int32) if best is None else best.pages_by_row(rows)


@dataclass(frozen=True)
class BatchShared:
    """The shared pages of one batch. launches: whether there are any, so that they are attended before the rest."""

    shared: SharedKeys
    launches: bool


class SharedRows:
    """The shared pages of batches of `rows` rows of `query_len` tokens, at an address that does not change."""

    launches = True
    """A captured graph does, whatever it finds."""

    def __init__(self, shared: SharedKeys, query_len: int, cost: CascadeCost) -> None:
        self.shared = shared
        self._query_len = query_len
        self.cost = cost
        on_cuda = shared.pages.is_cuda
        self._sent = np.zeros(len(shared.pages), np.int32).tobytes()
        self._host = [torch.zeros(len(shared.pages), dtype=torch.int32, pin_memory=on_cuda) for _ in range(_RING)]
        self._copied = [torch.cuda.Event() for _ in range(_RING)] if on_cuda else []
        self.num_copies = 0
        self._left, self._width, self._begins = 0, 1, b""
        self._least = np.zeros(len(shared.pages), np.int32)  # keys that each row must have computed

    def update(self, batch: HostBatch) -> None:
        """The next launches serve this batch. Sends the pages where they changed.

        What was found last is kept while it holds: the tables begin as they did, and all rows still see the pages that
        they share. To look again costs 30 µs and more; once in `LOOK_AGAIN` batches it is done nevertheless, for
        rows that could share more by now.
        """
        rows = len(self.shared.pages)
        if self._left and batch.block_table[:rows, : self._width].tobytes() == self._begins:
            self._left -= 1
            if (batch.num_computed_tokens[:rows] >= self._least).all():
                return
        pages = worth_sharing(batch, rows, self._query_len, self.cost)
        if pages.tobytes() != self._sent:
            self.send(pages)
        self._left, self._width = LOOK_AGAIN, max(1, int(pages.max()))
        self._least = pages * batch.page_size
        self._begins = batch.block_table[:rows, : self._width].tobytes()

    def send(self, pages: np.ndarray) -> None:
        """The next launches find these pages; [rows] int32, see `attention.kernels.cascade.SharedKeys`."""
        self._sent, self._left = b"", 0  # an interrupt from here on leaves what is looked for and sent again
        slot = self.num_copies % _RING
        if self._copied and not self._copied[slot].query():
            self._copied[slot].synchronize()
        self._host[slot].numpy()[:] = pages
        self.shared.pages.copy_(self._host[slot], non_blocking=True)
        if self._copied:
            self._copied[slot].record()
        self.num_copies += 1
        self._sent = pages.tobytes()
