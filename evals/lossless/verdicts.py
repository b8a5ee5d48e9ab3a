"""The verdict on one configuration from the evidence of all places, and what the test could have found.

Two tests share the level: one of everything (chi-square over all nodes), and one that looks for the named defects. In
float32 the latter is the mean of likelihood ratios over defects and places. If all is right its expectation is at most
1, so that it reaches 1/level with a probability of at most the level: exactly, for any number of samples.
Source: Markov's inequality; Wasserman, Ramdas, Balakrishnan 2020, Universal inference (split-free, simple null).
In half precision samples are compared with samples, by the difference of mean scores over its standard error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from evals.lossless.evidence import DEFECTS, Evidence, Sampled
from evals.runs.conversations import Configuration
from evals.runs.verdict import Verdict

ALPHA = 1e-3
"""Probability with which a configuration that is right fails, at most: half for each of the two tests."""
POWER = 0.95
"""A PASS is called blind for a defect that it would have found with less than this probability."""


@dataclass(frozen=True)
class Power:
    """How likely one defect would have been found: if every place had it, or one place alone, in their order."""

    defect: str
    everywhere: float
    places: tuple[float, ...]


@dataclass(frozen=True)
class ConfigurationFit:
    """The test of one configuration over all places.

    Attributes:
        places: sampled; samples: drawn there. drafts, accepted: verified while sampling, and how many were accepted.
        statistic, degrees, p_value: chi-square over all nodes; None without degrees of freedom.
        impossible: tokens of probability zero. p_named, powers: of the tests for named defects; [] of the target alone.
    """

    arm: str
    k: int
    places: int
    samples: int
    drafts: int
    accepted: int
    statistic: float
    degrees: int
    impossible: int
    p_value: float | None
    p_named: float
    powers: tuple[Power, ...]
    verdict: Verdict


def exact_fit(arm: Configuration, evidence: Sequence[Evidence], drawn: Sequence[Sampled]) -> ConfigurationFit:
    """The test against exact probabilities. evidence, drawn: of each place."""
    p_named, found = named(evidence)
    chi = [(one.statistic, one.degrees) for one in evidence]
    return _fit(arm, drawn, chi, sum(one.impossible for one in evidence), p_named, found)


def named(evidence: Sequence[Evidence]) -> tuple[float, ndarray]:
    """The likelihood ratios of the named defects against exact probabilities: p-value, and [1 + places, D] powers, the
    first for all places together."""
    from scipy.special import logsumexp

    shares = _shares(len(evidence))
    scores = _with_total([one.scores.sum(0) for one in evidence])
    p_named = float(np.exp(-max(logsumexp(scores - shares), 0.0)))
    mean, variance = (_with_total([one.wrong[moment] for one in evidence]) for moment in (0, 1))
    # A likelihood ratio that is large enough, or an impossible token.
    missed = 1 - _exceeds(np.log(2 / ALPHA) + shares, mean, variance)
    return p_named, 1 - missed * np.exp(-_with_total([one.outside for one in evidence]))


def compared_fit(
    arm: Configuration,
    pairs: Sequence[tuple[Evidence, Evidence]],
    drawn: Sequence[Sampled],
    chi: Sequence[tuple[float, int]],
) -> ConfigurationFit:
    """The test against samples of the target alone. pairs: the alone's evidence and the configuration's, per place."""
    from scipy.stats import norm

    difference, variance = (_with_total(part) for part in zip(*(_difference(*pair) for pair in pairs), strict=True))
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.where(variance > 0, difference / np.sqrt(variance), 0.0)
    p_named = float(min((norm.sf(z) * np.exp(_shares(len(pairs)))).min(), 1.0))
    return _fit(arm, drawn, chi, 0, p_named, _compared_power(pairs))


def _fit(
    arm: Configuration,
    drawn: Sequence[Sampled],
    chi: Sequence[tuple[float, int]],
    impossible: int,
    p_named: float,
    power: ndarray,
) -> ConfigurationFit:
    """chi: chi-square and degrees of each place. power: [1 + places, D], first if every place has the defect."""
    from scipy.stats import chi2

    statistic = sum(one for one, _ in chi)
    degrees = sum(free for _, free in chi)
    drafts = sum(one.drafts for one in drawn)
    accepted = sum(one.accepted for one in drawn)
    p_value = float(chi2.sf(statistic, degrees)) if degrees else None
    if impossible or p_named <= ALPHA / 2 or (p_value is not None and p_value <= ALPHA / 2):
        verdict = Verdict.FAIL
    else:
        verdict = Verdict.NOT_TESTED if p_value is None or (arm.k and not drafts) else Verdict.PASS
    powers = [
        Power(defect.name, max(found), tuple(found[1:]))
        for defect, found in zip(DEFECTS, power.T.tolist(), strict=True)
    ]
    return ConfigurationFit(
        arm=arm.name,
        k=arm.k,
        places=len(drawn),
        samples=sum(len(one.tokens) for one in drawn),
        drafts=drafts,
        accepted=accepted,
        statistic=statistic,
        degrees=degrees,
        impossible=impossible,
        p_value=p_value,
        p_named=p_named,
        powers=tuple(powers) if arm.k else (),
        verdict=verdict,
    )


def _with_total(of_places: Sequence[ndarray] | ndarray) -> ndarray:
    """[1 + places, D]: the sum over all places [D], and each."""
    return np.stack([np.sum(of_places, axis=0), *of_places])


def _shares(places: int) -> ndarray:
    """[1 + places, 1] the log of how many likelihood ratios share the level: one over all places, and each place's.

    Those of all defects over all places have half of it, as those at the single places have together.
    """
    return np.log(2 * len(DEFECTS) * np.array([[1], *[[places]] * places]))


def _compared_power(pairs: Sequence[tuple[Evidence, Evidence]]) -> ndarray:
    """[1 + places, D]: P(T > limit √V), for T the difference and V its estimated variance.

    V is a sum of squares around the mean of what is right, so that a defect raises it with T: by the square of every
    sample's mean score as well. √V lies below its tangent at its expectation E: T - limit (√E + (V - E) / 2√E) > 0
    suffices, and is a sum over independent samples: normal for many. So what is stated is a little too low (√ is
    concave), and more so where another defect's score or chi-square would have found it too.
    Source: the delta method for a self-normalized sum; de la Peña, Lai, Shao 2009, Self-Normalized Processes.
    """
    from scipy.stats import norm

    shares = np.array([_share(*pair) for pair in pairs])
    order = np.arange(1, 5)[:, None]
    alone = np.array([pair[0].if_right for pair in pairs]) * (-shares[:, None]) ** order
    own = np.array([pair[1].if_wrong for pair in pairs])
    samples = np.array([[one.samples for one in pair] for pair in pairs])
    mean = _with_total(own[:, 0])
    square = _with_total(own[:, 1] + alone[:, 1])
    limit = norm.isf(ALPHA / 2 * np.exp(-_shares(len(pairs))))
    slope = limit / (2 * np.sqrt(np.maximum(square, 1e-12)))
    everywhere, each = (
        _scatter(own, at, samples[:, 1]) + _scatter(alone, at, samples[:, 0]) for at in (slope[0], slope[1:])
    )
    return _exceeds(limit * np.sqrt(square), mean, np.stack([everywhere.sum(0), *each]))


def _scatter(powers: ndarray, slope: ndarray, samples: ndarray) -> ndarray:
    """[places, D] variance of the sum over samples of x - slope x². powers: [places, 4, D] sums of x, x², x³, x⁴."""
    first, second, third, fourth = powers.transpose(1, 0, 2)
    total = first - slope * second
    return second - 2 * slope * third + slope**2 * fourth - total**2 / samples[:, None]


def _exceeds(limit: ndarray, mean: ndarray, variance: ndarray) -> ndarray:
    """P(a normal variable > limit); 0 where it has no mean above 0, that is where nothing was seen of a defect."""
    from scipy.stats import norm

    with np.errstate(divide="ignore", invalid="ignore"):
        found = norm.sf((limit - mean) / np.sqrt(variance))
    found = np.where(variance > 0, found, mean > limit)
    return np.where(mean > 0, found, 0.0)


def _difference(alone: Evidence, arm: Evidence) -> tuple[ndarray, ndarray]:
    """Per defect: the arm's sum of centred scores, less the target alone's for as many tokens, and its variance."""
    left = alone.scores - alone.expected
    right = arm.scores - arm.expected
    share = _share(alone, arm)
    return right.sum(0) - share * left.sum(0), (right**2).sum(0) + share**2 * (left**2).sum(0)


def _share(alone: Evidence, arm: Evidence) -> ndarray:
    """[D] how many tokens of the arm have a score for each one of the target alone."""
    return arm.looked_at / np.maximum(alone.looked_at, 1)
