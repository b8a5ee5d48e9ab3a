"""What the samples of one place say: counts token by token, against the exact distribution of each prefix.

Samples are followed from the first token on: those with the same first tokens stand at one node, and what they have
next is drawn from that node's distribution. So a likelihood ratio is the product over all tokens of all samples, and
its expectation is at most 1 if all is right, whatever nodes were reached and however often (a martingale).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evals.lossless.defects import DEFECTS, Node

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
    """What the answers to one prompt were.

    Attributes:
        tokens: [samples, tokens] their first ids. bonus: [samples, tokens], which of them are the bonus token of a
            round that accepted all K drafts; of the target alone those that stand where others can have one.
        drafts, accepted: of their rounds.
    """

    tokens: np.ndarray
    bonus: np.ndarray
    drafts: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Branch:
    """Samples with the same first tokens. prefix: these; rows: [n] which samples; following: [n] their next ids."""

    prefix: Tokens
    rows: np.ndarray
    following: np.ndarray


@dataclass(frozen=True)
class Evidence:
    """The sums of one place over its nodes. D defects.

    Attributes:
        samples: drawn. statistic, degrees: chi-square of the nodes with enough samples.
        impossible: tokens that may not follow, at nodes where rounding cannot decide that.
        scores: [samples, D] log likelihood ratios of each defect. expected: [samples, D] their means if all is right.
        wrong: [2, D] mean and variance of the sum of scores under each defect, given how often each node was reached.
        if_right, if_wrong: [4, D] what the sums over all samples of the first four powers of a sample's score, less
            its mean if all is right, are expected to be: see `_sample_powers`.
        outside: [D] expected tokens, under each defect, that may not follow.
        looked_at: [D] tokens that have a score.
    """

    samples: int
    statistic: float
    degrees: int
    impossible: int
    scores: np.ndarray
    expected: np.ndarray
    wrong: np.ndarray
    if_right: np.ndarray
    if_wrong: np.ndarray
    outside: np.ndarray
    looked_at: np.ndarray


def branches(sampled: Sampled) -> list[Branch]:
    """The nodes of drafted tokens, those with the most samples first; the first token has no draft.

    Which ones are left out depends on nothing that a node has still to draw.

    >>> sampled = Sampled(np.array([[1, 5], [2, 5], [1, 6]]), np.zeros((3, 2), bool))
    >>> [(b.prefix, b.following.tolist()) for b in branches(sampled)]
    [((1,), [5, 6]), ((2,), [5])]
    """
    tokens = sampled.tokens
    found: list[Branch] = []
    group = np.zeros(len(tokens), np.int64)
    for depth in range(1, tokens.shape[1]):
        _, group = np.unique(np.stack([group, tokens[:, depth - 1]]), axis=1, return_inverse=True)
        order = np.argsort(group.ravel(), kind="stable")
        group = group.ravel()
        for rows in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
            found.append(Branch(tuple(tokens[rows[0], :depth].tolist()), rows, tokens[rows, depth]))
    return sorted(found, key=lambda one: -_weight(one, sampled.bonus))[
        : min(MOST_NODES, max(len(tokens) // 2, _FEWEST))
    ]


def _weight(branch: Branch, bonus: np.ndarray) -> int:
    return len(branch.rows) + _BONUS_COUNTS * int(bonus[branch.rows, len(branch.prefix)].sum())


def measure(sampled: Sampled, nodes: Nodes, is_exact: bool = True) -> Evidence:
    """Compare the samples of one place with the distribution of every prefix. is_exact: its probabilities are exact."""
    followed = branches(sampled)
    known = nodes([branch.prefix for branch in followed])
    count, width = len(sampled.tokens), len(DEFECTS)
    scores, expected = np.zeros((count, width)), np.zeros((count, width))
    wrong, outside, looked_at = np.zeros((2, width)), np.zeros(width), np.zeros(width)
    statistic, degrees, impossible = 0.0, 0, 0
    for branch in followed:
        node = known[branch.prefix]
        if is_exact and not node.clear:
            continue
        of_bonus = sampled.bonus[branch.rows, len(branch.prefix)]
        counted = np.ones((len(branch.rows), width))
        counted[:, BONUS] = of_bonus
        at = _places_in(node.ids, branch.following)
        scores[branch.rows] += counted * node.scores[at]
        expected[branch.rows] += counted * node.right[0]
        often = counted.sum(0)
        wrong += often * node.wrong
        outside += often * node.outside
        looked_at += often
        if is_exact:
            counts = np.bincount(at, minlength=len(node.ids) + 1)
            impossible += int(counts[-1])
            of_node = chi_square(counts[:-1], len(at) * node.probs)
            statistic, degrees = statistic + of_node[0], degrees + of_node[1]
    powers = _sample_powers(sampled, followed, known)
    return Evidence(count, statistic, degrees, impossible, scores, expected, wrong, *powers, outside, looked_at)


def _sample_powers(
    sampled: Sampled, followed: Sequence[Branch], known: Mapping[Tokens, Node]
) -> tuple[np.ndarray, np.ndarray]:
    """[4, D] if all is right, and under each defect: sums of the first four powers expected of a sample's score.

    The score is centred by its mean if all is right. A sample's tokens are taken as independent, given its nodes, so
    that their cumulants add; and as if a defect led to the same nodes as were seen here.
    """
    nodes = [known[branch.prefix] for branch in followed]
    table = np.zeros((len(nodes) + 1, 2, 4, len(DEFECTS)))  # the last one is for nodes that are not followed
    at = np.full(sampled.tokens.shape, len(nodes))
    for i, (branch, node) in enumerate(zip(followed, nodes, strict=True)):
        at[branch.rows, len(branch.prefix)] = i
        table[i] = node.right, node.compared
        table[i, :, 0] -= node.right[0]
    of_tokens = table[at]
    of_tokens[..., BONUS] *= sampled.bonus[..., None, None]
    right, wrong = (_powers(of_tokens[:, :, side].sum(1)).sum(0) for side in (0, 1))
    return right, wrong


def _powers(cumulants: np.ndarray) -> np.ndarray:
    """The mean first four powers [n, 4, D] of variables with these first four cumulants [n, 4, D]."""
    mean, second, third, fourth = cumulants.transpose(1, 0, 2)
    squared = second + mean**2
    cubed = third + 3 * second * mean + mean**3
    last = fourth + 4 * third * mean + 3 * second**2 + 6 * second * mean**2 + mean**4
    return np.stack([mean, squared, cubed, last], 1)


def _places_in(ids: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Where each token is in the sorted ids; their number where it is not."""
    at = np.minimum(np.searchsorted(ids, tokens), len(ids) - 1)
    return np.where(ids[at] == tokens, at, len(ids))


