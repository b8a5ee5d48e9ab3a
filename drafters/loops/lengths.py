"""Length of a row after a verification, and the number of drafts it may have then. numpy only.

The bonus token is a row's last committed token; its position is also the row's KV length in the target's cache.
"""

from __future__ import annotations

import numpy as np


def tokens_accepted(num_new: np.ndarray, num_accepted: np.ndarray) -> np.ndarray:
    """Tokens that a verification adds to each row's KV cache: the committed ones it read, and accepted drafts.

    Args:
        num_new: [B] committed tokens that the row read (1, or a prompt chunk); num_accepted: [B], 0 for a chunk.

    K=3, q=[4,4,4] with one committed token each: start [16,29,44] becomes [18,33,45].

    >>> (np.array([16, 29, 44]) + tokens_accepted(np.ones(3, int), np.array([1, 3, 0]))).tolist()
    [18, 33, 45]
    """
    return num_new + num_accepted


def draft_room(max_model_len: int | np.ndarray, bonus_positions: np.ndarray, tokens_left: np.ndarray) -> np.ndarray:
    """Drafts that the limits allow, without K: min(max_model_len - 1 - bonus, tokens_left - 1); may be negative.

    Every further committed token takes one from it, so after a verification it follows without the limits.

    Args:
        max_model_len: for all rows, or [B] for each. bonus_positions: [B] positions of the next bonus token (seq').
        tokens_left: [B] tokens the row may still emit.

    >>> draft_room(64, np.array([62, 63, 20]), np.array([9, 9, 2])).tolist()
    [1, 0, 1]
    >>> draft_room(64, np.array([57]), np.array([12])).tolist(), draft_room(64, np.array([60]), np.array([9])).tolist()
    ([6], [3])
    """
    return np.minimum(max_model_len - 1 - bonus_positions, tokens_left - 1)


def drafts_within(num_speculative_tokens: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Drafts of each row: its own K, at most the room, at least 0.

    Args:
        num_speculative_tokens: [B] K_i; room: [B], see `draft_room`.

    >>> drafts_within(np.array([3, 3, 1]), np.array([2, -1, 9])).tolist()
    [2, 0, 1]
    """
    return np.maximum(0, np.minimum(num_speculative_tokens, room))


def num_drafts_allowed(
    num_speculative_tokens: np.ndarray,
    max_model_len: int | np.ndarray,
    bonus_positions: np.ndarray,
    tokens_left: np.ndarray,
) -> np.ndarray:
    """Drafts each row may have: max(0, min(K_i, max_model_len - 1 - bonus_i, tokens_left_i - 1)).

    Args: see `drafts_within` and `draft_room`.

    >>> num_drafts_allowed(np.array([3, 3, 3]), 64, np.array([62, 63, 20]), np.array([9, 9, 2])).tolist()
    [1, 0, 1]
    """
    return drafts_within(num_speculative_tokens, draft_room(max_model_len, bonus_positions, tokens_left))
