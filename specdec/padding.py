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
from specdec.round import StepArrays, TargetArrays, TargetInputs, Verified


def uniform_batch(
    start: np.ndarray, lens: np.ndarray, block_table: np.ndarray, page_size: int, shape: tuple[int, int]
) -> HostBatch:
    """Rows that read lens[i] tokens from position start[i] on, in the shape (rows, query_len).

    Rows that are added read the null page only. start, lens: [B], at most query_len; block_table: [B, P] the rows'
    pages, of the group that will attend.
    """
    (rows, query_len), count = shape, len(start)
    offsets, first = np.arange(query_len), np.zeros(rows, np.int64)
    first[:count] = start
    own = np.zeros((rows, query_len), bool)
    own[:count] = offsets < lens[:, None]
    positions = np.where(own, first[:, None] + offsets, 0)
    seq_lens = (first + query_len).astype(np.int32)
    table = _larger(block_table, rows, -(-int(seq_lens.max()) // page_size))
    slots = np.where(own, slots_of(table, np.arange(rows)[:, None], positions, page_size), 0)
    return HostBatch(
        query_start_loc=np.arange(0, rows * query_len + 1, query_len, dtype=np.int32),
        seq_lens=seq_lens,
        num_computed_tokens=first.astype(np.int32),
        block_table=table,
        slot_mapping=slots.reshape(-1),
        positions=positions.reshape(-1),
        page_size=page_size,
    )


def _larger(table: np.ndarray, rows: int, pages: int) -> np.ndarray:
    """A block table of `rows` rows and at least `pages` columns; what is added is the null page."""
    large = np.zeros((rows, max(pages, table.shape[1])), np.int32)
    large[: len(table), : table.shape[1]] = table
    return large


def uniform_target(target: TargetArrays, rows: int, query_len: int) -> TargetInputs:
    """A verification whose every row reads a root and its drafts, in the fixed shape."""
    count = len(target.start)
    places = np.arange(rows * query_len, dtype=np.int64).reshape(rows, query_len)
    token_ids = np.zeros((rows, query_len), np.int64)
    token_ids[:count, 0] = target.tokens[:, 0]
    num_drafts = np.zeros(rows, np.int64)
    num_drafts[:count] = target.drafts
    sources = np.arange(rows)
    if target.sources is not None:
        sources[: target.num_drafting] = target.sources
    return TargetInputs(
        batch=uniform_batch(target.start, target.lens, target.block_table, target.page_size, (rows, query_len)),
        token_ids=token_ids.reshape(-1),
        draft_places=places[:, 1:].reshape(-1),
        draft_sources=np.arange(rows * (query_len - 1), dtype=np.int64),
        judged_rows=places.reshape(-1),
        logit_index=places,
        num_drafts=num_drafts,
        sources=sources,
    )


def uniform_head(target: TargetArrays, rows: int, query_len: int) -> HostBatch:
    """The same token rows on the head's pages: its first pass before anybody knows what was accepted."""
    assert target.head_table is not None
    return uniform_batch(target.start, target.lens, target.head_table, target.page_size, (rows, query_len))


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
    tokens = np.zeros((0, 1), np.int32)
    target = TargetArrays(none, none, none, 0, tokens, none, table, table, none, none, page_size)
    return StepArrays(none, none, 0, none, table, page_size), target