def chi_square(observed: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """Chi-square and its degrees of freedom, cells with small expectation put into one; (0, 0) for a single cell."""
    order = np.argsort(-expected, kind="stable")
    observed, expected = observed[order], expected[order]
    large = int((expected >= LEAST_EXPECTED).sum())
    if large < len(expected):
        if expected[large:].sum() < LEAST_EXPECTED:
            large = max(large - 1, 0)
        observed = np.append(observed[:large], observed[large:].sum())
        expected = np.append(expected[:large], expected[large:].sum())
    if len(expected) < 2:
        return 0.0, 0
    return float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1


def homogeneity(left: Sampled, right: Sampled) -> tuple[float, int]:
    """Chi-square of two samples of one place, node by node, and its degrees of freedom."""
    statistic, degrees = 0.0, 0
    others = {branch.prefix: branch for branch in branches(right)}
    for branch in branches(left):
        other = others.get(branch.prefix)
        if other is None:
            continue
        ids, at = np.unique(np.concatenate([branch.following, other.following]), return_inverse=True)
        split = len(branch.following)
        sides = [np.bincount(part, minlength=len(ids)) for part in (at[:split], at[split:])]
        smaller = min(split, len(at) - split) / len(at)
        common = np.sum(sides, axis=0)
        order = np.argsort(-common, kind="stable")
        large = int((common[order] * smaller >= LEAST_EXPECTED).sum())
        group = np.minimum(np.argsort(order), large)
        if common[order][large:].sum() * smaller < LEAST_EXPECTED:
            group = np.minimum(group, max(large - 1, 0))
        table = np.stack([np.bincount(group, side) for side in sides])
        if table.shape[1] < 2:
            continue
        expectation = table.sum(1, keepdims=True) * table.sum(0) / table.sum()
        statistic += float(((table - expectation) ** 2 / expectation).sum())
        degrees += table.shape[1] - 1
    return statistic, degrees
