"""Short prompts in rounds of one fixed shape: their tokens in virtual rows of at most K+1.

A launch writes the keys and values of all its tokens before any of them attends, and a row masks by its own lengths. So
tokens that follow each other may stand in several rows over the same pages: each sees all that come before it.

The last token that a prompt reads stands alone in the request's own row, as a bonus token without drafts does: there
its next token is decided, and there the draft loop starts. Those before it stand in virtual rows after the batch's own.
K=3, a row that verifies 2 drafts after position 20, and a prompt that reads 7 … 12:

    20 21 22 -  |  12 - - -  |  7 8 9 10  |  11 - - -
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from attention.batch.host import offsets_within
from specdec.rounds.verification import TargetArrays


@dataclass(frozen=True)
class VirtualRows:
    """A round in virtual rows, V = B + E.

    Attributes:
        target: of V rows. The first B are the batch's own, each reads one token; those after them have no drafts.
        following: [V-J, K+1] int64 for every row after the decided ones the tokens at p+1, which are committed already;
            0 where the row has no token.
    """

    target: TargetArrays
    following: np.ndarray


def num_virtual_rows(target: TargetArrays, query_len: int) -> int:
    """V: rows that such a round takes.

    >>> one, tokens = np.array([1]), np.zeros((1, 6), np.int32)
    >>> target = TargetArrays(one, one * 6, one * 0, 0, tokens, one * 0, tokens, tokens, one, one, one, 16, one)
    >>> num_virtual_rows(target, 4), num_virtual_rows(target, 6)
    (3, 2)
    """
    return len(target.start) + int((-(-(target.num_new - 1) // query_len)).sum())


def virtual_rows(target: TargetArrays, query_len: int) -> VirtualRows:
    """The round in rows of at most query_len tokens.

    Args:
        target: decided rows first; of one cache group.

    A prompt that reads positions 7 … 12, tokens 107 … 112, to its end, on page 3 and 9 of 8 tokens:

    >>> one = np.array([1])
    >>> table = np.array([[3, 9]], np.int32)
    >>> tokens = np.arange(107, 113, dtype=np.int32)[None]
    >>> target = TargetArrays(one * 7, one * 6, one * 0, 0, tokens, one * 0, table, table, one, one, one * 0, 8, one)
    >>> rows = virtual_rows(target, 4)
    >>> rows.target.start.tolist(), rows.target.num_new.tolist()
    ([12, 7, 11], [1, 4, 1])
    >>> rows.target.tokens.tolist()
    [[112, 0, 0, 0], [107, 108, 109, 110], [111, 0, 0, 0]]
    >>> rows.following.tolist()
    [[108, 109, 110, 111], [112, 0, 0, 0]]
    """
    batch, count = np.arange(len(target.start)), len(target.start)
    before = target.num_new - 1
    each = -(-before // query_len)
    owner, first = np.repeat(batch, each), offsets_within(each) * query_len
    lens = np.minimum(before[owner] - first, query_len)
    rows, width = np.concatenate([batch, owner]), np.arange(query_len)
    own, at = width < lens[:, None], np.minimum(first[:, None] + width, target.tokens.shape[1] - 2)
    tokens = np.zeros((len(rows), query_len), np.int32)
    tokens[:count, 0] = target.tokens[batch, before]
    tokens[count:] = target.tokens[owner[:, None], at] * own
    following = np.zeros((len(rows), query_len), np.int64)
    following[:count, 0] = target.following
    following[count:] = target.tokens[owner[:, None], at + 1] * own
    assert target.head_table is not None
    drafts = np.concatenate([target.drafts, np.zeros(len(owner), np.int64)])
    laid = replace(
        target,
        start=np.concatenate([target.start + before, target.start[owner] + first]),
        num_new=np.concatenate([np.ones(count, np.int64), lens]),
        drafts=drafts,
        tokens=tokens,
        block_table=target.block_table[rows],
        head_table=target.head_table[rows],
        request_rows=target.request_rows[rows],
    )
    return VirtualRows(laid, following[len(target.decided) :])
