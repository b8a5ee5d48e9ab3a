"""The index arithmetic of recurrent states under speculation, in numpy: no device, no model.

A row has one state per layer, and beside it a ring of the recurrence's *inputs*. The state holds the first `folded`
tokens of the row; what a verification accepted after them is in the ring and is replayed by the next launch, so a
rejected draft costs nothing: it is never folded in. Rolling back is a number on the host.

    folded    tokens in the stored state
    replay    = start - folded: accepted drafts that the state does not hold yet
    num_new   committed tokens of the launch: they go into the state, what comes after them are drafts
    folded'   = start + num_new

Prefill, a chunk of a prompt, decoding without drafts and verification are one rule with (replay, num_new, drafts) =
(0, n, 0), (0, n, 0), (0, 1, 0) and (a, 1, d).

Worked: K=3, 18 tokens folded, then 2 drafts are accepted: the next launch begins at 20.

>>> start, num_new = np.array([20]), np.array([1])
>>> replay_of(start, np.array([18])).tolist(), folded_after(start, num_new).tolist()
([2], [21])
>>> ring_place(np.array([18, 19]), state_ring_size(3)).tolist()  # what it replays
[4, 5]
>>> ring_place(np.array([21, 22, 23]), state_ring_size(3)).tolist()  # where it writes its drafts
[0, 1, 2]

Source: the state is checkpointed and inputs are replayed as in vllm-project/vllm#48018 (ReplaySSM).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attention.checking import require

NULL_SLOT = 0
"""The slot of padding rows: it may be written and is never read as a state."""


@dataclass(frozen=True)
class StateIndex:
    """Which states the rows of one launch continue, and from where. All [B] int32.

    Attributes:
        slots: where each row's states are; `NULL_SLOT` for padding rows.
        start: position of the row's first token in this launch.
        replay: accepted drafts that are not in the stored state: positions start-replay … start-1. Where it equals
            start nothing is stored yet, and the row begins with zeros.
        num_new: how many of the row's tokens are committed.
        most_replayed: a bound of `replay` where launches of other rows are to have the same shape, else None.
    """

    slots: np.ndarray
    start: np.ndarray
    replay: np.ndarray
    num_new: np.ndarray
    most_replayed: int | None = None

    @classmethod
    def of(cls, slots: np.ndarray, start: np.ndarray, replay: np.ndarray, num_new: np.ndarray) -> StateIndex:
        """The same from integers of any width."""
        slots, start, replay, num_new = (array.astype(np.int32) for array in (slots, start, replay, num_new))
        return cls(slots, start, replay, num_new)

    @property
    def max_replay(self) -> int:
        """Most replayed inputs of a row, or more."""
        return int(self.replay.max(initial=0)) if self.most_replayed is None else self.most_replayed

    def validate(self, query_lens: np.ndarray, num_drafts: int | None = None) -> None:
        """Check the arrays against the rows' tokens [B], and K where it is given.

        Raises:
            InvariantError: two rows share a state, or a row replays or commits what cannot be.
        """
        own = self.slots[self.slots != NULL_SLOT]
        require(len(np.unique(own)) == len(own), "two rows share a state")
        require(bool(((self.replay >= 0) & (self.replay <= self.start)).all()), "a row replays what it never read")
        real = self.slots != NULL_SLOT
        committed = (self.num_new >= 1) & (self.num_new <= query_lens)
        require(bool(committed[real].all()), "a row commits no token, or more than it reads")
        if num_drafts is not None:
            drafts = query_lens - self.num_new
            require(bool((self.replay <= num_drafts).all()), "a row replays more than K drafts")
            require(bool((drafts[real] <= num_drafts).all()), "a row reads more than K drafts")


def replay_of(start: np.ndarray, folded: np.ndarray) -> np.ndarray:
    """Tokens to replay before position `start` when `folded` are in the state."""
    return start - folded


def folded_after(start: np.ndarray, num_new: np.ndarray) -> np.ndarray:
    """Tokens in the state after a launch from `start` with `num_new` committed tokens."""
    return start + num_new


def slots_of_rows(rows: np.ndarray) -> np.ndarray:
    """The slots of rows of the row table; slot 0 is nobody's.

    >>> slots_of_rows(np.array([0, 2])).tolist()
    [1, 3]
    """
    return rows + 1


def state_ring_size(num_drafts: int) -> int:
    """Inputs a row keeps beside a state: K replayed ones and the root and K drafts of the launch never meet.

    >>> [state_ring_size(k) for k in (0, 3)]
    [1, 7]
    """
    return 2 * num_drafts + 1


def conv_ring_size(width: int, num_drafts: int) -> int:
    """Inputs a row keeps for a convolution of so many taps: width-1 before a launch, its root and K drafts.

    >>> conv_ring_size(4, 3)
    7
    """
    return width + num_drafts


def ring_place(positions: np.ndarray, size: int) -> np.ndarray:
    """Where the input at a position is in a ring."""
    return positions % size
