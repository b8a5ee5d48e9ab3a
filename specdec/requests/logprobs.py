"""TokenLogprobs: what a request is told of the probabilities of one token."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

LogprobsMode = Literal["raw", "processed"]
MOST_LOGPROBS = 1024
"""Alternatives of a token that a request may ask for."""
COLUMNS = 2
"""Of the notes of a token before its alternatives: see `of_notes`."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities (natural logarithm) at the position of one token.

    token_id: the token. logprob: its own. rank: tokens that are more probable. top: the most probable tokens, each
        (token id, log-probability), as many as were asked for, the most probable first; of equal ones any, the token
        itself perhaps not.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


def of_notes(token_id: int, notes: np.ndarray, count: int) -> TokenLogprobs:
    """From the notes of a token [W] float32: log-probability, rank, ids of the m most probable tokens, theirs.

    Ids below 2^24 are exact in float32. count: alternatives wanted; at most m are there, of a smaller vocabulary fewer.
    """
    most = (len(notes) - COLUMNS) // 2
    count = min(count, most)
    ids = notes[COLUMNS : COLUMNS + count].astype(np.int64).tolist()
    values = notes[COLUMNS + most : COLUMNS + most + count].tolist()
    return TokenLogprobs(token_id, float(notes[0]), int(notes[1]), tuple(zip(ids, values, strict=True)))
