"""From the evidence of all places to the verdict on one configuration, with what the test could have found.

Two tests share the level: one of everything (chi-square over all nodes), and one that looks for the named defects. In
float32 the latter is the mean of likelihood ratios over defects and places. If all is right its expectation is at most
1, so that it reaches 1/level with a probability of at most the level: exactly, not for many samples only.
Source: Markov's inequality; Wasserman, Ramdas, Balakrishnan 2020, Universal inference (split-free, simple null).
In half precision samples are compared with samples, by the difference of mean scores over its standard error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evals.errors import require
from evals.lossless.defects import DEFECTS, OUTSIDE
from evals.lossless.evidence import Evidence, Sampled
from evals.runs.runner import Configuration
from evals.runs.verdict import Verdict

ALPHA = 1e-3
"""Probability with which a configuration that is right fails, at most: half for each of the two tests."""
POWER = 0.95
"""A PASS is called blind for a defect that it would have found with less than this probability."""


@dataclass(frozen=True)
class Power:
    """How likely one defect would have been found.

    Attributes:
        defect: its name. everywhere: if every place had it; places: if that place alone had it, in their order.
    """

    defect: str
    everywhere: float
    places: tuple[float, ...]


@dataclass(frozen=True)
class ConfigurationFit:
    """The test of one configuration over all places.

    Attributes:
        places: sampled; samples: drawn there. drafts, accepted: verified while sampling, and how many were accepted.
        statistic, degrees, p_value: chi-square over all nodes; None without degrees of freedom.
        impossible: tokens of probability zero. p_named: of the test for the named defects.
        powers: of each named defect; [] for the target alone.
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
    sums = np.array([one.scores.sum(0) for one in evidence])
    logs = np.concatenate([sums.sum(0)[None] - _everywhere(), sums - _alone(len(evidence))])
    largest = logs.max()
    log_mean = largest + np.log(np.exp(logs - largest).sum())
    p_named = float(np.exp(-max(log_mean, 0.0)))
    powers = _powers(arm, *_exact_power(evidence))
    impossible = sum(one.impossible for one in evidence)
    chi = sum(one.statistic for one in evidence), sum(one.degrees for one in evidence)
    return _fit(arm, drawn, chi, impossible, p_named, powers)


def compared_fit(
    arm: Configuration,
    pairs: Sequence[tuple[Evidence, Evidence]],
    drawn: Sequence[Sampled],
    chi: Sequence[tuple[float, int]],
) -> ConfigurationFit:
    """The test against samples of the target alone. pairs: the alone's evidence and the configuration's, per place."""
    from scipy.stats import norm

    differences, variances = (np.array(part) for part in zip(*(_difference(*pair) for pair in pairs), strict=True))
    z_all = _ratio(differences.sum(0), variances.sum(0))
    z_each = _ratio(differences, variances)
    p_all = norm.sf(z_all) * np.exp(_everywhere())
    p_each = norm.sf(z_each) * np.exp(_alone(len(pairs)))
    p_named = float(min(p_all.min(), p_each.min(), 1.0))
    powers = _powers(arm, *_compared_power([pair[1] for pair in pairs]))
    totals = sum(one for one, _ in chi), sum(degrees for _, degrees in chi)
    return _fit(arm, drawn, totals, 0, p_named, powers)


def _fit(
    arm: Configuration,
    drawn: Sequence[Sampled],
    chi: tuple[float, int],
    impossible: int,
    p_named: float,
    powers: tuple[Power, ...],
) -> ConfigurationFit:
    require("scipy", "eval")
    from scipy.stats import chi2

    statistic, degrees = chi
    drafts, accepted = sum(one.drafts for one in drawn), sum(one.accepted for one in drawn)
    p_value = float(chi2.sf(statistic, degrees)) if degrees else None
    if impossible or p_named <= ALPHA / 2 or (p_value is not None and p_value <= ALPHA / 2):
        verdict = Verdict.FAIL
    else:
        verdict = Verdict.NOT_TESTED if p_value is None or (arm.k and not drafts) else Verdict.PASS
    samples = sum(len(one.tokens) for one in drawn)
    numbers = (len(drawn), samples, drafts, accepted, statistic, degrees, impossible, p_value, p_named)
    return ConfigurationFit(arm.name, arm.k, *numbers, powers, verdict)


def _everywhere() -> float:
    """The log of how many likelihood ratios share the level, for one over all places: they have half of it."""
    return float(np.log(2 * len(DEFECTS)))


def _alone(places: int) -> float:
    return float(np.log(2 * len(DEFECTS) * places))


def _powers(arm: Configuration, everywhere: np.ndarray, alone: np.ndarray) -> tuple[Power, ...]:
    if not arm.k:
        return ()
    each = zip(DEFECTS, everywhere.tolist(), alone.T.tolist(), strict=True)
    return tuple(Power(defect.name, max(found, *places), tuple(places)) for defect, found, places in each)


def _exact_power(evidence: Sequence[Evidence]) -> tuple[np.ndarray, np.ndarray]:
    """[D] everywhere, [places, D] at one alone: a likelihood ratio that is large enough, or an impossible token."""
    wrong, outside = np.array([one.wrong for one in evidence]), np.array([one.outside for one in evidence])
    needed = np.log(2 / ALPHA)
    everywhere = _exceeds(needed + _everywhere(), wrong[:, 0].sum(0), wrong[:, 1].sum(0))
    alone = _exceeds(needed + _alone(len(evidence)), wrong[:, 0], wrong[:, 1])
    return _either(everywhere, outside.sum(0)), _either(alone, outside)


def _either(found: np.ndarray, outside: np.ndarray) -> np.ndarray:
    return np.asarray(1 - (1 - found) * np.exp(-outside))


def _compared_power(evidence: Sequence[Evidence]) -> tuple[np.ndarray, np.ndarray]:
    from scipy.stats import norm

    right, wrong = (np.array([getattr(one, side) for one in evidence]) for side in ("right", "wrong"))
    outside = np.array([one.outside for one in evidence])
    shift = wrong[:, 0] - right[:, 0] + OUTSIDE * outside
    noise = right[:, 1] + wrong[:, 1] + OUTSIDE**2 * outside
    level = ALPHA / 2
    limits = norm.isf(level * np.exp(-_everywhere())), norm.isf(level * np.exp(-_alone(len(evidence))))
    everywhere = _exceeds(limits[0] * np.sqrt(noise.sum(0)), shift.sum(0), noise.sum(0))
    return everywhere, _exceeds(limits[1] * np.sqrt(noise), shift, noise)


def _exceeds(limit: np.ndarray | float, mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """P(a normal variable > limit); 0 where it has no mean above 0, that is where nothing was seen of a defect."""
    from scipy.stats import norm

    with np.errstate(divide="ignore", invalid="ignore"):
        found = norm.sf((limit - mean) / np.sqrt(variance))
    found = np.where(variance > 0, found, (mean > limit).astype(float))
    return np.where(mean > 0, found, 0.0)


def _difference(alone: Evidence, arm: Evidence) -> tuple[np.ndarray, np.ndarray]:
    """Per defect: the arm's sum of centred scores, less the target alone's for as many tokens, and its variance."""
    left, right = alone.scores - alone.expected, arm.scores - arm.expected
    share = arm.looked_at / np.maximum(alone.looked_at, 1)
    return right.sum(0) - share * left.sum(0), (right**2).sum(0) + share**2 * (left**2).sum(0)


def _ratio(difference: np.ndarray, variance: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(variance > 0, difference / np.sqrt(variance), 0.0)
