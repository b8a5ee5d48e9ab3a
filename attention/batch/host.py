"""HostBatch: the attention of one batch as numpy arrays, before anything is sent to a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy import ndarray

from attention.cached import cached_property
from attention.checking import require
from attention.errors import InvalidInputError, InvariantError

_WIDE = 1024
"""Rows are joined one by one if the longest has at least this many pages. Joining a row of 4,097 pages with 15, 63 and
255 rows of 50 takes 6, 17 and 60 µs, a mask over the whole table 28, 98 and 379 µs; joining 16 or 32 rows of 50 pages
takes 5 or 9 µs, a mask 3 or 4 µs."""


E = TypeVar("E")


class BatchExtra(Protocol):
    """Host-side arrays besides attention's that only some models' batches have.

    what: its name in messages, such as "recurrent states".
    """

    @property
    def what(self) -> str:
        """See above."""

    def validate(self, query_lens: ndarray) -> None:
        """Check the arrays against the rows' tokens [B].

        Raises:
            InvariantError: they contradict each other.
        """


def extra_of(extras: Sequence[object], kind: type[E]) -> E | None:
    """The extra of this class, or None."""
    for extra in extras:
        if isinstance(extra, kind):
            return extra
    return None


@dataclass(frozen=True)
class HostBatch:
    """One batch's attention on the host. Every transform is HostBatch -> HostBatch.

    Lengths of queries and lists of pages follow from its arrays: they are computed when they are first read, unless who
    made the batch has noted them.

    Lengths are exact, never upper bounds. Padding rows are on the null page: seq_len 1, position 0, slot 0, block
    table 0. Padding tokens after a row's own (see specdec/rounds/fixed.py) write to slot 0.

    Attributes:
        query_start_loc: [B+1] int32, row i's tokens are query_start_loc[i] … query_start_loc[i+1]-1.
        seq_lens: [B] int32, keys visible to the row's last token: num_computed_tokens + query length.
        num_computed_tokens: [B] int32, keys that were in the cache before this batch.
        block_table: [B, P] int32 page ids; entries past the row's own pages are 0.
        slot_mapping: [T] int64, cache slot of every token (page·page_size + offset).
        positions: [T] int64, rotary position of every token.
        page_size: tokens per page.
        other_groups: the same rows and tokens on the pages of each further cache group, see
            `attention.batch.transforms.windowed`; () where the model has one.
        extras: arrays that only some models' batches have; at most one of a class, see `extra`.
    """

    query_start_loc: ndarray
    seq_lens: ndarray
    num_computed_tokens: ndarray
    block_table: ndarray
    slot_mapping: ndarray
    positions: ndarray
    page_size: int
    other_groups: HostBatches = ()
    extras: tuple[BatchExtra, ...] = ()

    @property
    def num_reqs(self) -> int:
        """B."""
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.positions)

    def extra(self, kind: type[E]) -> E | None:
        """The extra of this class; None where the batch has none."""
        return extra_of(self.extras, kind)

    def refuse_extras(self, done: str) -> None:
        """Raise InvalidInputError if the batch has extras: they describe whole rows in their order, as recurrent states
        do."""
        for extra in self.extras:
            raise InvalidInputError(f"a batch of rows with {extra.what} cannot be {done}")

    @cached_property
    def query_lens(self) -> ndarray:
        """[B] int32."""
        return np.diff(self.query_start_loc)

    @cached_property
    def page_counts(self) -> ndarray:
        """[B] int32, pages that hold the row's seq_len keys."""
        return page_counts_of(self.seq_lens, self.page_size)

    @cached_property
    def page_indices(self) -> ndarray:
        """[sum(page_counts)] int32, the rows' pages, concatenated (FlashInfer's kv_indices)."""
        return flat_pages(self.block_table, self.page_counts)

    @cached_property
    def page_indptr(self) -> ndarray:
        """[B+1] int32, row i's pages are page_indices[page_indptr[i] : page_indptr[i+1]]."""
        return page_layout(self.seq_lens, self.page_size).indptr

    @cached_property
    def last_page_len(self) -> ndarray:
        """[B] int32, keys on each row's last page, 1 … page_size."""
        return page_layout(self.seq_lens, self.page_size).last_lens

    def validate(self) -> None:
        """Check the arrays against each other.

        Raises:
            InvariantError: shapes, dtypes, lengths or slots contradict each other.
        """
        rows = self.num_reqs
        tokens = self.num_tokens
        require(self.num_computed_tokens.shape == (rows,), "num_computed_tokens must be [B]")
        require(int(self.num_computed_tokens.min(initial=0)) >= 0, "num_computed_tokens must not be negative")
        require(len(self.block_table) == rows, "block_table must be [B, P]")
        require(self.query_start_loc.shape == (rows + 1,), "query_start_loc must be [B+1]")
        require(
            int(self.query_start_loc[0]) == 0 and int(self.query_start_loc[-1]) == tokens, "query_start_loc must span T"
        )
        require(bool((self.query_lens >= 0).all()), "query lengths must not be negative")
        require(
            bool((self.seq_lens == self.num_computed_tokens + self.query_lens).all()),
            "seq_lens must equal num_computed_tokens + query lengths",
        )
        require(self.slot_mapping.shape == (tokens,), "slot_mapping must be [T]")
        require(int(self.page_counts.max(initial=0)) <= self.block_table.shape[1], "block_table is too narrow")
        owner = owners_of(self.query_lens)
        positions = self.num_computed_tokens[owner] + np.arange(self.num_tokens) - self.query_start_loc[owner]
        expected = slots_of(self.block_table, owner, positions, self.page_size)
        own = (expected == self.slot_mapping) | (self.slot_mapping == 0)
        require(bool(own.all()), "a slot is neither the one its row owns at that position nor the null slot")
        for extra in self.extras:
            extra.validate(self.query_lens)

    def validate_pages(self, num_pages: int) -> None:
        """Check that the rows' pages are in a pool of this many, including the null page.

        Raises:
            InvariantError: a row lists another page.
        """
        lowest = int(self.page_indices.min(initial=0))
        highest = int(self.page_indices.max(initial=0))
        if lowest < 0 or highest >= num_pages:
            wrong = lowest if lowest < 0 else highest
            raise InvariantError(f"page {wrong} in the block table: the pool has pages 0 … {num_pages - 1}")


