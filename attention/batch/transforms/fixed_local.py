"""Local (chunked) attention of batches of one fixed shape, in as many virtual rows every time, for CUDA graphs.

`local_attention` makes as many virtual rows as a batch happens to need. A captured launch has a fixed number: q tokens
that follow each other lie in at most 1 + ⌈(q-1)/c⌉ chunks of c positions, so every row gets that many virtual rows, two
while 1 < q <= c + 1. Unneeded virtual rows hold no query and point to the null page.

A row of three tokens from position 7 on, and one from 4 on, in chunks of 4 on pages of 2:

>>> from attention.batch.host import rows_batch
>>> batch = rows_batch(np.array([0, 3, 6]), np.array([7, 4]), np.arange(1, 13, dtype=np.int32).reshape(2, 6), 2)
>>> virtual = fixed_local_attention(batch, 4, virtual_rows_of(3, 4))
>>> virtual.query_lens.tolist(), virtual.seq_lens.tolist()
([1, 2, 3, 0], [4, 2, 3, 1])
>>> virtual.block_table.tolist()
[[3, 4], [5, 0], [9, 10], [0, 0]]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from attention.batch.host import HostBatch, page_counts_of
from attention.batch.metadata import ROW_FIELDS, CommonAttentionMetadata
from attention.batch.transforms.local_attention import check_chunk_size
from attention.batch.transforms.windowed import WindowedBatch, pages_from
from attention.checking import CHECKS
from attention.errors import InvalidInputError
from attention.staging import Field, Staged, StagingArena, bucket_of


def virtual_rows_of(query_len: int, chunk_size: int) -> int:
    """Most chunks that this many consecutive tokens lie in.

    >>> [virtual_rows_of(query_len, 4) for query_len in (1, 2, 5, 6)]
    [1, 2, 2, 3]
    """
    return 1 + -(-(query_len - 1) // chunk_size)


def fixed_local_attention(batch: HostBatch, chunk_size: int, each: int) -> HostBatch:
    """The batch whose plain causal attention is `batch`'s attention in chunks, with `each` virtual rows for every row.

    Tokens stay in their order with their slots and positions. Page lists of the B·each rows are cut out of the batch's
    table directly. chunk_size: c, a multiple of the page size.

    Raises:
        InvalidInputError: a row lies in more than `each` chunks, or the page size does not divide chunk_size.
    """
    check_chunk_size(chunk_size, batch.page_size)
    start, stop = batch.num_computed_tokens[:, None], batch.seq_lens[:, None]
    key_start = (start // chunk_size + np.arange(each)) * chunk_size  # [B, each]
    first, end = np.maximum(start, key_start), np.minimum(stop, key_start + chunk_size)
    used = first < end
    lens = np.where(used, end - first, 0).reshape(-1)
    seq_lens = np.where(used, end - key_start, 1).reshape(-1).astype(np.int32)
    counts = page_counts_of(seq_lens, batch.page_size)
    page_indptr = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=page_indptr[1:])
    unused = ~used.reshape(-1)
    first_page = np.where(unused, 0, key_start.reshape(-1) // batch.page_size)
    if isinstance(batch, WindowedBatch):  # which has no table, and would make one
        listed, begins = batch.page_indices, batch.page_indptr[:-1]
    else:
        listed, begins = batch.block_table, np.arange(len(start)) * batch.block_table.shape[1]
    pages = pages_from(listed, np.repeat(begins, each) + first_page, counts)
    pages[page_indptr[:-1][unused]] = 0  # the null page
    query_start_loc = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=query_start_loc[1:])
    if query_start_loc[-1] != batch.num_tokens:
        raise InvalidInputError(
            f"each={each}: a row lies in more than {each} chunks of {chunk_size} tokens; `virtual_rows_of` says how "
            "many a row of so many query tokens may lie in"
        )
    return WindowedBatch(
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        num_computed_tokens=seq_lens - lens.astype(np.int32),
        slot_mapping=batch.slot_mapping,
        positions=batch.positions,
        page_size=batch.page_size,
        other_groups=(),
        page_counts=counts,
        page_indptr=page_indptr,
        page_indices=pages,
    )


class FixedLocalRows:
    """The virtual rows of batches of one fixed shape, on the device always at the same addresses.

    They travel in a separate copy because only models with chunked attention have them.
    """

    def __init__(
        self, rows: int, query_len: int, chunk_size: int, page_size: int, num_pages: int, device: torch.device
    ) -> None:
        """For batches of `rows` rows with `query_len` tokens each; num_pages: pages of the cache.

        Raises:
            InvalidInputError: the page size does not divide chunk_size.
        """
        check_chunk_size(chunk_size, page_size)
        self._chunk_size = chunk_size
        self._each = virtual_rows_of(query_len, chunk_size)
        self.num_rows = rows * self._each
        pages = min(chunk_size // page_size, num_pages) + query_len + self._each  # of all virtual rows of a row
        self._bucket = bucket_of(rows=self.num_rows, rows_plus_1=self.num_rows + 1, pages=rows * pages)
        dims = {"query_start_loc": "rows_plus_1", "page_indptr": "rows_plus_1", "page_indices": "pages"}
        fields = [Field(name, np.int32, (dims.get(name, "rows"),)) for name in ROW_FIELDS]
        self._arena = StagingArena(fields, self._bucket, device)
        self._hosts: list[Mapping[str, np.ndarray]] = self._arena.hosts(self._bucket)

    def send(self, batch: HostBatch) -> tuple[HostBatch, Staged]:
        """Lay out and send the virtual rows of a batch of the shape."""
        virtual = fixed_local_attention(batch, self._chunk_size, self._each)
        if CHECKS.on:
            virtual.validate()
        host = self._hosts[self._arena.begin()]
        for name in ROW_FIELDS:
            array = getattr(virtual, name)
            host[name][: len(array)] = array
        return virtual, self._arena.end(self._bucket)

    def metadata(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """A batch of the shape in its virtual rows, with the arrays that every later `send` overwrites.

        It has no block table: kernels read the flat list of pages.
        """
        virtual, staged = self.send(metadata.host)
        views: dict[str, Any] = {name: staged[name] for name in ROW_FIELDS}
        return replace(metadata, host=virtual, block_table=None, **views)
