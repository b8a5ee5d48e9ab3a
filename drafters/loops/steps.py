"""The draft steps after a draft prefill, all computed together in numpy: of a ragged round, and in a fixed shape.

Step s (1 … K-1) makes draft s+1, by module m = s mod M. While s < M it reads the rows seq'-s … seq'-1 with the tokens
d_1 … d_s. After that the modules take turns again (lap l = s // M): each reads the M rows that end at seq'+l·M-1 with
the tokens d_{s-M+1} … d_s, and instead of the target's state at row i the last module's output at row i-M of the
previous lap. For M = 1 this is a chain: step s reads draft s at position seq'+s-1.

Requests that do not take a step, or are too short for it, are padding: position 0, slot 0 (the null page).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from attention.batch.fixed import LiveBatch
from attention.batch.host import HostBatch, HostBatches, covering, offsets_within, owners_of, slots_at, write_pages
from attention.batch.metadata import ROW_FIELDS, BatchArrays, CommonAttentionMetadata, HostArrays
from attention.checking import CHECKS
from attention.staging import Section, Sizes, Staged, StagingArena, bucket_of
from drafters.loops.base import DraftingRows, FixedShape, Passes

_KEPT = 256
"""Shapes of steps whose places of tokens are kept: some rows times some numbers of drafts."""


def step_width(step: int, num_modules: int) -> int:
    """Tokens a row has in draft step `step` (1, 2, …): min(step, M)."""
    return min(step, num_modules)


@dataclass(frozen=True)
class StepTokens:
    """The T tokens of all steps, step after step and row after row.

    Attributes:
        numbers, widths: [K-1, 1] the number of each step, and its tokens a row. least: [K-1, 1] committed tokens of the
            shortest row that takes it.
        ahead: [K-1, 1] first position of a row in each step, after its committed length; may be negative.
        owner, within: [T] the row of each token, and its index in the row. cell: [T] index of both in [K-1, rows].
        slices: the tokens of each step.
    """

    numbers: ndarray
    widths: ndarray
    least: ndarray
    ahead: ndarray
    owner: ndarray
    within: ndarray
    cell: ndarray
    slices: tuple[slice, ...]


@lru_cache(_KEPT)
def step_tokens(rows: int, num_steps: int, num_modules: int) -> StepTokens:
    """The tokens of some steps of some rows.

    >>> tokens = step_tokens(2, 3, 2)
    >>> tokens.widths[:, 0].tolist(), tokens.ahead[:, 0].tolist()
    ([1, 2, 2], [-1, 0, 0])
    >>> tokens.owner.tolist(), tokens.within.tolist(), tokens.cell.tolist()
    ([0, 1, 0, 0, 1, 1, 0, 0, 1, 1], [0, 0, 0, 1, 0, 1, 0, 1, 0, 1], [0, 1, 2, 2, 3, 3, 4, 4, 5, 5])
    """
    numbers = np.arange(1, num_steps + 1)[:, None]
    widths = np.minimum(numbers, num_modules)
    lens = np.repeat(widths, rows)
    cell = owners_of(lens)
    stops = np.cumsum(widths * rows).tolist()
    return StepTokens(
        numbers=numbers,
        widths=widths,
        least=widths,
        ahead=numbers // num_modules * num_modules - widths,
        owner=cell % max(rows, 1),
        within=offsets_within(lens),
        cell=cell,
        slices=tuple(slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)),
    )


def _write_steps(out: HostArrays, first: ndarray, rows: DraftingRows, tokens: StepTokens) -> tuple[ndarray, ndarray]:
    """Write all but query_start_loc and the lists of pages into `out`, and first positions [K-1, rows] into `first`.

    Returns:
        The block table, as wide as all rows need it, and the number of pages of each row in each step [K-1, rows].
    """
    page_size = rows.page_size
    lens = rows.committed_lens
    active = rows.num_drafts > tokens.numbers
    active &= lens >= tokens.least
    np.add(lens, tokens.ahead, out=first)
    first *= active
    np.add(first, tokens.widths, out=out.seq_lens, casting="unsafe")
    np.add(first.reshape(-1)[tokens.cell], tokens.within, out=out.positions)
    pages, offsets = np.divmod(out.positions, page_size)
    table = covering(rows.block_table, len(lens), -(-int(tokens.widths[-1, 0]) // page_size))
    slots = slots_at(table, tokens.owner, pages, offsets, page_size, out=out.slot_mapping)
    slots *= active.reshape(-1)[tokens.cell]
    counts, last = np.divmod(first + (tokens.widths - 1), page_size)
    counts += 1
    np.add(last, 1, out=out.last_page_len, casting="unsafe")
    np.cumsum(counts, axis=1, out=out.page_indptr[:, 1:], dtype=np.int32)
    return table, counts


def _write_step_pages(page_indices: ndarray, table: ndarray, counts: ndarray) -> None:
    """Write each step's pages into page_indices [K-1, …]; counts: [K-1, rows]. Steps that enter no new page copy."""
    used = 0
    same = (counts[1:] == counts[:-1]).all(1).tolist()
    for step, own in enumerate(counts):
        if step and same[step - 1]:
            page_indices[step, :used] = page_indices[step - 1, :used]
        else:
            used = write_pages(page_indices[step], table, own)


