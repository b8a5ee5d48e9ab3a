"""Local (chunked) attention as a batch of virtual rows, one for each chunk that a row's queries lie in.

With chunks of c positions, a token at position p sees its chunk's positions up to itself, from c·⌊p/c⌋ to p. A virtual
row holds the queries and keys of one row in one chunk. Inside a virtual row attention is plain causal attention, so
every backend computes it without knowing of chunks. For that a chunk has to begin on a page: the page size divides c.

Three rows with query lengths [4, 10, 5], seq_lens [6, 17, 9], c = 4 and pages of 2 tokens:

>>> starts, computed = np.array([0, 4, 14, 19], np.int32), np.array([2, 7, 4], np.int32)
>>> table = np.arange(30, dtype=np.int32).reshape(3, 10)
>>> positions = np.concatenate([np.arange(2, 6), np.arange(7, 17), np.arange(4, 9)])
>>> slots = np.repeat([0, 20, 40], [4, 10, 5]) + positions
>>> batch = HostBatch(starts, np.array([6, 17, 9], np.int32), computed, table, slots, positions, page_size=2)
>>> virtual = local_attention(batch, 4)
>>> virtual.query_lens.tolist()
[2, 2, 1, 4, 4, 1, 4, 1]
>>> virtual.seq_lens.tolist()
[4, 2, 4, 4, 4, 1, 4, 1]
>>> virtual.block_table.tolist()
[[0, 1], [2, 0], [12, 13], [14, 15], [16, 17], [18, 0], [22, 23], [24, 0]]

So a batch has as many virtual rows as it happens to need. A captured launch has a fixed number: q tokens that follow
each other lie in at most 1 + ⌈(q-1)/c⌉ chunks, so every row gets that many virtual rows, two while 1 < q <= c + 1.
Unneeded virtual rows hold no query and point to the null page. A row of three tokens from position 7 on, and one from 4
on, in chunks of 4 on pages of 2:

>>> from attention.batch.host import rows_batch
>>> batch = rows_batch(np.array([0, 3, 6]), np.array([7, 4]), np.arange(1, 13, dtype=np.int32).reshape(2, 6), 2)
>>> virtual = fixed_local_attention(batch, 4, virtual_rows_of(3, 4))
>>> virtual.query_lens.tolist(), virtual.seq_lens.tolist()
([1, 2, 3, 0], [4, 2, 3, 1])
>>> virtual.block_table.tolist()
[[3, 4], [5, 0], [9, 10], [0, 0]]

Source: vllm-project/vllm, vllm/v1/attention/backends/utils.py, make_local_attention_virtual_batches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy import ndarray

from attention.batch.host import HostBatch, offsets_within, owners_of, page_layout
from attention.batch.metadata import ROW_FIELDS, CommonAttentionMetadata
from attention.batch.transforms.windowed import WindowedBatch, pages_from
from attention.checking import CHECKS, whole_number
from attention.errors import InvalidInputError
from attention.staging import Field, Staged, StagingArena, bucket_of


def check_chunk_size(chunk_size: int, page_size: int) -> None:
    """Refuse chunks that do not begin on a page.

    Raises:
        InvalidInputError: chunk_size is not a positive multiple of page_size.
    """
    if whole_number("chunk_size", chunk_size) % page_size:
        raise InvalidInputError(
            f"attention in chunks of {chunk_size} tokens needs a page size that divides {chunk_size}; given pages of "
            f"{page_size}: choose another page size"
        )


def local_attention(batch: HostBatch, chunk_size: int) -> HostBatch:
    """The batch whose plain causal attention is `batch`'s attention in chunks of `chunk_size` positions.

    Tokens stay in their order with their slots and rotary positions, so queries and outputs need no rearrangement. Only
    rows change: lengths count from the chunk's first key, and page lists begin with its page.

    Args:
        chunk_size: c, positions per chunk, counted from each row's first key; a multiple of the page size.

    Returns:
        The rows on the batch's first group's pages (its `other_groups` and extras are left out): V rows, ⌈query
        length/c⌉ or one more for every row with queries.

    Raises:
        InvalidInputError: the page size does not divide chunk_size.
    """
    check_chunk_size(chunk_size, batch.page_size)
    first = batch.num_computed_tokens // chunk_size  # [B] chunk of the row's first query
    last = (batch.seq_lens - 1) // chunk_size
    counts = np.where(batch.query_lens > 0, last - first + 1, 0)
    row = owners_of(counts)
    return _virtual_rows(batch, chunk_size, row, first[row] + offsets_within(counts))


def virtual_rows_of(query_len: int, chunk_size: int) -> int:
    """Most chunks that this many consecutive tokens lie in.

    >>> [virtual_rows_of(query_len, 4) for query_len in (1, 2, 5, 6)]
    [1, 2, 2, 3]
    """
    return 1 + -(-(query_len - 1) // chunk_size)


def fixed_local_attention(batch: HostBatch, chunk_size: int, each: int) -> HostBatch:
    """`local_attention` with `each` virtual rows for every row, B·each in all.

    Raises:
        InvalidInputError: a row lies in more than `each` chunks, or the page size does not divide chunk_size.
    """
    check_chunk_size(chunk_size, batch.page_size)
    row = np.repeat(np.arange(batch.num_reqs), each)
    chunk = batch.num_computed_tokens[row] // chunk_size + np.arange(len(row)) % each
    virtual = _virtual_rows(batch, chunk_size, row, chunk)
    if virtual.query_start_loc[-1] != batch.num_tokens:
        raise InvalidInputError(
            f"each={each}: a row lies in more than {each} chunks of {chunk_size} tokens; `virtual_rows_of` says how "
            "many a row of so many query tokens may lie in"
        )
    return virtual


def _virtual_rows(batch: HostBatch, chunk_size: int, row: ndarray, chunk: ndarray) -> HostBatch:
    """Row row[i] of a batch in its chunk chunk[i], for each virtual row [V]; on the null page where it has no query."""
    start = chunk * chunk_size  # [V] position of the chunk's first key
    first = np.maximum(batch.num_computed_tokens[row], start)  # [V] position of the first query
    stop = np.minimum(batch.seq_lens[row], start + chunk_size)
    used = first < stop
    lens = np.where(used, stop - first, 0)
    seq_lens = np.where(used, stop - start, 1).astype(np.int32)
    layout = page_layout(seq_lens, batch.page_size)
    if isinstance(batch, WindowedBatch):  # which has no table, and would make one
        listed, begins = batch.page_indices, batch.page_indptr[:-1]
    else:
        listed = batch.block_table
        begins = np.arange(batch.num_reqs) * batch.block_table.shape[1]
    pages = pages_from(listed, begins[row] + np.where(used, start // batch.page_size, 0), layout.counts)
    pages[layout.indptr[:-1][~used]] = 0  # the null page
    query_start_loc = np.zeros(len(row) + 1, np.int32)
    np.cumsum(lens, out=query_start_loc[1:], dtype=np.int32)
    return WindowedBatch(
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        num_computed_tokens=seq_lens - lens.astype(np.int32),
        slot_mapping=batch.slot_mapping,
        positions=batch.positions,
        page_size=batch.page_size,
        page_counts=layout.counts,
        page_indptr=layout.indptr,
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
        self._hosts = self._arena.hosts(self._bucket)

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
