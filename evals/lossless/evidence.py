"""Evidence from samples of one place: counts by token against the exact distribution, and named defects' instead.

A defect of sampled verification has a name, and the next token's distribution that it would give. The test computes
from these how likely each would have been found, and looks for each one by its likelihood ratio.

Samples are followed from the first token on: those with the same first tokens stand at one node, and what they have
next is drawn from that node's distribution. So a likelihood ratio is the product over all tokens of all samples, and
its expectation is at most 1 if all is right, whatever nodes were reached and however often (a martingale).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

SOFT = 0.05
"""Share of the true distribution in each alternative, so that one token does not rule a defect out."""
OUTSIDE = 1.0
"""Score of a token that only the defect allows (where that alone is no proof: in half precision)."""
_NUDGE = 1e-4


@dataclass(frozen=True)
class Sampling:
    """How a trial samples: `samples` per place and configuration, of which the first `tokens` are looked at.

    top_k, temperature, top_p, min_p: of the sampling (top_k 0, top_p 1 and min_p 0 are off).
    """

    samples: int = 1000
    tokens: int = 7
    top_k: int = 4
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0

    def most_kept(self, vocab_size: int) -> int:
        """Tokens that top_k keeps."""
        return min(self.top_k or vocab_size, vocab_size)


@dataclass(frozen=True)
class Defect:
    """A way in which sampled verification could be wrong.

    Attributes:
        name: shown. change: the sampling that verification uses instead of the request's; None: sampling is right, but
            the bonus token after full acceptance is drawn from what is left of p without the last draft.
    """

    name: str
    change: Callable[[Sampling], Sampling] | None

    def instead(self, probs: Tensor, logits: Tensor, is_last: Tensor, sampling: Sampling) -> Tensor:
        """[..., V] the probabilities of the next token under this defect, in place of the right ones `probs`.

        is_last: [..., V] 1 at the last draft. Without it `probs` are unchanged where it has nothing or everything.
        """
        if self.change is not None:
            return kept(logits, self.change(sampling))
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


def kept(logits: Tensor, sampling: Sampling) -> Tensor:
    """Exact probabilities [..., V] of the next token under the test's sampling, in the dtype of the logits.

    Written apart from the library's own filters, which it judges.

    >>> kept(torch.tensor([0.0, 2.0, 1.0, -9.0]).double(), Sampling(top_k=3, top_p=0.9)).round(decimals=2).tolist()
    [0.0, 0.73, 0.27, 0.0]
    """
    ordered, token_ids = (logits / sampling.temperature).sort(descending=True, stable=True)
    k = sampling.most_kept(logits.shape[-1])
    ordered = ordered.masked_fill(ordered < ordered[..., k - 1 : k], -torch.inf)
    probs = ordered.softmax(-1)
    above = probs.cumsum(-1) - probs  # of all more probable tokens; the token that crosses top_p stays
    probs = probs.masked_fill((above >= sampling.top_p) & (above > 0), 0.0)
    probs = probs.masked_fill(probs < sampling.min_p * probs[..., :1], 0.0)
    return torch.zeros_like(probs).scatter(-1, token_ids, probs / probs.sum(-1, keepdim=True))


def softened(other: Tensor, probs: Tensor) -> Tensor:
    """The likelihood ratio of a defect, mixed with the truth. Only meant where `probs` is positive."""
    return SOFT + (1 - SOFT) * other / probs.clamp(min=1e-300)


@dataclass(frozen=True)
class Node:
    """The next token's distribution after one prefix, if all is right and under each of D defects.

    Attributes:
        ids: [S] tokens that may follow. probs: [S]. scores: [S + 1, D] log likelihood ratios; the last row is for
            tokens that may not follow.
        right: first four cumulants of the scores [4, D] if all is right.
        wrong: their mean and variance [2, D] under each defect, from the tokens that may follow alone.
        compared: first four cumulants of the scores [4, D] under each defect, with tokens that may not follow.
        outside: [D] probability, under each defect, of tokens that may not follow.
        clear: whether rounding cannot change which tokens may follow.
    """

    ids: ndarray
    probs: ndarray
    scores: ndarray
    right: ndarray
    wrong: ndarray
    compared: ndarray
    outside: ndarray
    clear: bool = True

    @classmethod
    def of(cls, logits: Tensor, last: int, sampling: Sampling) -> Node:
        """From the logits [V] after a prefix whose last token is `last`."""
        probs = kept(logits, sampling)
        ids = probs.nonzero()[:, 0]
        is_last = torch.zeros_like(probs)
        is_last[last] = 1.0
        others = [one.instead(probs, logits, is_last, sampling) for one in DEFECTS]
        inside = np.stack([other[ids].double().numpy() for other in others], 1)
        return cls.made(ids.numpy(), probs[ids].double().numpy(), inside, _clear(logits, probs, sampling))

    @classmethod
    def made(cls, ids: ndarray, probs: ndarray, others: ndarray, clear: bool = True) -> Node:
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


def cumulants(probs: ndarray, values: ndarray) -> ndarray:
    """The first four cumulants [4, D] of values [S, D] drawn with probs [S, D] or [S, 1].

    >>> cumulants(np.array([[0.5], [0.5]]), np.array([[0.0], [2.0]])).ravel().tolist()
    [1.0, 1.0, 0.0, -2.0]
    """
    mean = (probs * values).sum(0)
    from_mean = values - mean
    second, third, fourth = ((probs * from_mean**power).sum(0) for power in (2, 3, 4))
    return np.stack([mean, second, third, fourth - 3 * second**2])


def _clear(logits: Tensor, probs: Tensor, sampling: Sampling) -> bool:
    """Whether the same tokens are kept when every threshold moves a little."""
    is_kept = probs > 0
    for sign in (1, -1):
        moved = replace(
            sampling,
            top_p=sampling.top_p if sampling.top_p >= 1 else sampling.top_p + sign * _NUDGE,
            min_p=sampling.min_p * (1 + sign * _NUDGE),
        )
        if not torch.equal(kept(logits, moved) > 0, is_kept):
            return False
    k = sampling.most_kept(logits.shape[-1])
    if k == logits.shape[-1]:
        return True
    nearest = logits.topk(k + 1).values[-2:]
    return bool(nearest[0] - nearest[1] > _NUDGE)


LEAST_EXPECTED = 5.0
MOST_NODES = 300
"""Nodes of a place that are replayed at most, with few samples _FEWEST: those with the most samples first, where a
bonus token counts as _BONUS_COUNTS samples."""
_FEWEST = 64
_BONUS_COUNTS = 4
BONUS = next(i for i, defect in enumerate(DEFECTS) if defect.change is None)

Tokens = tuple[int, ...]
Nodes = Callable[[Sequence[Tokens]], Mapping[Tokens, Node]]
"""The nodes of prefixes (token ids after the place's prompt)."""


@dataclass(frozen=True)
class Sampled:
    """Sampled answers to one prompt: tokens [samples, tokens], their first ids; drafts, accepted: of their rounds.

    bonus: [samples, tokens], which of them are the bonus token of a round that accepted all K drafts; of the target
    alone those at places where others can have one.
    """

    tokens: ndarray
    bonus: ndarray
    drafts: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Branch:
    """Samples with the same first tokens. prefix: these; rows: [n] which samples; following: [n] their next ids."""

    prefix: Tokens
    rows: ndarray
    following: ndarray


@dataclass(frozen=True)
class Evidence:
    """The sums of one place over its nodes. D defects.

    Attributes:
        samples: drawn. statistic, degrees: chi-square of the nodes with enough samples.
        impossible: tokens that may not follow, at nodes where rounding cannot decide that.
        scores: [samples, D] log likelihood ratios of each defect. expected: [samples, D] their means if all is right.
        wrong: [2, D] mean and variance of the sum of scores under each defect, given how often each node was reached.
        if_right, if_wrong: [4, D] what the sums over all samples of the first four powers of a sample's score, less
            its mean if all is right, are expected to be.
        outside: [D] expected tokens, under each defect, that may not follow.
        looked_at: [D] tokens that have a score.
    """

    samples: int
    statistic: float
    degrees: int
    impossible: int
    scores: ndarray
    expected: ndarray
    wrong: ndarray
    if_right: ndarray
    if_wrong: ndarray
    outside: ndarray
    looked_at: ndarray


def branches(sampled: Sampled) -> list[Branch]:
    """The nodes of drafted tokens, those with the most samples first; the first token has no draft.

    Which ones are left out depends on nothing that a node has still to draw.

    >>> sampled = Sampled(np.array([[1, 5], [2, 5], [1, 6]]), np.zeros((3, 2), bool))
    >>> [(b.prefix, b.following.tolist()) for b in branches(sampled)]
    [((1,), [5, 6]), ((2,), [5])]
    """
    tokens = sampled.tokens
    found = []
    group = np.zeros(len(tokens), np.int64)
    for depth in range(1, tokens.shape[1]):
        _, group = np.unique(np.stack([group, tokens[:, depth - 1]]), axis=1, return_inverse=True)
        group = group.ravel()
        order = np.argsort(group, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
            found.append(Branch(tuple(tokens[rows[0], :depth].tolist()), rows, tokens[rows, depth]))
    most = max(min(MOST_NODES, max(len(tokens) // 2, _FEWEST)), tokens.shape[1])
    return sorted(found, key=lambda one: -_weight(one, sampled.bonus))[:most]


def _weight(branch: Branch, bonus: ndarray) -> int:
    return len(branch.rows) + _BONUS_COUNTS * int(bonus[branch.rows, len(branch.prefix)].sum())


def measure(sampled: Sampled, nodes: Nodes, is_exact: bool = True) -> Evidence:
    """Compare the samples of one place with the distribution of every prefix. is_exact: its probabilities are exact."""
    followed = branches(sampled)
    known = nodes([branch.prefix for branch in followed])
    shape = (*sampled.tokens.shape, len(DEFECTS))
    counted = np.ones(shape)
    scores = np.zeros(shape)
    expected = np.zeros(shape)
    counted[..., BONUS] = sampled.bonus
    # Cumulants of every token's score less its mean if all is right: if all is right, and under each defect.
    cumulants_of = np.zeros((2, *sampled.tokens.shape, 4, len(DEFECTS)))
    wrong = np.zeros((2, len(DEFECTS)))
    outside = np.zeros(len(DEFECTS))
    looked_at = np.zeros(len(DEFECTS))
    statistic, degrees, impossible = 0.0, 0, 0
    for branch in followed:
        node, place = known[branch.prefix], (branch.rows, len(branch.prefix))
        if is_exact and not node.clear:
            continue
        at, often = _places_in(node.ids, branch.following), counted[place].sum(0)
        scores[place], expected[place] = node.scores[at], node.right[0]
        for of_tokens, own in zip(cumulants_of, (node.right, node.compared), strict=True):
            of_tokens[place] = np.concatenate([own[:1] - node.right[0], own[1:]])
        wrong += often * node.wrong
        outside += often * node.outside
        looked_at += often
        if is_exact:
            counts = np.bincount(at, minlength=len(node.ids) + 1)
            impossible += int(counts[-1])
            added, free = chi_square(counts[:-1], len(at) * node.probs)
            statistic, degrees = statistic + added, degrees + free
    # A sample's tokens are taken as independent, given its nodes, so that their cumulants add; and as if a defect led
    # to the same nodes as were seen here.
    if_right, if_wrong = (_powers((own * counted[:, :, None]).sum(1)).sum(0) for own in cumulants_of)
    return Evidence(
        samples=len(sampled.tokens),
        statistic=statistic,
        degrees=degrees,
        impossible=impossible,
        scores=(counted * scores).sum(1),
        expected=(counted * expected).sum(1),
        wrong=wrong,
        if_right=if_right,
        if_wrong=if_wrong,
        outside=outside,
        looked_at=looked_at,
    )


def _powers(cumulants: ndarray) -> ndarray:
    """The mean first four powers [n, 4, D] of variables with these first four cumulants [n, 4, D]."""
    mean, second, third, fourth = cumulants.transpose(1, 0, 2)
    squared = second + mean**2
    cubed = third + 3 * second * mean + mean**3
    last = fourth + 4 * third * mean + 3 * second**2 + 6 * second * mean**2 + mean**4
    return np.stack([mean, squared, cubed, last], 1)


def _places_in(ids: ndarray, tokens: ndarray) -> ndarray:
    """The index of each token in the sorted ids; len(ids) where it is not among them."""
    at = np.minimum(np.searchsorted(ids, tokens), len(ids) - 1)
    return np.where(ids[at] == tokens, at, len(ids))


def _cells(expected: ndarray) -> ndarray:
    """The cell of each value: those with a small expectation are put into one."""
    order = np.argsort(-expected, kind="stable")
    large = int((expected >= LEAST_EXPECTED).sum())
    if expected[order[large:]].sum() < LEAST_EXPECTED:
        large = max(large - 1, 0)
    return np.minimum(np.argsort(order), large)


def chi_square(observed: ndarray, expected: ndarray) -> tuple[float, int]:
    """Chi-square and its degrees of freedom, cells with small expectation put into one; (0, 0) for a single cell."""
    cells = _cells(expected)
    observed = np.bincount(cells, observed)
    expected = np.bincount(cells, expected)
    if len(expected) < 2:
        return 0.0, 0
    return float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1


def homogeneity(left: Sampled, right: Sampled) -> tuple[float, int]:
    """Chi-square of two samples of one place, node by node, and its degrees of freedom."""
    from scipy.stats import chi2_contingency

    statistic = 0.0
    degrees = 0
    others = {branch.prefix: branch for branch in branches(right)}
    for branch in branches(left):
        other = others.get(branch.prefix)
        if other is None:
            continue
        both = (branch.following, other.following)
        ids, at = np.unique(np.concatenate(both), return_inverse=True)
        table = np.zeros((2, len(ids)))
        np.add.at(table, (np.repeat([0, 1], [len(one) for one in both]), at), 1)
        cells = _cells(table.sum(0) * table.sum(1).min() / table.sum())
        table = np.stack([np.bincount(cells, side) for side in table])
        if table.shape[1] > 1:
            found = chi2_contingency(table, correction=False)
            statistic = statistic + float(found.statistic)
            degrees = degrees + int(found.dof)
    return statistic, degrees
