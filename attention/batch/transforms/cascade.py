"""Cascade attention: rows that begin with the same pages attend to these once, all together, and each to the rest.

Rows of one batch share their leading pages when they begin with the same tokens and a prefix cache is on. Attention
over such a row is the same sum over keys in two parts: the shared pages, where every key is visible to every query, so
that the queries of all rows are one tall matrix, and the row's own pages, causal as ever. The two results are weighted
by their sums of exponentials.

Nothing but block tables and lengths is read here. Three rows that have computed 8, 9 and 5 keys, pages of 4: all begin
on pages 7 and 9, but the third has computed only one key of page 9, so it would see a part of that page only. Two rows
with two pages are as much as three rows with one page, and fewer queries; so the third row attends alone:

>>> table = np.array([[7, 9, 3], [7, 9, 4], [7, 9, 0]], np.int32)
>>> shared_prefix(table, np.array([8, 9, 5]), 4)
SharedPrefix(num_pages=2, rows=array([0, 1]), page_size=4)

Source: Ye et al., "Cascade Inference", flashinfer.ai/2024/02/02/cascade-inference.html; vllm-project/vllm,
vllm/v1/attention/backends/flash_attn.py (use_cascade_attention), where all rows of a batch must share the prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attention.batch.host import HostBatch
from attention.checking import require
from attention.errors import InvalidInputError

NULL_PAGE = 0


@dataclass(frozen=True)
class SharedPrefix:
    """Leading full pages that several rows of a batch have in common, every key visible to every query of these rows.

    Attributes:
        num_pages: at least 1. rows: [b] int64, increasing, at least two. page_size: tokens per page.
    """

    num_pages: int
    rows: np.ndarray
    page_size: int

    @property
    def num_keys(self) -> int:
        """Keys on the shared pages."""
        return self.num_pages * self.page_size

    def pages_by_row(self, rows: int) -> np.ndarray:
        """[rows] int32: num_pages for the rows that share them, 0 for the others."""
        pages = np.zeros(rows, np.int32)
        pages[self.rows] = self.num_pages
        return pages


def shared_prefix(block_table: np.ndarray, num_computed_tokens: np.ndarray, page_size: int) -> SharedPrefix | None:
    """The pages and rows for which attending together leaves out the most keys; None where no two rows share a page.

    A row shares pages only as far as all of their keys were computed before its first query. So a row that lies inside
    the prefix (its queries stand on a page that others have in full) limits how many pages it can share, and is left
    out where that would cost the others more than it gives. Rows are compared with one of those that begin on the page
    that most rows begin on; rows on the null page (padding) share nothing.

    Args:
        block_table: [B, P] int32; num_computed_tokens: [B].

    Raises:
        InvalidInputError: not as many lengths as rows, or no page size.
    """
    if len(num_computed_tokens) != len(block_table) or page_size < 1:
        raise InvalidInputError(
            f"{len(block_table)} rows of pages of {page_size} tokens with {len(num_computed_tokens)} lengths: allowed "
            "are as many lengths as rows, and pages of at least one token"
        )
    first = block_table[:, 0] if block_table.shape[1] else np.zeros(len(block_table), np.int32)
    ordered = np.sort(first)
    if not ((ordered[1:] == ordered[:-1]) & (ordered[1:] != NULL_PAGE)).any():
        return None
    full = np.asarray(num_computed_tokens) // page_size  # [B] pages whose keys all queries of the row see
    values, counts = np.unique(first[first != NULL_PAGE], return_counts=True)
    rows = np.flatnonzero(first == values[counts.argmax()])
    most = rows[full[rows].argmax()]
    width = min(int(full[most]), block_table.shape[1])
    differs = block_table[rows, :width] != block_table[most, :width]  # [b, width]
    equal = np.where(differs.any(1), differs.argmax(1), width) if width else np.zeros(len(rows), np.int64)
    lead = np.minimum(equal, full[rows])  # [b] pages that each row can share
    falling = np.sort(lead)[::-1]
    saved = falling * np.arange(len(falling))  # pages not read again, for the rows up to each
    best = int(saved.argmax())
    if not saved[best]:
        return None
    pages = int(falling[best])
    return SharedPrefix(pages, rows[lead >= pages], page_size)


@dataclass(frozen=True)
class Cascade:
    """A batch in two levels.

    Attributes:
        tokens: [t] int64, the token rows of the batch whose queries see all of the prefix.
        pages: [num_pages] int32 of the prefix. num_keys: on them.
        suffix: all rows over the pages that are their own: those that share the prefix count their keys after it.
            Slots and rotary positions are the batch's.
    """

    tokens: np.ndarray
    pages: np.ndarray
    num_keys: int
    suffix: HostBatch


def cascade(batch: HostBatch, prefix: SharedPrefix) -> Cascade:
    """Divide a batch at a prefix that `shared_prefix` found in it.

    Raises:
        InvariantError: it was found in another batch.

    >>> from attention.batch.host import rows_batch
    >>> table = np.array([[7, 9, 3], [7, 9, 4], [5, 0, 0]], np.int32)
    >>> batch = rows_batch(np.array([0, 2, 3, 4]), np.array([8, 9, 1]), table, 4)
    >>> two = cascade(batch, shared_prefix(table, batch.num_computed_tokens, 4))
    >>> two.tokens.tolist(), two.pages.tolist(), two.num_keys
    ([0, 1, 2], [7, 9], 8)
    >>> two.suffix.num_computed_tokens.tolist(), two.suffix.seq_lens.tolist(), two.suffix.block_table.tolist()
    ([0, 1, 1], [2, 2, 2], [[3, 0, 0], [4, 0, 0], [5, 0, 0]])
    """
    rows, cut = prefix.rows, prefix.num_pages
    require(prefix.page_size == batch.page_size, "a prefix of another page size")
    require(int(batch.num_computed_tokens[rows].min()) >= prefix.num_keys, "a row does not see all of the prefix")
    require(not batch.other_groups, "a batch of several cache groups is divided group by group")
    leading = batch.block_table[rows, :cut]
    require(leading.shape[1] == cut and bool((leading == leading[:1]).all()), "the rows begin on different pages")
    table = batch.block_table.copy()
    table[rows, : table.shape[1] - cut] = batch.block_table[rows, cut:]
    table[rows, table.shape[1] - cut :] = NULL_PAGE
    before = np.zeros(batch.num_reqs, np.int32)
    before[rows] = prefix.num_keys
    members = np.zeros(batch.num_reqs, bool)
    members[rows] = True
    suffix = HostBatch(
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens - before,
        num_computed_tokens=batch.num_computed_tokens - before,
        block_table=table,
        slot_mapping=batch.slot_mapping,
        positions=batch.positions,
        page_size=batch.page_size,
    )
    return Cascade(
        tokens=np.flatnonzero(np.repeat(members, batch.query_lens)),
        pages=batch.block_table[rows[0], :cut],
        num_keys=prefix.num_keys,
        suffix=suffix,
    )