HostBatches = tuple[HostBatch, ...]


def rows_batch(query_start_loc: ndarray, first_positions: ndarray, block_table: ndarray, page_size: int) -> HostBatch:
    """A batch whose row i feeds consecutive positions from first_positions[i] on.

    Args:
        query_start_loc: [B+1] int32, from 0 on, not falling; first_positions: [B], not negative; block_table: [B, P],
            wide enough for the last position of each row. Whole numbers.

    Raises:
        InvalidInputError: one of them has another shape, or does not fit the others; or no page size.

    >>> b = rows_batch(np.array([0, 2, 3]), np.array([15, 4]), np.array([[5, 9], [3, 0]]), 16)
    >>> b.positions.tolist(), b.slot_mapping.tolist(), b.seq_lens.tolist()
    ([15, 16, 4], [95, 144, 52], [17, 5])
    """
    _check_shapes(query_start_loc, first_positions, block_table, page_size)
    lens = np.diff(query_start_loc)
    seq_lens = (first_positions + lens).astype(np.int32)
    layout = page_layout(seq_lens, page_size)
    try:
        owner = owners_of(lens)
    except ValueError:
        raise _starts_error(query_start_loc, first_positions) from None
    positions = np.arange(query_start_loc[-1]) + (first_positions - query_start_loc[:-1])[owner]
    try:
        slots = slots_of(block_table, owner, positions, page_size)
        page_indices = flat_pages(block_table, layout.counts)
    except IndexError:
        raise InvalidInputError(
            f"block_table of {block_table.shape[1]} pages a row, of {page_size} tokens each, with a token at position "
            f"{int(seq_lens.max()) - 1}: allowed are tables as wide as the longest row; give more columns"
        ) from None
    batch = HostBatch(
        query_start_loc=query_start_loc.astype(np.int32),
        seq_lens=seq_lens,
        num_computed_tokens=first_positions.astype(np.int32),
        block_table=block_table,
        slot_mapping=slots,
        positions=positions.astype(np.int64),
        page_size=page_size,
    )
    vars(batch).update(
        query_lens=lens.astype(np.int32),
        page_counts=layout.counts,
        page_indices=page_indices,
        page_indptr=layout.indptr,
        last_page_len=layout.last_lens,
    )
    return batch