@dataclass(frozen=True)
class StepArrays:
    """Host arrays of the draft steps.

    Attributes:
        batches: the attention of every step.
        sent: all steps as one batch: axis 0 of its arrays is the step, except for slots and positions, which are flat,
            step after step, and for block_table, which all steps share. None without steps.
    """

    batches: HostBatches
    sent: HostArrays | None


def step_arrays(rows: DraftingRows, num_modules: int = 1) -> StepArrays:
    """All draft steps of these rows.

    A chain of K = 3 drafts, page size 16:

    >>> table = np.array([[7, 9, 0, 0], [3, 4, 8, 0], [1, 2, 5, 6]], np.int32)
    >>> steps = step_arrays(DraftingRows(np.array([18, 33, 45]), np.array([3, 3, 3]), table, 16)).batches
    >>> [step.positions.tolist() for step in steps], [step.seq_lens.tolist() for step in steps]
    ([[18, 33, 45], [19, 34, 46]], [[19, 34, 46], [20, 35, 47]])
    >>> [step.slot_mapping.tolist() for step in steps]
    [[146, 129, 93], [147, 130, 94]]

    M = 2, two requests; draft 2 by module 1, draft 3 by module 0 again, draft 4 by module 1:

    >>> rows = DraftingRows(np.array([18, 7]), np.array([4, 3]), np.array([[7, 9], [3, 4]], np.int32), 16)
    >>> [step.positions.tolist() for step in step_arrays(rows, 2).batches]
    [[17, 6], [18, 19, 7, 8], [18, 19, 0, 1]]
    """
    count = int(rows.num_drafts.max(initial=1)) - 1
    num_rows = len(rows.num_drafts)
    if not count:
        return StepArrays((), None)
    tokens = step_tokens(num_rows, count, num_modules)
    num_tokens = len(tokens.cell)
    sent: HostArrays = BatchArrays(
        query_start_loc=np.arange(num_rows + 1, dtype=np.int32) * tokens.widths.astype(np.int32),
        seq_lens=np.empty((count, num_rows), np.int32),
        slot_mapping=np.empty(num_tokens, np.int64),
        positions=np.empty(num_tokens, np.int64),
        page_indices=np.empty((0, 0), np.int32),
        page_indptr=np.zeros((count, num_rows + 1), np.int32),
        last_page_len=np.empty((count, num_rows), np.int32),
    )
    first = np.empty((count, num_rows), np.int64)
    table, counts = _write_steps(sent, first, rows, tokens)
    used = sent.page_indptr[:, -1].tolist()
    pages = np.zeros((count, max(used)), np.int32)
    _write_step_pages(pages, table, counts)
    sent, query_lens = replace(sent, page_indices=pages, block_table=table), np.diff(sent.query_start_loc)
    computed = first.astype(np.int32)
    batches = []
    for step, own in enumerate(tokens.slices):
        batch = HostBatch(
            query_start_loc=sent.query_start_loc[step],
            seq_lens=sent.seq_lens[step],
            num_computed_tokens=computed[step],
            block_table=table,
            slot_mapping=sent.slot_mapping[own],
            positions=sent.positions[own],
            page_size=rows.page_size,
        )
        # Fills HostBatch's cached properties, which were computed for all steps at once; a frozen dataclass takes no
        # attributes.
        vars(batch).update(
            query_lens=query_lens[step],
            page_counts=counts[step],
            page_indices=pages[step, : used[step]],
            page_indptr=sent.page_indptr[step],
            last_page_len=sent.last_page_len[step],
        )
        batches.append(batch)
    return StepArrays(tuple(batches), sent)


