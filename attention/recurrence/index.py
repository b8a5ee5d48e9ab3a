"""The index arithmetic of recurrent states under speculative decoding, in numpy: no device, no model.

A row has one state per layer, and a ring of the recurrence's *inputs*. The state holds the first `folded` tokens; those
that a verification accepted after them are in the ring, and the next launch replays them. A rejected draft is never
folded in, so rolling back is a number on the host.

    replay    = start - folded: tokens that the state does not hold yet
    num_new   tokens of the launch that go into the state after the replayed ones; later ones are kept in the ring
    folded'   = start + num_new

A prompt's chunk of n tokens, a token without drafts and a verification of d drafts are one rule with (replay, num_new,
drafts) = (0, n, 0), (0, 1, 0) and (a, 1, d). Worked: K=3, 18 tokens folded, 2 drafts accepted, so it begins at 20.

>>> start, folded, num_new, rule = np.array([20]), np.array([18]), np.array([1]), FoldRule.every_launch(3)
>>> replay_of(start, folded).tolist(), folded_after(start, num_new, folded).tolist()
([2], [21])
>>> (np.array([18, 19]) % rule.ring_size).tolist()  # where in its ring it finds what it replays
[4, 5]
>>> (np.array([21, 22, 23]) % rule.ring_size).tolist()  # where it writes its drafts
[0, 1, 2]

Where all inputs are read as one chunk (the gated delta rule) replaying costs nothing, and storing as much as reading:
such rows keep num_new = 0 until the next launch could have more inputs than a chunk (`FoldRule`).

>>> FoldRule.deferred(3).num_new(np.array([2, 8, 9]), np.ones(3, int), np.ones(3, bool)).tolist()
[0, 0, 1]

Source: the state is checkpointed and inputs are replayed as in vllm-project/vllm#48018 (ReplaySSM).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Generic

import numpy as np
from numpy import ndarray

from attention.checking import require
from attention.staging import A, array

NULL_SLOT = 0
"""The slot of padding rows: it may be written and is never read as a state."""


@dataclass(frozen=True)
class StateArrays(Generic[A]):
    """Which states the rows of one launch continue, and from where. All [B] int32.

    Attributes:
        slots: the slot of each row's states; `NULL_SLOT` for padding rows.
        start: position of the row's first token in this launch.
        replay: tokens that are not in the stored state: positions start-replay … start-1. Where it equals start nothing
            is stored yet, and the row begins with zeros.
        num_new: how many of the row's tokens go into the state, after the replayed ones: committed ones. 0: none of
            either, the state stays as it is.
    """

    slots: A = array(np.int32, "rows")
    start: A = array(np.int32, "rows")
    replay: A = array(np.int32, "rows")
    num_new: A = array(np.int32, "rows")


@dataclass(frozen=True)
class StateIndex(StateArrays[ndarray]):
    """StateArrays on the host, an extra of a batch (`attention.batch.host.BatchExtra`, with its name `what`).

    most_replayed: a bound of `replay` where launches of other rows are to have the same shape, else None.
    """

    most_replayed: int | None = None
    what: ClassVar[str] = "recurrent states"

    @classmethod
    def of(cls, slots: ndarray, start: ndarray, replay: ndarray, num_new: ndarray) -> StateIndex:
        """From integers of any width."""
        slots, start, replay, num_new = (array.astype(np.int32) for array in (slots, start, replay, num_new))
        return cls(slots, start, replay, num_new)

    @property
    def max_replay(self) -> int:
        """Most replayed inputs of a row, or more."""
        return int(self.replay.max(initial=0)) if self.most_replayed is None else self.most_replayed

    def validate(self, query_lens: ndarray, rule: FoldRule | None = None) -> None:
        """Check the arrays against the rows' tokens [B], and the rule where it is given.

        Raises:
            InvariantError: two rows share a state, or a row's numbers of replayed or committed tokens are impossible.
        """
        own = self.slots[self.slots != NULL_SLOT]
        require(len(np.unique(own)) == len(own), "two rows share a state")
        require(bool(((self.replay >= 0) & (self.replay <= self.start)).all()), "a row replays what it never read")
        real = self.slots != NULL_SLOT
        committed = (self.num_new >= 0) & (self.num_new <= query_lens)
        require(bool(committed[real].all()), "a row commits more tokens than it reads")
        if rule is not None:
            drafts = query_lens - np.maximum(self.num_new, 1)
            put_off = rule.num_new(self.replay, np.ones_like(self.replay), real) == 0
            require(bool((self.replay <= rule.most_replayed).all()), "a row replays more than there may be")
            require(bool((drafts[real] <= rule.num_drafts).all()), "a row reads more than K drafts")
            require(bool((put_off | (self.num_new > 0))[real].all()), "a row leaves more to replay than there may be")


MOST_INPUTS = 16
"""Most tokens of a decoding row, replayed and new, that the gated delta rule reads as one chunk."""


@dataclass(frozen=True)
class FoldRule:
    """The rule by which launches store a row's state, with K drafts (`num_drafts`).

    most_replayed: tokens that a launch may have to replay. K where every launch stores states. If larger, a row stores
    its state only when the next launch might otherwise have to replay more than that.
    """

    num_drafts: int
    most_replayed: int

    @classmethod
    def every_launch(cls, num_drafts: int) -> FoldRule:
        """Every launch stores states: accepted drafts of one round are replayed."""
        return cls(num_drafts, num_drafts)

    @classmethod
    def deferred(cls, num_drafts: int) -> FoldRule:
        """Replay as many tokens as fit in one chunk together with K drafts. With K=0, and from K=8 on, every launch
        stores states.

        >>> [FoldRule.deferred(k).most_replayed for k in (0, 1, 3, 7, 8)]
        [0, 14, 12, 8, 8]
        """
        return cls(num_drafts, max(num_drafts, MOST_INPUTS - 1 - num_drafts) if num_drafts else 0)

    @property
    def defers(self) -> bool:
        """Whether some launches store no state."""
        return self.most_replayed > self.num_drafts

    @property
    def ring_size(self) -> int:
        """Inputs that a row keeps in addition to its state: room for the replayed ones and for a launch's root and K
        drafts, without overlap.

        >>> [FoldRule.every_launch(k).ring_size for k in (0, 3)], FoldRule.deferred(3).ring_size
        ([1, 7], 16)
        """
        return self.most_replayed + self.num_drafts + 1

    def num_new(self, replay: ndarray, committed: ndarray, decodes: ndarray) -> ndarray:
        """[B] `StateIndex.num_new` of rows that replay and commit these numbers of tokens.

        decodes: [B] bool; what a row leaves that has just read its prompt is all in its state, so that it may move.
        """
        left = replay + committed + self.num_drafts  # at most, to the next launch
        return np.where(decodes & (committed == 1) & (left <= self.most_replayed), 0, committed)


def replay_of(start: ndarray, folded: ndarray) -> ndarray:
    """Tokens to replay before position `start` when `folded` are in the state."""
    return start - folded


def folded_after(start: ndarray, num_new: ndarray, folded: ndarray) -> ndarray:
    """Tokens in the state after a launch from `start` that puts `num_new` into it; `folded` were before."""
    return np.where(num_new > 0, start + num_new, folded)


def slots_of_rows(rows: ndarray) -> ndarray:
    """The slots of rows of the row table; slot 0 is the null slot.

    >>> slots_of_rows(np.array([0, 2])).tolist()
    [1, 3]
    """
    return rows + 1


def conv_ring_size(width: int, num_drafts: int) -> int:
    """Inputs that a row keeps for a convolution of `width` taps: width-1 before a launch, its root and K drafts.

    >>> conv_ring_size(4, 3)
    7
    """
    return width + num_drafts