def _check_shapes(query_start_loc: Any, first_positions: Any, block_table: Any, page_size: int) -> None:
    """Raise InvalidInputError for arguments from which `rows_batch` cannot make a batch."""
    given = {"query_start_loc": query_start_loc, "first_positions": first_positions, "block_table": block_table}
    rows = len(query_start_loc) - 1 if np.ndim(query_start_loc) == 1 else -1
    shapes = {name: np.shape(array) for name, array in given.items()}
    if (
        rows < 0
        or shapes["first_positions"] != (rows,)
        or shapes["block_table"][:1] != (rows,)
        or (len(shapes["block_table"]) != 2)
    ):
        found = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise InvalidInputError(f"{found}: allowed are [B+1], [B] and [B, P], one entry of each for every row")
    wrong = [name for name, array in given.items() if np.asarray(array).dtype.kind not in "iu"]
    if wrong or page_size < 1:
        raise InvalidInputError(
            f"{', '.join(wrong) or f'page_size={page_size}'}: allowed are whole numbers, of pages from 1"
        )
    if query_start_loc[0] != 0 or (rows and first_positions.min() < 0):
        raise _starts_error(query_start_loc, first_positions)


def _starts_error(query_start_loc: ndarray, first_positions: ndarray) -> InvalidInputError:
    return InvalidInputError(
        f"query_start_loc {query_start_loc.tolist()} with first_positions {first_positions.tolist()}: allowed are "
        "starts from 0 on that do not fall, and positions from 0 on"
    )


