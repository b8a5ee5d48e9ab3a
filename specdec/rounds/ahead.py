"""What the draft prefill after a verification of any shape reads, known before that verification is read.

The head passes over every token of the round, rejected drafts included; what it writes for those lies after the row's
end and is overwritten. Only the tokens that the verification decides are missing, and those the device fills in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic

import numpy as np

from attention.batch.host import HostBatch, offsets_within, rows_batch
from attention.declared import A, array
from drafters.loops.base import CarriedRows
from drafters.loops.modules.index import rows_before, shifted_batch
from specdec.rounds.verification import TargetArrays


@dataclass(frozen=True)
class AheadArrays(Generic[A]):
    """A draft prefill that is launched before its verification is read.

    Attributes:
        token_ids: [T] int64, the token at p+1 of every token row, 0 where the verification decides it.
        token_sources: [R'] int64, for every logits index the place of its token in the result's tokens [J·(n+1)].
        last_row: [B] int64, token row of each row's last committed token.
        decided_place: [B] int64, each row's place among the J decided ones; J where it is none of them.
    """

    token_ids: A = array(np.int64, "tokens")
    token_sources: A = array(np.int64, "tokens")
    last_row: A = array(np.int64, "rows")
    decided_place: A = array(np.int64, "rows")


@dataclass(frozen=True)
class AheadInputs(AheadArrays[np.ndarray]):
    """The same on the host.

    Attributes:
        batches: its attention on the head's pages in each pass: rows and tokens of the verification; pass m, of module
            m, stands m positions further back.
        carried: None of one pass.
    """

    batches: tuple[HostBatch, ...] = field(kw_only=True)
    carried: CarriedRows[np.ndarray] | None = field(kw_only=True)


def ahead_inputs(target: TargetArrays, num_modules: int = 1, num_carried: int = 0) -> AheadInputs:
    """The draft prefill after `target`.

    Args:
        num_modules: M, its passes. num_carried: of M > 1 modules, the rows that it has vectors of, at least B.

    A prompt row that reads 2 of its 4 tokens 7, 8, 9, 5 and a row that verifies 1 draft:

    >>> one, table = np.array([0, 1]), np.array([[3], [4]], np.int32)
    >>> target = TargetArrays(np.array([0, 6]), np.array([2, 1]), np.array([0, 1]), 1, np.array([[7, 8], [1, 0]]),
    ...                       np.array([1]), table, table, one, one, np.array([9, 0]), 16, one)
    >>> ahead = ahead_inputs(target)
    >>> ahead.token_ids.tolist(), ahead.token_sources.tolist(), ahead.last_row.tolist(), ahead.decided_place.tolist()
    ([8, 9, 0, 0], [0, 1], [1, 2], [1, 0])
    """
    assert target.head_table is not None
    starts, num_new = target.query_start_loc, target.num_new
    rows = np.arange(len(num_new))
    following = np.zeros_like(target.tokens)
    following[:, :-1] = target.tokens[:, 1:]
    following[rows, num_new - 1] = target.following
    owner = np.repeat(rows, target.lens)
    token_ids = np.zeros(len(owner), np.int64)
    committed = np.arange(len(owner)) - starts[owner] < num_new[owner]
    token_ids[committed] = following[np.arange(following.shape[1]) < num_new[:, None]]
    counts = target.num_drafts + 1
    decided_place = np.full(len(rows), len(target.decided))
    decided_place[target.decided] = np.arange(len(target.decided))
    place = starts, target.start, target.head_table, target.page_size
    return AheadInputs(
        batches=(rows_batch(*place), *(shifted_batch(m, *place, target.begins) for m in range(1, num_modules))),
        token_ids=token_ids,
        token_sources=np.repeat(np.arange(len(counts)) * (target.max_drafts + 1), counts) + offsets_within(counts),
        last_row=starts[:-1] + num_new - 1,
        decided_place=decided_place,
        carried=None if num_modules < 2 else CarriedRows(target.request_rows, rows_before(starts, num_carried)),
    )
