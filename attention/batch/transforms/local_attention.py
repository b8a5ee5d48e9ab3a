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
>>> virtual_rows(batch, 4).row.tolist(), virtual_rows(batch, 4).key_start.tolist()
([0, 0, 1, 1, 1, 1, 2, 2], [0, 4, 4, 8, 12, 16, 4, 8])
>>> virtual.block_table.tolist()
[[0, 1], [2, 3], [12, 13], [14, 15], [16, 17], [18, 19], [22, 23], [24, 25]]

Source: vllm-project/vllm, vllm/v1/attention/backends/utils.py, make_local_attention_virtual_batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attention.batch.host import HostBatch, offsets_within
from attention.batch.transforms.arguments import whole_number
from attention.errors import InvalidInputError


@dataclass(frozen=True)
class VirtualRows:
    """The virtual rows of a batch, in the order of its tokens.

    Attributes:
        row: [V] int64, the batch's row that a virtual row is a part of.
        key_start: [V] int32, position in `row` of the virtual row's first key: the start of its chunk.
    """

    row: np.ndarray
    key_start: np.ndarray


def check_chunk_size(chunk_size: int, page_size: int) -> None:
    """Refuse chunks that do not begin on a page.

    Raises:
        InvalidInputError: chunk_size is not a positive multiple of page_size.
    """
    if whole_number("chunk_size", chunk_size, 1) % page_size:
        raise InvalidInputError(
            f"attention in chunks of {chunk_size} tokens needs a page size that divides {chunk_size}; given pages of "
            f"{page_size}: choose another page size"
        )


def virtual_rows(batch: HostBatch, chunk_size: int) -> VirtualRows:
    """Which part of which row each virtual row is. Rows without queries have none.

    Args:
        chunk_size: c, positions per chunk, counted from each row's first key.
    """
    first = batch.num_computed_tokens // chunk_size  # [B] chunk of the row's first query
    last = (batch.seq_lens - 1) // chunk_size
    counts = np.where(batch.query_lens > 0, last - first + 1, 0)
    row = np.repeat(np.arange(batch.num_reqs), counts)
    return VirtualRows(row, ((first[row] + offsets_within(counts)) * chunk_size).astype(np.int32))


def local_attention(batch: HostBatch, chunk_size: int) -> HostBatch:
    """The batch whose plain causal attention is `batch`'s attention in chunks of `chunk_size` positions.

    Tokens stay in their order with their slots and rotary positions, so queries and outputs need no rearrangement. Only
    rows change: lengths count from the chunk's first key, and block tables begin with its page. A batch cut to chunks
    already, with every row in its first chunk, is returned unchanged except for a narrower block table.

    Args:
        chunk_size: c, positions per chunk, counted from each row's first key; a multiple of the page size.

    Returns:
        The rows on the batch's first group's pages (its `other_groups` and extras are left out): V rows, ⌈query
        length/c⌉ or one more for every row with queries; block_table [V, min(c / page size, P)].

    Raises:
        InvalidInputError: the page size does not divide chunk_size.
    """
    check_chunk_size(chunk_size, batch.page_size)
    virtual = virtual_rows(batch, chunk_size)
    row, start = virtual.row, virtual.key_start
    first = np.maximum(batch.num_computed_tokens[row], start)  # [V] position of the first query
    stop = np.minimum(batch.seq_lens[row], start + chunk_size)
    return HostBatch(
        query_start_loc=np.concatenate([[0], np.cumsum(stop - first)]).astype(np.int32),
        seq_lens=stop - start,
        num_computed_tokens=first - start,
        block_table=_chunk_pages(batch, row, start // batch.page_size, chunk_size // batch.page_size),
        slot_mapping=batch.slot_mapping,
        positions=batch.positions,
        page_size=batch.page_size,
    )


def _chunk_pages(batch: HostBatch, row: np.ndarray, first_page: np.ndarray, pages: int) -> np.ndarray:
    """[V, min(pages, P)] int32: `pages` entries of each row's table from first_page on; the null page after its end."""
    table = batch.block_table
    width = table.shape[1]
    column = first_page[:, None] + np.arange(min(pages, width))
    if not column.size or int(column[:, -1].max()) < width:
        return table[row[:, None], column]
    found = table[row[:, None], np.minimum(column, width - 1)]
    return np.where(column < width, found, np.int32(0))