def slots_of(block_table: ndarray, rows: ndarray, positions: ndarray, page_size: int) -> ndarray:
    """Cache slots of (row, position) pairs: block_table[row, pos // ps]·ps + pos % ps, int64.

    A page crossing is a jump to another page id, never +1:

    >>> slots_of(np.array([[5, 9, 2, 7]]), np.zeros(3, int), np.array([47, 48, 49]), 16).tolist()
    [47, 112, 113]
    """
    first = np.multiply(block_table[rows, positions // page_size], page_size, dtype=np.int64)
    return first + positions % page_size


def slots_at(
    block_table: ndarray,
    rows: ndarray,
    pages: ndarray,
    offsets: ndarray,
    page_size: int,
    out: ndarray | None = None,
) -> ndarray:
    """`slots_of` for positions that are split already: the pages-th page of each row, and the place on it.

    Args:
        rows, pages, offsets: any shapes that broadcast. out: int64, where the slots are written; default a new array.

    >>> slots_at(np.array([[5, 9, 2, 7]]), np.array([[0]]), np.array([2, 3]), np.array([[15], [0]]), 16).tolist()
    [[47, 127], [32, 112]]
    """
    first = np.multiply(block_table[rows, pages], page_size, dtype=np.int64)
    return np.add(first, offsets, out=out)


def page_counts_of(seq_lens: ndarray, page_size: int) -> ndarray:
    """Pages that hold these numbers of keys, an array of any shape.

    >>> page_counts_of(np.array([1, 16, 17]), 16).tolist()
    [1, 1, 2]
    """
    return (seq_lens + (page_size - 1)) // page_size


class PageLayout(NamedTuple):
    """The layout of the pages of B rows on their list.

    Attributes:
        counts: [..., B] pages of each row. indptr: [..., B+1] int32, row i's are indptr[i] … indptr[i+1]-1 on the list.
        last_lens: [..., B] keys on each row's last page, 1 … page_size.
    """

    counts: ndarray
    indptr: ndarray
    last_lens: ndarray


def page_layout(seq_lens: ndarray, page_size: int) -> PageLayout:
    """The layout of rows with these numbers of keys [..., B].

    >>> counts, indptr, last_lens = page_layout(np.array([1, 16, 17]), 16)
    >>> counts.tolist(), indptr.tolist(), last_lens.tolist()
    ([1, 1, 2], [0, 1, 2, 4], [1, 16, 1])
    """
    counts = page_counts_of(seq_lens, page_size)
    indptr = np.zeros((*counts.shape[:-1], counts.shape[-1] + 1), np.int32)
    np.cumsum(counts, axis=-1, out=indptr[..., 1:], dtype=np.int32)
    return PageLayout(counts, indptr, (seq_lens - 1) % page_size + 1)


def offsets_within(counts: ndarray) -> ndarray:
    """0 … n-1 for every n of counts [B], one after the other: [sum(counts)] int64.

    >>> offsets_within(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def owners_of(counts: ndarray) -> ndarray:
    """Which of counts [B] each element belongs to: i counts[i] times, one after the other: [sum(counts)] int64.

    >>> owners_of(np.array([2, 0, 3])).tolist()
    [0, 0, 2, 2, 2]
    """
    return np.repeat(np.arange(len(counts)), counts)


def starts_of(lens: ndarray) -> ndarray:
    """Where each of some pieces of lens [B] begins, one after the other, and where the last one ends: [B+1] int64.

    >>> starts_of(np.array([2, 0, 3])).tolist()
    [0, 2, 2, 5]
    """
    return np.concatenate([[0], np.cumsum(lens)])


def flat_pages(block_table: ndarray, page_counts: ndarray) -> ndarray:
    """Concatenate the first page_counts[i] entries of every row of block_table [B, P] -> [sum(page_counts)] int32.

    >>> flat_pages(np.array([[7, 9], [3, 4]], np.int32), np.array([1, 2])).tolist()
    [7, 3, 4]
    """
    width = int(page_counts.max(initial=0))
    if width > _WIDE:
        return np.concatenate([row[:count] for row, count in zip(block_table, page_counts.tolist(), strict=True)])
    used = np.arange(width) < page_counts[:, None]
    return block_table[:, :width][used]


def covering(table: ndarray, rows: int, pages: int) -> ndarray:
    """A block table of `rows` rows and at least `pages` columns: this one, or with the null page around it.

    >>> covering(np.array([[7, 9]], np.int32), 2, 3).tolist()
    [[7, 9, 0], [0, 0, 0]]
    """
    if table.shape[0] == rows and table.shape[1] >= pages:
        return table
    larger = np.zeros((rows, max(pages, table.shape[1])), np.int32)
    larger[: len(table), : table.shape[1]] = table
    return larger


def write_pages(out: ndarray, table: ndarray, counts: ndarray) -> int:
    """Write `flat_pages(table, counts)` to the front of `out` [at least sum(counts)] int32; returns how many.

    >>> out = np.zeros(4, np.int32)
    >>> write_pages(out, np.array([[7, 9], [3, 4]], np.int32), np.array([1, 2])), out.tolist()
    (3, [7, 3, 4, 0])
    """
    if len(counts) == 1:
        used = int(counts[0])
        out[:used] = table[0, :used]
        return used
    flat = flat_pages(table, counts)
    out[: len(flat)] = flat
    return len(flat)
