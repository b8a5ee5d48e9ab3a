"""Rounds of one fixed shape: what a captured CUDA graph reads.

Every row gets exactly `query_len` tokens (K+1) and the batch exactly `rows` rows. Attention is causal, so the tokens
behind a row's own change nothing for it: they stand at position 0 and write to slot 0 of the null page.

    a row at position 20 with 1 of K=3 drafts, page size 16: tokens root, draft, -, - ; slots s(20), s(21), 0, 0 ;
    seq_len 24 (what the kernel masks by), two pages
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from attention.batch import HostBatch, slots_of
from drafters.inputs import rows_batch
from specdec.round import StepArrays, TargetArrays, Verified


def uniform_batch(batch: HostBatch, block_table: np.ndarray, rows: int, query_len: int) -> HostBatch:
    """A batch of at most `rows` rows with at most `query_len` tokens each -> exactly that many.

    Rows that are added read the null page only. block_table: [B, P] the rows' pages, of the group that will attend.
    """
    count, offsets = batch.num_reqs, np.arange(query_len)
    start = np.zeros(rows, np.int64)
    start[:count] = batch.num_computed_tokens
    own = np.zeros((rows, query_len), bool)
    own[:count] = offsets < batch.query_lens[:, None]
    positions = np.where(own, start[:, None] + offsets, 0)
    seq_lens = (start + query_len).astype(np.int32)
    table = _larger(block_table, rows, -(-int(seq_lens.max()) // batch.page_size))
    slots = np.where(own, slots_of(table, np.arange(rows)[:, None], positions, batch.page_size), 0)
    return HostBatch(
        query_start_loc=np.arange(0, rows * query_len + 1, query_len, dtype=np.int32),
        seq_lens=seq_lens,
        num_computed_tokens=start.astype(np.int32),
        block_table=table,
        slot_mapping=slots.reshape(-1),
        positions=positions.reshape(-1),
        page_size=batch.page_size,
    )


def spread(values: np.ndarray, lens: np.ndarray, rows: int, query_len: int) -> np.ndarray:
    """Ragged token values of rows with `lens` tokens -> [rows·query_len], zeros behind each row's own.

    >>> spread(np.array([1, 2, 3]), np.array([2, 1]), 3, 2).tolist()
    [1, 2, 3, 0, 0, 0]
    """
    out = np.zeros((rows, query_len), values.dtype)
    out[: len(lens)][np.arange(query_len) < lens[:, None]] = values
    return out.reshape(-1)


def _larger(table: np.ndarray, rows: int, pages: int) -> np.ndarray:
    """A block table of `rows` rows and at least `pages` columns; what is added is the null page."""
    large = np.zeros((rows, max(pages, table.shape[1])), np.int32)
    large[: len(table), : table.shape[1]] = table
    return large


def uniform_target(target: TargetArrays, rows: int, query_len: int) -> TargetArrays:
    """A verification whose every row is judged, in the fixed shape."""
    places = np.arange(rows * query_len, dtype=np.int64).reshape(rows, query_len)
    num_drafts = np.zeros(rows, np.int64)
    num_drafts[: len(target.num_drafts)] = target.num_drafts
    return replace(
        target,
        batch=uniform_batch(target.batch, target.batch.block_table, rows, query_len),
        token_ids=spread(target.token_ids, target.batch.query_lens, rows, query_len),
        draft_places=places[:, 1:].reshape(-1),
        draft_sources=np.arange(rows * (query_len - 1), dtype=np.int64),
        judged_rows=places.reshape(-1),
        logit_index=places,
        num_drafts=num_drafts,
    )


def uniform_head(target: TargetArrays, rows: int, query_len: int) -> HostBatch:
    """The same token rows on the head's pages: its first pass before anybody knows what was accepted."""
    assert target.head_table is not None
    return uniform_batch(target.batch, target.head_table, rows, query_len)


def uniform_verified(verified: Verified, query_len: int) -> Verified:
    """A verification that ran in the fixed shape, as the draft loop must read its token rows."""
    num_rows = len(verified.rows)
    return replace(
        verified,
        query_start_loc=np.arange(0, num_rows * query_len + 1, query_len),
        num_drafts=np.full(num_rows, query_len - 1),
    )


def uniform_steps(draft: StepArrays, rows: int, num_steps: int) -> StepArrays:
    """The draft steps of `rows` rows; those that are added take no step and stand on the null page."""
    count = len(draft.sources)
    lens, num_drafts, sources = np.zeros((3, rows), np.int64)
    lens[:count], num_drafts[:count], sources[:count] = draft.committed_lens, draft.num_drafts, draft.sources
    table = draft.block_table if count == rows else _larger(draft.block_table, rows, 1)
    return StepArrays(lens, num_drafts, num_steps, sources, table, draft.page_size)


def empty_round(page_size: int) -> tuple[StepArrays, TargetArrays]:
    """A round without rows: padded, it is what graphs are captured on."""
    none, table = np.zeros(0, np.int64), np.zeros((0, 1), np.int32)
    batch = rows_batch(np.zeros(1, np.int32), none, table, page_size)
    target = TargetArrays(batch, none, none, none, none, none, np.zeros((0, 1), np.int64), none, table)
    return StepArrays(none, none, 0, none, table, page_size), target
