"""Named defects of sampled verification: what the next token's distribution would be if one of them were there.

The test computes from these how likely each would have been found, and looks for each one by its likelihood ratio.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

SOFT = 0.05
"""Share of the true distribution in each alternative, so that one token does not rule a defect out."""
OUTSIDE = 1.0
"""Score of a token that only the defect allows (where that alone is no proof: in half precision)."""
_NUDGE = 1e-4


@dataclass(frozen=True)
class Sampling:
    """How a trial samples.

    Attributes:
        samples: per place and configuration. tokens: first tokens that are looked at.
        top_k, temperature, top_p, min_p: of the sampling (top_k 0, top_p 1 and min_p 0 are off).
    """

    samples: int = 1000
    tokens: int = 7
    top_k: int = 4
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True)
class Defect:
    """One way to be wrong.

    Attributes:
        name: shown. change: what is verified with instead of the request's sampling; None: not a matter of sampling,
            but the bonus token after full acceptance is drawn from what is left of p without the last draft.
    """

    name: str
    change: Callable[[Sampling], Sampling] | None

    def changed(self, sampling: Sampling) -> Sampling:
        """The sampling that this defect verifies with."""
        return sampling if self.change is None else self.change(sampling)

    def residual(self, probs: torch.Tensor, is_last: torch.Tensor) -> torch.Tensor:
        """[..., V] the probabilities without the last draft; unchanged where it has nothing or everything of them."""
        left = probs * (1 - is_last)
        total = left.sum(-1, keepdim=True)
        return torch.where(total > 0, left / total, probs)


DEFECTS: tuple[Defect, ...] = (
    Defect("temperature 10 % too high", lambda s: replace(s, temperature=1.1 * s.temperature)),
    Defect("temperature 10 % too low", lambda s: replace(s, temperature=0.9 * s.temperature)),
    Defect("top_p 0.1 too high", lambda s: replace(s, top_p=min(s.top_p + 0.1, 1.0))),
    Defect("top_p 0.1 too low", lambda s: replace(s, top_p=s.top_p - 0.1) if s.top_p < 1 else s),
    Defect("min_p twice as large", lambda s: replace(s, min_p=2 * s.min_p)),
    Defect("min_p half as large", lambda s: replace(s, min_p=s.min_p / 2)),
    Defect("bonus from the residual", None),
)


def kept(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Exact probabilities [..., V] of the next token under the test's sampling, in the dtype of the logits.

    Written apart from the library's own filters, which it judges.

    >>> kept(torch.tensor([0.0, 2.0, 1.0, -9.0]).double(), Sampling(top_k=3, top_p=0.9)).round(decimals=2).tolist()
    [0.0, 0.73, 0.27, 0.0]
    """
    ordered, token_ids = (logits / sampling.temperature).sort(descending=True, stable=True)
    k = min(sampling.top_k or logits.shape[-1], logits.shape[-1])
    ordered = ordered.masked_fill(ordered < ordered[..., k - 1 : k], -torch.inf)
    probs = ordered.softmax(-1)
    above = probs.cumsum(-1) - probs  # of all more probable tokens; the token that crosses top_p stays
    probs = probs.masked_fill((above >= sampling.top_p) & (above > 0), 0.0)
    probs = probs.masked_fill(probs < sampling.min_p * probs[..., :1], 0.0)
    return torch.zeros_like(probs).scatter(-1, token_ids, probs / probs.sum(-1, keepdim=True))


def softened(other: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """The likelihood ratio of a defect, mixed with the truth. Only meant where `probs` is positive."""
    return SOFT + (1 - SOFT) * other / probs.clamp(min=1e-300)


@dataclass(frozen=True)
class Node:
    """What may follow one prefix, rightly and under each of D defects.

    Attributes:
        ids: [S] tokens that may follow. probs: [S]. scores: [S + 1, D] log likelihood ratios; the last row is for
            tokens that may not follow.
        right: first four cumulants of the scores [4, D] if all is right.
        wrong: their mean and variance [2, D] under each defect, from the tokens that may follow alone.
        compared: first four cumulants of the scores [4, D] under each defect, with tokens that may not follow.
        outside: [D] probability, under each defect, of tokens that may not follow.
        clear: whether rounding cannot change which tokens may follow.
    """

    ids: np.ndarray
    probs: np.ndarray
    scores: np.ndarray
    right: np.ndarray
    wrong: np.ndarray
    compared: np.ndarray
    outside: np.ndarray
    clear: bool = True

    @classmethod
    def of(cls, logits: torch.Tensor, last: int, sampling: Sampling) -> Node:
        """From the logits [V] after a prefix whose last token is `last`."""
        probs = kept(logits, sampling)
        ids = probs.nonzero()[:, 0]
        is_last = torch.zeros_like(probs)
        is_last[last] = 1.0
        others = [
            one.residual(probs, is_last) if one.change is None else kept(logits, one.changed(sampling))
            for one in DEFECTS
        ]
        inside = np.stack([other[ids].double().numpy() for other in others], 1)
        return cls.made(ids.numpy(), probs[ids].double().numpy(), inside, _clear(logits, probs, sampling))

    @classmethod
    def made(cls, ids: np.ndarray, probs: np.ndarray, others: np.ndarray, clear: bool = True) -> Node:
        """From probabilities: ids, probs [S], others [S, D] under each defect (what lacks to 1 is outside)."""
        outside = np.clip(1 - others.sum(0), 0.0, 1.0)
        outside[outside < 1e-9] = 0.0
        scores = np.log(SOFT + (1 - SOFT) * others / probs[:, None])
        mean = (others * scores).sum(0)
        wrong = np.stack([mean, np.maximum((others * scores**2).sum(0) - mean**2, 0.0)])
        right = cumulants(probs[:, None], scores)
        scores = np.vstack([scores, np.full(scores.shape[1], OUTSIDE)])
        compared = cumulants(np.vstack([others, outside]), scores)
        return cls(ids, probs, scores, right, wrong, compared, outside, clear)


def cumulants(probs: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The first four cumulants [4, D] of values [S, D] drawn with probs [S, D] or [S, 1].

    >>> cumulants(np.array([[0.5], [0.5]]), np.array([[0.0], [2.0]])).ravel().tolist()
    [1.0, 1.0, 0.0, -2.0]
    """
    mean = (probs * values).sum(0)
    from_mean = values - mean
    second, third, fourth = ((probs * from_mean**power).sum(0) for power in (2, 3, 4))
    return np.stack([mean, second, third, fourth - 3 * second**2])


def _clear(logits: torch.Tensor, probs: torch.Tensor, sampling: Sampling) -> bool:
    """Whether the same tokens stay when every threshold moves a little."""
    is_kept = probs > 0
    for sign in (1, -1):
        moved = replace(
            sampling,
            top_p=sampling.top_p if sampling.top_p >= 1 else sampling.top_p + sign * _NUDGE,
            min_p=sampling.min_p * (1 + sign * _NUDGE),
        )
        if not torch.equal(kept(logits, moved) > 0, is_kept):
            return False
    k = min(sampling.top_k or logits.shape[-1], logits.shape[-1])
    if k == logits.shape[-1]:
        return True
    nearest = logits.topk(k + 1).values[-2:]
    return bool(nearest[0] - nearest[1] > _NUDGE)
