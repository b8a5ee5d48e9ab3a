"""Draft and target vocabularies: a head may know only the Vd most frequent of the target's V tokens.

The map is stored as offsets, `target_id = i + d2t[i]`, and as a mask of the known tokens, `t2d` [V].
Source: SafeAILab/EAGLE, eagle/traineagle3/cnets.py (construction); the offset convention is the checkpoints'.

    V = 8, the head knows the target's tokens 1, 2, 5, 7:
    d2t = [1, 1, 3, 4]    t2d = [0, 1, 1, 0, 0, 1, 0, 1]    draft id 2 -> 2 + 3 = 5
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention.errors import InvalidInputError

_MIN_SIZE_TO_DECIDE = 32
"""From this many entries on, a map without two neighbouring target ids is taken for absolute ids."""


def offsets_of(target_ids: Tensor) -> Tensor:
    """Ascending target ids [Vd] -> d2t offsets [Vd] int64."""
    return target_ids.long() - torch.arange(len(target_ids), device=target_ids.device)


def ids_of(d2t: Tensor) -> Tensor:
    """d2t offsets [Vd] -> the target ids of all draft ids [Vd] int64."""
    return d2t.long() + torch.arange(len(d2t), device=d2t.device)


def mask_of(d2t: Tensor, target_vocab_size: int) -> Tensor:
    """d2t offsets [Vd] -> t2d [V] bool: which target tokens the head knows."""
    mask = d2t.new_zeros(target_vocab_size, dtype=torch.bool)
    mask[ids_of(d2t)] = True
    return mask


def check_map(d2t: Tensor, target_vocab_size: int, t2d: Tensor | None = None) -> None:
    """Check a checkpoint's vocabulary map: offsets d2t [Vd], and t2d [V] bool, or None where it has none.

    Raises:
        InvalidInputError: wrong type or shape, absolute ids instead of offsets, ids not strictly increasing or outside
            [0, V), or a mask that contradicts the offsets.
    """
    _check_type(d2t)
    if t2d is not None and t2d.shape != (target_vocab_size,):
        raise InvalidInputError(f"t2d has shape {list(t2d.shape)}, the target asks for [{target_vocab_size}]")
    if _looks_absolute(d2t, target_vocab_size, t2d):
        raise InvalidInputError(
            f"d2t looks like absolute target ids ({d2t[:3].tolist()} ... {int(d2t[-1])}), but offsets are expected: "
            "target id = i + d2t[i]. Subtract arange(Vd) from it."
        )
    check_offsets(d2t, target_vocab_size)
    if t2d is not None and not torch.equal(t2d.bool(), mask_of(d2t, target_vocab_size)):
        raise InvalidInputError(
            f"t2d knows {int(t2d.sum())} tokens and d2t {len(d2t)}; they must name the same tokens of the target"
        )


def _check_type(d2t: Tensor) -> None:
    if d2t.dim() != 1 or d2t.is_floating_point() or d2t.dtype == torch.bool or len(d2t) == 0:
        raise InvalidInputError(f"d2t must be a non-empty vector of integers, not {d2t.dtype} {list(d2t.shape)}")


def check_offsets(d2t: Tensor, target_vocab_size: int) -> None:
    """Check that offsets [Vd] name strictly increasing target ids in [0, V).

    Raises:
        InvalidInputError: they do not, or they are no vector of integers.
    """
    _check_type(d2t)
    ids = ids_of(d2t)
    if not (ids[1:] > ids[:-1]).all():
        first = int((ids[1:] <= ids[:-1]).nonzero()[0])
        raise InvalidInputError(
            f"the target ids i + d2t[i] must be strictly increasing, but draft ids {first} and {first + 1} "
            f"are target ids {int(ids[first])} and {int(ids[first + 1])}"
        )
    if int(ids[0]) < 0 or int(ids[-1]) >= target_vocab_size:
        raise InvalidInputError(
            f"the target ids i + d2t[i] run from {int(ids[0])} to {int(ids[-1])}, "
            f"allowed are 0 to {target_vocab_size - 1}"
        )


def _looks_absolute(d2t: Tensor, target_vocab_size: int, t2d: Tensor | None) -> bool:
    """Whether the entries read better as target ids than as offsets (offsets of neighbouring ids are equal)."""
    if not (d2t[1:] > d2t[:-1]).all() or int(d2t[0]) < 0 or int(d2t[-1]) >= target_vocab_size:
        return False
    if t2d is not None:
        as_ids = torch.zeros_like(t2d, dtype=torch.bool)
        as_ids[d2t.long()] = True
        return torch.equal(as_ids, t2d.bool()) and len(d2t) > 1
    return int(ids_of(d2t)[-1]) >= target_vocab_size or len(d2t) >= _MIN_SIZE_TO_DECIDE


def most_frequent(counts: Tensor, draft_vocab_size: int) -> Tensor:
    """Build a map from how often the target wrote each token.

    counts: [V] integers. draft_vocab_size: Vd, how many tokens the head shall know.

    Returns:
        d2t offsets [Vd] int64 of the most frequent tokens; of equally frequent ones the smaller ids.

    Raises:
        InvalidInputError: Vd is not in 1..V.
    """
    if not 1 <= draft_vocab_size <= len(counts):
        raise InvalidInputError(f"draft_vocab_size is {draft_vocab_size}, allowed are 1 to {len(counts)}")
    order = torch.sort(counts, descending=True, stable=True).indices
    return offsets_of(order[:draft_vocab_size].sort().values)


def scatter(probabilities: Tensor, target_ids: Tensor, target_vocab_size: int) -> Tensor:
    """Spread draft probabilities [..., Vd] over the target's vocabulary, [..., V] of the same dtype.

    Unknown tokens get probability zero. target_ids: [Vd] int64, `head.to_target_ids(arange(Vd))`.
    """
    spread = probabilities.new_zeros(*probabilities.shape[:-1], target_vocab_size)
    return spread.index_copy_(-1, target_ids, probabilities)
