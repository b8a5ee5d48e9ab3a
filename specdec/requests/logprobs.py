"""TokenLogprobs: the log-probabilities of one token and its alternatives."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

LogprobsMode = Literal["raw", "processed"]
MOST_LOGPROBS = 1024
"""Most alternatives of a token in one request."""
COLUMNS = 2
"""Of the notes of a token before its alternatives: see `of_notes`."""
MOST_ROW_BYTES = 2**31
"""Most bytes of logits and scores of one request, on the host."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities (natural logarithm) at the position of one token.

    token_id: the token. logprob: its own. rank: tokens that are more probable. top: the most probable tokens, each
        (token id, log-probability), the requested number, the most probable first, of equal ones the smaller id; the
        token itself perhaps not.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprobs:
    """Log-probabilities of one request's prompt tokens, as its rounds deliver them: in order, some perhaps twice.

    Attributes:
        count: alternatives of each. start: the first requested position, at least 1: the first token has none.
        told: those so far, of the positions from `start` on.
    """

    def __init__(self, count: int, start: int) -> None:
        self.count = count
        self.start = max(start, 1)
        self.told: list[TokenLogprobs] = []

    @property
    def next_row(self) -> int:
        """The first position whose logits are still needed: those that the next token to be told follows from."""
        return self.start + len(self.told) - 1

    def tell(self, position: int, found: TokenLogprobs) -> None:
        """Take those of the token at a position; ones that were told stay as they are."""
        if position == self.start + len(self.told):
            self.told.append(found)

    def of_prompt(self, prompt_len: int) -> tuple[TokenLogprobs | None, ...]:
        """One for each prompt token, None where none was requested."""
        before = min(self.start, prompt_len)
        return (*(None,) * before, *self.told, *(None,) * (prompt_len - before - len(self.told)))


class TokenRows:
    """Whole rows [V] float32 of one request, by the position of the token that was decided by them."""

    def __init__(self) -> None:
        self._rows: dict[int, np.ndarray] = {}

    def tell(self, position: int, rows: np.ndarray) -> None:
        """Take those of some positions in a row: [n, V], of rejected drafts as well, which later rounds overwrite."""
        self._rows |= dict(enumerate(rows, position))

    def stacked(self, start: int, count: int) -> np.ndarray:
        """[count, V] of the positions from `start` on."""
        return np.stack([self._rows[start + i] for i in range(count)]) if count else np.zeros((0, 0), np.float32)


def of_notes(token_id: int, notes: np.ndarray, count: int) -> TokenLogprobs:
    """From the notes of a token [W] float32: log-probability, rank, ids of the m most probable tokens, theirs.

    Ids below 2^24 are exact in float32. count: alternatives wanted; at most m are there, of a smaller vocabulary fewer.
    """
    most = (len(notes) - COLUMNS) // 2
    count = min(count, most)
    ids = notes[COLUMNS : COLUMNS + count].astype(np.int64).tolist()
    values = notes[COLUMNS + most : COLUMNS + most + count].tolist()
    return TokenLogprobs(token_id, float(notes[0]), int(notes[1]), tuple(zip(ids, values, strict=True)))
