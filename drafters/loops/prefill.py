"""Host arrays of a draft prefill: which rows and tokens a head reads, or each of M modules. numpy only.

Running example: q=[4,4,4], seq=[20,33,48], accepted=[1,3,0].

**Several modules** (M > 1). Row i of module m combines the token at i+1+m with module m-1's output at row i (m = 0:
with the target's state), so it is final once the token at i+1+m is committed. A new range [a, seq') of target states
gives rows [a-m, seq'-m) of module m, which has a cache layer of its own. Rows below 0, or below the position at which a
request with reused pages begins, do not exist. Row a-m needs module m-1's output at a row of the previous round: one
carried vector a request and module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

import numpy as np
from numpy import ndarray
from torch import Tensor

from attention.batch.host import HostBatch, owners_of, rows_batch, starts_of
from attention.batch.metadata import CommonAttentionMetadata
from attention.staging import A, array
from drafters.loops.base import DraftInput


@dataclass(frozen=True)
class AcceptedRows:
    """The tokens of a verified batch that the draft prefill reads again with the target's true hidden states.

    Attributes:
        query_start_loc: [B'+1] int32.
        token_indices: [T'] int64, token rows of the verified batch.
        last_row: [B'] int64, token rows of the draft prefill whose output gives draft 1.
    """

    query_start_loc: ndarray
    token_indices: ndarray
    last_row: ndarray


def accepted_rows(
    query_start_loc: ndarray, num_drafts: ndarray, num_accepted: ndarray, rows: ndarray | None = None
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


def shifted_token_ids(token_table: ndarray, rows: ndarray, positions: ndarray) -> ndarray:
    """The token at p+1 for each hidden state at position p: inside a row ids'[:-1] = ids[1:].

    A row's last id is the bonus token, or the next prompt token of an unfinished prompt; the token table has both.

    Args:
        token_table: [rows, L] committed tokens by position; rows, positions: [T'] of the hidden states.

    >>> table = np.array([[10, 11, 12, 100], [20, 21, 200, 0]])
    >>> shifted_token_ids(table, np.array([0, 0, 0, 1, 1]), np.array([0, 1, 2, 0, 1])).tolist()
    [11, 12, 100, 21, 200]
    """
    return token_table[rows, positions + 1].astype(np.int64)


@dataclass(frozen=True)
class PassRows(Generic[A]):
    """Inputs of one pass of a draft prefill: a chain's only pass, or one module's pass.

    Attributes:
        token_ids: [T'] int64, shifted: the token at position p+1, for module m at p+1+m.
        sources: [T'] int64, indices of the target's aux hidden states; for modules after the first see
            `ModuleRows.sources`.
        last_row: [B'] int64, the last token row of each request.
    """

    token_ids: A = array(np.int64, "tokens")
    sources: A = array(np.int64, "tokens")
    last_row: A = array(np.int64, "requests")


@dataclass(frozen=True, kw_only=True)
class HostPass(PassRows[ndarray]):
    """The pass on the host. batch: its attention over the head's pages, without requests that have no rows."""

    batch: HostBatch


@dataclass(frozen=True, kw_only=True)
class DevicePass(PassRows[Tensor]):
    """The pass on the device. metadata: its attention; the drafting rows come first."""

    metadata: CommonAttentionMetadata


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


@dataclass(frozen=True)
class ModuleRows:
    """Rows of module m >= 1 in a draft prefill over B' requests whose module 0 reads T' rows.

    Attributes:
        lens, first_positions: [B'] number of rows of each request, 0 if it has none yet, and the first one's position.
        tokens: [T_m] int64, the row of module 0 that reads the same token.
        sources: [T_m] int64, indices into [B' carried vectors, T_{m-1} outputs of module m-1].
        last_row: [B'] int64, each request's last row; 0 where it has none.
    """

    lens: ndarray
    first_positions: ndarray
    tokens: ndarray
    sources: ndarray
    last_row: ndarray


def module_rows(
    first_positions: ndarray, lens: ndarray, num_modules: int, begins: ndarray | None = None
) -> tuple[ModuleRows, ...]:
    """The rows of modules 1 … M-1 for new ranges [a, a + len) of module 0.

    Args:
        first_positions: [B'] a; lens: [B'] rows of module 0, at least 1 each.
        begins: [B'] the position before which a request has no rows; None for 0.

    Two requests, a = 5 with three new rows and a = 0 with two (a prompt's start):

    >>> (m,) = module_rows(np.array([5, 0]), np.array([3, 2]), 2)
    >>> m.first_positions.tolist(), m.lens.tolist(), m.tokens.tolist()
    ([4, 0], [3, 1], [0, 1, 2, 4])
    >>> m.sources.tolist(), m.last_row.tolist()  # 0, 1 are the carried vectors, 2 … 6 module 0's outputs
    ([0, 2, 3, 5], [2, 3])

    The first of them once more, when it begins at 5:

    >>> (m,) = module_rows(np.array([5]), np.array([3]), 2, np.array([5]))
    >>> m.first_positions.tolist(), m.lens.tolist(), m.tokens.tolist(), m.sources.tolist()
    ([5], [2], [1, 2], [1, 2])
    """
    least = np.zeros_like(lens) if begins is None else begins
    stop = first_positions + lens
    starts = starts_of(lens)
    ends = starts[1:]
    before = (first_positions, starts)
    rows = []
    for m in range(1, num_modules):
        first = np.maximum(first_positions - m, least)
        count = np.maximum(stop - m, least) - first
        starts = starts_of(count)
        owner = owners_of(count)
        within = np.arange(starts[-1]) - starts[owner]
        place = first[owner] + within - before[0][owner]  # -1: the row before module m-1's first
        rows.append(
            ModuleRows(
                lens=count,
                first_positions=first,
                tokens=(ends - count)[owner] + within,
                sources=np.where(place < 0, owner, len(lens) + before[1][owner] + place),
                last_row=np.maximum(starts[1:] - 1, 0),
            )
        )
        before = first, starts
    return tuple(rows)


def module_batch(rows: ModuleRows, block_table: ndarray, page_size: int) -> HostBatch:
    """A module's attention in the draft prefill, without requests that have no rows. block_table: [B', P]."""
    some = rows.lens > 0
    query_start_loc = starts_of(rows.lens[some])
    return rows_batch(query_start_loc, rows.first_positions[some], block_table[some], page_size)


def shifted_batch(
    module: int,
    query_start_loc: ndarray,
    first_positions: ndarray,
    block_table: ndarray,
    page_size: int,
    begins: ndarray | None = None,
) -> HostBatch:
    """Module m's attention over all token rows of a verification, at positions m less than the target's.

    Rows before a request's beginning do not exist: they become a separate row on the null page.

    Args:
        query_start_loc: [B+1]; first_positions: [B] of the verification; block_table: [B, P] of the head's pages.
        begins: [B] first positions of the requests, see `module_rows`.

    Three requests, at 5 with three tokens, at 0 with two, and at 0 with one:

    >>> batch = shifted_batch(1, np.array([0, 3, 5, 6]), np.array([5, 0, 0]), np.array([[7], [8], [9]]), 16)
    >>> batch.query_start_loc.tolist(), batch.positions.tolist(), batch.block_table[:, 0].tolist()
    ([0, 3, 4, 5, 6], [4, 5, 6, 0, 0, 0], [7, 0, 8, 0])

    The first of them once more, when it begins at 5:

    >>> batch = shifted_batch(1, np.array([0, 3]), np.array([5]), np.array([[7]]), 16, np.array([5]))
    >>> batch.query_start_loc.tolist(), batch.positions.tolist(), batch.block_table[:, 0].tolist()
    ([0, 1, 3], [0, 5, 6], [0, 7])
    """
    lens = np.diff(query_start_loc)
    least = np.zeros_like(lens) if begins is None else begins
    missing = np.clip(module - (first_positions - least), 0, lens)
    first = np.maximum(first_positions - module, least)
    if not missing.any():
        return rows_batch(query_start_loc, first, block_table, page_size)
    split = np.stack([missing, lens - missing], 1).reshape(-1)
    exists = np.tile([False, True], len(lens))
    some = split > 0
    return rows_batch(
        starts_of(split[some]),
        np.where(exists, np.repeat(first, 2), 0)[some],
        np.where(exists[:, None], np.repeat(block_table, 2, axis=0), 0)[some],
        page_size,
    )


def rows_before(query_start_loc: ndarray, num_carried: int) -> ndarray:
    """[T] int64, index of the row before each token row in [carried vectors, T rows]; before a request's first token
    row comes its carried vector.

    Args:
        query_start_loc: [B+1], no request without tokens; num_carried: number of vectors, at least B.

    >>> rows_before(np.array([0, 3, 5]), 4).tolist()
    [0, 4, 5, 1, 7]
    """
    sources = np.arange(num_carried - 1, num_carried - 1 + query_start_loc[-1])
    sources[query_start_loc[:-1]] = np.arange(len(query_start_loc) - 1)
    return sources


def module_passes(first: HostPass, draft: DraftInput, num_modules: int) -> tuple[HostPass, ...]:
    """The passes of modules 1 … M-1 after that of module 0."""
    batch = first.batch
    return tuple(
        HostPass(
            token_ids=first.token_ids[rows.tokens],
            sources=rows.sources,
            last_row=rows.last_row,
            batch=module_batch(rows, batch.block_table, draft.page_size),
        )
        for rows in module_rows(batch.num_computed_tokens, batch.query_lens, num_modules, draft.begins)
    )
