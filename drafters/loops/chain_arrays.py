"""Host arrays of a chain of drafts, computed in numpy, and their places in the staging arena (`ChainSection`).

Running example: K=3, page size 16, q=[4,4,4], seq=[20,33,48], accepted=[1,3,0], block tables [[7,9],[3,4,8],[1,2,5,6]].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic

import numpy as np
import torch

from attention.batch.host import HostBatch, flat_pages, page_layout, rows_batch, slots_of
from attention.batch.metadata import BatchArrays, BatchSection, CommonAttentionMetadata
from attention.checking import CHECKS
from attention.staging import A, Section, Staged, array
from drafters.loops.base import DraftingRows, DraftInput, LoopSize


@dataclass(frozen=True)
class AcceptedRows:
    """The tokens of a verified batch that the draft prefill reads again with the target's true hidden states.

    Attributes:
        query_start_loc: [B'+1] int32.
        token_indices: [T'] int64, token rows of the verified batch.
        last_row: [B'] int64, token rows of the draft prefill whose output gives draft 1.
    """

    query_start_loc: np.ndarray
    token_indices: np.ndarray
    last_row: np.ndarray


@dataclass(frozen=True)
class DraftSteps:
    """Draft steps 2 … K, computed together; axis 0 is the step.

    Rows that do not take a step are padding: position 0, seq_len 1, slot 0 (the null page).

    Attributes:
        active: [K-1, B] bool, rows with n_i >= j.
        positions: [K-1, B] int64; seq_lens: [K-1, B] int32; slots: [K-1, B] int64.
    """

    active: np.ndarray
    positions: np.ndarray
    seq_lens: np.ndarray
    slots: np.ndarray


def accepted_rows(
    query_start_loc: np.ndarray, num_drafts: np.ndarray, num_accepted: np.ndarray, rows: np.ndarray | None = None
) -> AcceptedRows:
    """Drop the rejected tokens of a verified batch: each row keeps its q - n committed tokens and accepted drafts.

    Args:
        query_start_loc: [B+1] of the verified batch.
        num_drafts, num_accepted: [B]; both 0 for a prompt row.
        rows: batch rows to keep, in this order (default: all).

    Source: vllm-project/vllm PR #20466 (prepare_inputs of the EAGLE proposer), in numpy.

    >>> accepted = accepted_rows(np.array([0, 4, 8, 12]), np.array([3, 3, 3]), np.array([1, 3, 0]))
    >>> accepted.query_start_loc.tolist(), accepted.token_indices.tolist(), accepted.last_row.tolist()
    ([0, 2, 6, 7], [0, 1, 4, 5, 6, 7, 8], [1, 5, 6])
    """
    lens = np.diff(query_start_loc) - num_drafts + num_accepted
    starts = query_start_loc[:-1]
    if rows is not None:
        lens, starts = lens[rows], starts[rows]
    new_start_loc = np.concatenate([[0], np.cumsum(lens)])
    offsets = np.repeat(starts - new_start_loc[:-1], lens)
    return AcceptedRows(
        query_start_loc=new_start_loc.astype(np.int32),
        token_indices=np.arange(new_start_loc[-1], dtype=np.int64) + offsets,
        last_row=new_start_loc[1:] - 1,
    )


def shifted_token_ids(token_table: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The token at p+1 for each hidden state at position p: inside a row ids'[:-1] = ids[1:].

    A row's last id is the bonus token, or the next prompt token of an unfinished prompt; the token table has both.

    Args:
        token_table: [rows, L] committed tokens by position; rows, positions: [T'] of the hidden states.

    >>> table = np.array([[10, 11, 12, 100], [20, 21, 200, 0]])
    >>> shifted_token_ids(table, np.array([0, 0, 0, 1, 1]), np.array([0, 1, 2, 0, 1])).tolist()
    [11, 12, 100, 21, 200]
    """
    return token_table[rows, positions + 1].astype(np.int64)


def draft_steps(
    committed_lens: np.ndarray,
    num_drafts: np.ndarray,
    block_table: np.ndarray,
    page_size: int,
    num_steps: int | None = None,
) -> DraftSteps:
    """All draft steps at once: step j (2 … K) feeds draft j-1 at position seq' + j - 2.

    Args:
        committed_lens: [B] seq' after the draft prefill; num_drafts: [B] n_i; block_table: [B, P] of the head's group.
        num_steps: default as many as the row with most drafts takes (max n_i - 1).

    >>> table = np.array([[7, 9, 0, 0], [3, 4, 8, 0], [1, 2, 5, 6]])
    >>> s = draft_steps(np.array([18, 33, 45]), np.array([3, 3, 3]), table, 16)
    >>> s.positions.tolist(), s.seq_lens.tolist()
    ([[18, 33, 45], [19, 34, 46]], [[19, 34, 46], [20, 35, 47]])
    >>> s.slots.tolist()
    [[146, 129, 93], [147, 130, 94]]
    """
    count = int(num_drafts.max(initial=1)) - 1 if num_steps is None else num_steps
    steps = np.arange(2, count + 2)[:, None]
    active = num_drafts >= steps  # [K-1, B]
    positions = np.where(active, committed_lens + steps - 2, 0)
    slots = np.where(active, slots_of(block_table, np.arange(len(committed_lens)), positions, page_size), 0)
    return DraftSteps(active, positions.astype(np.int64, copy=False), (positions + 1).astype(np.int32), slots)


@dataclass(frozen=True)
class PassRows(Generic[A]):
    """Inputs of one pass of a draft prefill: a chain's only pass, or one module's pass.

    Attributes:
        token_ids: [T'] int64, shifted: the token at position p+1, for module m at p+1+m.
        sources: [T'] int64, indices of the target's aux hidden states; for modules after the first see
            `drafters.loops.module_arrays.ModuleRows.sources`.
        last_row: int64, the last token row of each row; [R] in a chain, for the rows that draft; [B'] in modules.
    """

    token_ids: A = array(np.int64, "tokens")
    sources: A = array(np.int64, "tokens")
    last_row: A = array(np.int64, "rows")


@dataclass(frozen=True)
class HostPass(PassRows[np.ndarray]):
    """The pass on the host. batch: its attention over the head's pages, without requests that have no rows."""

    batch: HostBatch = field(kw_only=True)


@dataclass(frozen=True)
class DevicePass(PassRows[torch.Tensor]):
    """The pass on the device. metadata: its attention; the drafting rows come first."""

    metadata: CommonAttentionMetadata = field(kw_only=True)


@dataclass(frozen=True)
class StepArrays:
    """Host arrays of the draft steps.

    Attributes:
        batches: the attention of every step.
        sent: all steps as one batch: axis 0 of its arrays is the step, except for query_start_loc and block_table,
            which all steps share. None without steps.
    """

    batches: tuple[HostBatch, ...]
    sent: BatchArrays[np.ndarray] | None


@dataclass(frozen=True)
class ChainArrays:
    """Host arrays of one chain.

    Attributes:
        prefill: the draft prefill, whose first R rows draft. steps: all draft steps. size: see `LoopArrays`.
    """

    prefill: HostPass
    steps: StepArrays
    size: LoopSize


def prefill_arrays(draft: DraftInput) -> HostPass:
    """The draft prefill of a round, for the head that reads the target's states; last_row: [B'].

    A prompt row of which 3 tokens were read, and a verification that accepted 1 of 3 drafts:

    >>> tokens = np.array([[10, 11, 12, 13, 0, 0], [20, 21, 22, 23, 24, 0]])
    >>> table, n = np.array([[5, 0], [7, 9]], np.int32), np.array([2])
    >>> draft = DraftInput(np.array([0, 3, 7]), np.array([0, 3]), np.array([0, 1]), np.array([1, 0]),
    ...                    np.array([1, 0]), np.array([4, 3]), tokens, n, table[[1, 0]], 16)
    >>> arrays = prefill_arrays(draft)
    >>> arrays.sources.tolist(), arrays.batch.positions.tolist(), arrays.token_ids.tolist()
    ([3, 4, 0, 1, 2], [2, 3, 0, 1, 2], [23, 24, 11, 12, 13])
    """
    accepted = accepted_rows(draft.query_start_loc, draft.num_drafts, draft.num_accepted, draft.order)
    lens = np.diff(accepted.query_start_loc)
    batch = rows_batch(accepted.query_start_loc, draft.committed_lens - lens, draft.block_table, draft.page_size)
    token_ids = shifted_token_ids(draft.tokens, np.repeat(draft.request_rows, lens), batch.positions)
    return HostPass(token_ids, accepted.token_indices, accepted.last_row, batch=batch)


def step_arrays(rows: DraftingRows) -> StepArrays:
    """All draft steps of these rows. Rows that do not take a step see the null page only."""
    table, page_size = rows.block_table, rows.page_size
    steps = draft_steps(rows.committed_lens, rows.num_drafts, table, page_size)
    count, num_rows = steps.positions.shape
    if not count:
        return StepArrays((), None)
    counts, indptr, last_page_len = page_layout(steps.seq_lens, page_size)
    query_start_loc, query_lens = np.arange(num_rows + 1, dtype=np.int32), np.ones(num_rows, np.int32)
    pages = np.zeros((count, int(indptr[:, -1].max())), np.int32)
    batches, listed, before = [], table, b""
    for step, (own, active) in enumerate(zip(counts, steps.active, strict=True)):
        used, now = int(indptr[step, -1]), own.tobytes() + active.tobytes()
        if now == before:  # no row has entered a page since the step before
            pages[step] = pages[step - 1]
        else:
            listed = table if active.all() else np.where(active[:, None], table, 0)
            pages[step, :used] = flat_pages(listed, own)
        before = now
        batch = HostBatch(
            query_start_loc=query_start_loc,
            seq_lens=steps.seq_lens[step],
            num_computed_tokens=steps.seq_lens[step] - 1,
            block_table=listed,
            slot_mapping=steps.slots[step],
            positions=steps.positions[step],
            page_size=page_size,
        )
        # Fills HostBatch's cached properties, which were computed for all steps at once; a frozen dataclass takes no
        # attributes.
        vars(batch).update(query_lens=query_lens, page_counts=own, page_indices=pages[step, :used])
        vars(batch).update(page_indptr=indptr[step], last_page_len=last_page_len[step])
        batches.append(batch)
    sent = BatchArrays(
        query_start_loc=query_start_loc,
        block_table=table,
        page_indices=pages,
        page_indptr=indptr,
        last_page_len=last_page_len,
        seq_lens=steps.seq_lens,
        slot_mapping=steps.slots,
        positions=steps.positions,
    )
    return StepArrays(tuple(batches), sent)


def chain_arrays(draft: DraftInput) -> ChainArrays:
    """All arrays of a chain."""
    rows, prefill = draft.drafting, prefill_arrays(draft)
    steps, batch = step_arrays(rows), prefill.batch
    size = LoopSize(len(batch.seq_lens), len(batch.positions), batch.block_table.shape[1], len(steps.batches) + 1)
    return ChainArrays(replace(prefill, last_row=prefill.last_row[: len(rows.num_drafts)]), steps, size)


@dataclass(frozen=True)
class ChainInputs:
    """A chain's arrays on the device. steps: attention of drafts 2 … n, one token for each of the same R rows."""

    prefill: DevicePass
    steps: tuple[CommonAttentionMetadata, ...]


_PER_STEP = ("seq_lens", "slot_mapping", "positions", "page_indices", "page_indptr", "last_page_len")


class StepSection:
    """Places all steps of a chain in an arena: one batch, most of whose arrays have the step as first dimension."""

    def __init__(self, table: bool = True) -> None:
        """table: send the block table, too; a fixed shape does not."""
        leading = dict.fromkeys(_PER_STEP, "steps")
        shared = {"tokens": "step.rows"}
        self.arrays = Section(BatchArrays, "step", () if table else ("block_table",), shared, leading)
        self.fields = self.arrays.fields

    @staticmethod
    def sizes(rows: int, pages: int, steps: int, entries: int | None = None) -> dict[str, int]:
        """Sizes for at most these rows, pages a row and steps; entries: length of a page list, default rows · pages."""
        own = {"step.rows": rows, "step.rows_plus_1": rows + 1, "step.pages": pages, "steps": steps}
        return own | {"step.entries": rows * pages if entries is None else entries}

    def buffers(self, host: Mapping[str, np.ndarray]) -> BatchArrays[np.ndarray]:
        """The arrays over one of the arena's host buffers, for a fixed shape."""
        return self.arrays.of(host)

    def of(self, batches: Sequence[HostBatch], staged: Staged) -> tuple[CommonAttentionMetadata, ...]:
        """Attention metadata of every step."""
        if not batches:
            return ()
        whole: BatchArrays[torch.Tensor] = self.arrays.of(staged.views)
        shared: dict[str, Any] = {
            "query_start_loc": whole.query_start_loc,
            "block_table": whole.block_table,
            "staged": staged,
        }
        steps = []
        for host, *views in zip(batches, *(getattr(whole, name).unbind(0) for name in _PER_STEP), strict=True):
            if CHECKS.on:
                host.validate()
            own = dict(zip(_PER_STEP, views, strict=True))
            own["page_indices"] = own["page_indices"][: int(host.page_counts.sum())]
            steps.append(CommonAttentionMetadata(host=host, **shared, **own))
        return tuple(steps)


class ChainSection:
    """Places a chain's arrays in the round's arena; a `drafters.loops.base.LoopSection`."""

    def __init__(self) -> None:
        self._batch = BatchSection("prefill")
        self._rows = Section(PassRows, "prefill")
        self._steps = StepSection()
        self.fields = (*self._batch.fields, *self._rows.fields, *self._steps.fields)

    def sizes(self, size: LoopSize) -> dict[str, int]:
        prefill = self._batch.sizes(size.rows, size.tokens, size.pages)
        return prefill | self._steps.sizes(size.rows, size.pages, size.steps)

    def values(self, arrays: ChainArrays) -> dict[str, np.ndarray]:
        prefill = self._batch.values(arrays.prefill.batch) | self._rows.values(arrays.prefill)
        return prefill | self._steps.arrays.values(arrays.steps.sent)

    def of(self, arrays: ChainArrays, staged: Staged) -> ChainInputs:
        metadata = self._batch.metadata(arrays.prefill.batch, staged)
        prefill = self._rows.of(staged.views, DevicePass, metadata=metadata)
        return ChainInputs(prefill, self._steps.of(arrays.steps.batches, staged))