class StepSection:
    """Places all steps in an arena: one batch, most of whose arrays have the step as first dimension (`StepArrays`)."""

    def __init__(self, num_modules: int, table: bool = True) -> None:
        """table: send the block table, too; a fixed shape does not."""
        self._num_modules = num_modules
        leading = dict.fromkeys(ROW_FIELDS, "steps")
        self.arrays = Section(BatchArrays, "step", () if table else ("block_table",), leading=leading)
        self.fields = self.arrays.fields

    def sizes(self, rows: int, pages: int, steps: int) -> Sizes:
        """Sizes for at most these rows, pages a row and steps."""
        tokens = rows * sum(step_width(step, self._num_modules) for step in range(1, steps + 1))
        own = {"steps": steps, "step.rows": rows, "step.rows_plus_1": rows + 1, "step.pages": pages}
        return own | {"step.tokens": tokens, "step.entries": rows * pages}

    def of(self, batches: Sequence[HostBatch], staged: Staged) -> Passes:
        """Attention metadata of every step."""
        if not batches:
            return ()
        whole: BatchArrays[Tensor] = self.arrays.of(staged.views)
        per_step = [getattr(whole, name).unbind(0) for name in ROW_FIELDS]
        lens = [len(batch.positions) for batch in batches]
        tokens = (whole.slot_mapping.split(lens), whole.positions.split(lens))
        steps = []
        for host, *views in zip(batches, *per_step, *tokens, strict=True):
            if CHECKS.on:
                host.validate()
            own = dict(zip((*ROW_FIELDS, "slot_mapping", "positions"), views, strict=True))
            own["page_indices"] = own["page_indices"][: int(host.page_counts.sum())]
            steps.append(CommonAttentionMetadata(host=host, staged=staged, block_table=whole.block_table, **own))
        return tuple(steps)


class _Place:
    """One host buffer of the draft steps, with the batches over it. first: [K-1, rows] first positions of the rows."""

    def __init__(self, arrays: HostArrays, shape: FixedShape, tokens: StepTokens) -> None:
        self.arrays = arrays
        arrays.query_start_loc[:] = np.arange(shape.rows + 1) * tokens.widths
        self.first = np.zeros((len(tokens.slices), shape.rows), np.int64)
        self.batches = tuple(
            LiveBatch(
                query_start_loc=arrays.query_start_loc[step],
                seq_lens=arrays.seq_lens[step],
                num_computed_tokens=self.first[step],
                slot_mapping=arrays.slot_mapping[own],
                positions=arrays.positions[own],
                block_table=np.zeros((0, 0), np.int32),
                page_size=shape.page_size,
                page_indptr=arrays.page_indptr[step],
            )
            for step, own in enumerate(tokens.slices)
        )


class StepBuffers:
    """The steps in a fixed shape, a `drafters.loops.base.FixedSteps`."""

    def __init__(self, shape: FixedShape, tokens: StepTokens, device: torch.device, bonus: int = 0) -> None:
        """bonus: tokens that the draft prefill reads after committed states, see `drafters.loops.base.ReadsBonus`."""
        self._tokens = tokens
        self._bonus = bonus
        self._lens = np.zeros(shape.rows, np.int64)
        self._num_drafts = np.zeros(shape.rows, np.int64)
        self._section = section = StepSection(1, table=False)
        own = {"step.entries": shape.page_entries, "step.tokens": len(tokens.cell)}
        sizes = section.sizes(shape.rows, 0, len(tokens.slices)) | own
        self._bucket = bucket_of(**sizes)
        self._arena = StagingArena(section.fields, self._bucket, device)
        buffers = self._arena.hosts(self._bucket)
        self._places = [_Place(section.arrays.of(host), shape, self._tokens) for host in buffers]

    def views(self, batches: Sequence[HostBatch], staged: Staged) -> Passes:
        return self._section.of(batches, staged)

    def send(self, rows: DraftingRows) -> tuple[HostBatches, Staged]:
        """See `FixedSteps.send`; the batches are views of the arena, valid until the round after the next."""
        place = self._places[self._arena.begin()]
        count = len(rows.num_drafts)
        if not place.batches:
            return (), self._arena.end(self._bucket)
        if count < len(self._lens):
            self._lens[count:] = self._num_drafts[count:] = 0
        self._lens[:count] = rows.committed_lens
        self._num_drafts[:count] = rows.num_drafts
        self._lens[:count] += self._bonus
        padded = DraftingRows(self._lens, self._num_drafts, rows.block_table, rows.page_size)
        table, counts = _write_steps(place.arrays, place.first, padded, self._tokens)
        _write_step_pages(place.arrays.page_indices, table, counts)
        return tuple([batch.over(table) for batch in place.batches]), self._arena.end(self._bucket)
