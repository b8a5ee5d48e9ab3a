"""Planted defects are found as often as the test says, and what is right fails as seldom as it says: simulated.

The samples are drawn here from a made-up target of twelve tokens; everything that judges them is the tool's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

from evals.lossless.distribution import against
from evals.lossless.evidence import (
    BONUS,
    DEFECTS,
    OUTSIDE,
    SOFT,
    Evidence,
    Node,
    Sampled,
    Sampling,
    Tokens,
    chi_square,
    homogeneity,
    kept,
    measure,
)
from evals.lossless.verdicts import ALPHA, ConfigurationFit, compared_fit, exact_fit
from evals.runs.conversations import Configuration
from evals.runs.verdict import Verdict

norm = pytest.importorskip("scipy.stats").norm

K, VOCABULARY = 2, 12
ARM = Configuration("k", K)
COMMON = Sampling(samples=300, tokens=K + 2, top_k=3, temperature=1.0)
TRIALS = (
    COMMON,
    replace(COMMON, top_k=6, top_p=0.8),
    replace(COMMON, top_k=6, min_p=0.15),
    replace(COMMON, top_k=6, top_p=0.95, min_p=0.02),
)
RIGHT = len(DEFECTS)
ACCEPTED = 0.5
"""How often all drafts are accepted."""


@dataclass(frozen=True)
class Place:
    """A made-up place: logits that follow from the prefix."""

    number: int
    sampling: Sampling

    def logits(self, prefix: Tokens) -> torch.Tensor:
        seed = abs(hash((self.number, *prefix))) % 2**32
        drawn = torch.from_numpy(np.random.default_rng(seed).normal(0.0, 1.5, VOCABULARY))
        if prefix:
            drawn[prefix[-1]] = drawn.max() - 0.5  # what was said may be said again: a bonus without it shows
        return drawn

    def node(self, prefix: Tokens) -> Node:
        return _node(self, prefix)

    def __call__(self, prefixes: Sequence[Tokens]) -> Mapping[Tokens, Node]:
        return {prefix: _node(self, prefix) for prefix in prefixes}

    def draw(self, rng: np.random.Generator, defect: int, samples: int) -> Sampled:
        """Answers verified with one defect; the first token has none."""
        tokens = np.zeros((samples, self.sampling.tokens), np.int64)
        bonus = np.zeros(tokens.shape, bool)
        bonus[:, -1] = rng.random(samples) < ACCEPTED
        for depth in range(tokens.shape[1]):
            tables = np.stack([_tables(self, tuple(row)) for row in np.unique(tokens[:, :depth], axis=0).tolist()])
            _, at = np.unique(tokens[:, :depth], axis=0, return_inverse=True)
            which = np.full(samples, defect if depth else RIGHT)
            if defect == BONUS:
                which = np.where(bonus[:, depth], BONUS, RIGHT)
            tokens[:, depth] = (tables[at.ravel(), which] < rng.random(samples)[:, None]).sum(1)
        return Sampled(tokens, bonus, drafts=1, accepted=1)


@cache
def _node(place: Place, prefix: Tokens) -> Node:
    return Node.of(place.logits(prefix), prefix[-1], place.sampling)


@cache
def _tables(place: Place, prefix: Tokens) -> np.ndarray:
    """[defects + 1, V] cumulative probabilities under each defect, and last if all is right."""
    logits = place.logits(prefix)
    right = kept(logits, place.sampling)
    others = [kept(logits, defect.change(place.sampling) if defect.change else place.sampling) for defect in DEFECTS]
    if prefix:
        left = right.clone()
        left[prefix[-1]] = 0
        others[BONUS] = left / left.sum() if left.sum() > 0 else right
    return torch.stack([*others, right]).cumsum(1).clamp(max=1.0).numpy() - 1e-12


PLACES = tuple(Place(number, sampling) for number, sampling in enumerate(TRIALS))


def once(rng: np.random.Generator, defect: int, samples: int, only: int | None = None) -> ConfigurationFit:
    """One run of the test. only: the place that has the defect, None: all."""
    drawn = [place.draw(rng, defect if only in (None, i) else RIGHT, samples) for i, place in enumerate(PLACES)]
    return exact_fit(ARM, [measure(one, place) for one, place in zip(drawn, PLACES, strict=True)], drawn)


def share_found(defect: int, samples: int, runs: int, only: int | None = None) -> float:
    rng = np.random.default_rng(defect + 1)
    return float(np.mean([once(rng, defect, samples, only).verdict is Verdict.FAIL for _ in range(runs)]))


def stated(defect: int, samples: int, only: int | None = None, runs: int = 10) -> float:
    """What a run of something right says that it would have found, in the mean of several."""
    rng = np.random.default_rng(0)
    powers = [once(rng, RIGHT, samples).powers[defect] for _ in range(runs)]
    return float(np.mean([power.everywhere if only is None else power.places[only] for power in powers]))


MIDDLING = [
    ("temperature 10 % too high", 10, None),
    ("temperature 10 % too low", 78, None),
    ("top_p 0.1 too high", 5, None),
    ("top_p 0.1 too low", 25, None),
    ("min_p twice as large", 36, None),
    ("min_p half as large", 6, None),
    ("bonus from the residual", 20, None),
    ("bonus from the residual", 75, 3),
    ("temperature 10 % too high", 10, 1),
]
"""Defects, samples a place, and the only place that has it: found neither always nor never."""
NAMES = [defect.name for defect in DEFECTS]


def spread(share: float, runs: int) -> float:
    return 2.5 * float(np.sqrt(share * (1 - share) / runs))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "samples", "only", "runs"), [(*MIDDLING[0], 20), (*MIDDLING[6], 20)])
@pytest.mark.thorough
def test_a_few_runs_find_what_is_stated(name: str, samples: int, only: int | None, runs: int) -> None:
    check_power(name, samples, only, runs)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("name", "samples", "only"), MIDDLING)
def test_a_planted_defect_is_found_as_often_as_is_stated(name: str, samples: int, only: int | None) -> None:
    check_power(name, samples, only, 1000)


def check_power(name: str, samples: int, only: int | None, runs: int) -> None:
    defect = NAMES.index(name)
    expected, found = stated(defect, samples, only, max(runs // 5, 15)), share_found(defect, samples, runs, only)
    print(f"{name} at {only}, {samples} samples a place: stated {expected:.3f}, found {found:.3f} of {runs}")
    assert 0.1 < expected < 0.99
    assert found > expected - 0.04 - spread(expected, runs), "no more is stated than is found"


@pytest.mark.slow
@pytest.mark.parametrize("name", [NAMES[1], *(pytest.param(one, marks=pytest.mark.long) for one in NAMES)])
@pytest.mark.thorough
def test_with_enough_samples_every_named_defect_is_found(name: str) -> None:
    defect = NAMES.index(name)
    found = once(np.random.default_rng(1), defect, COMMON.samples)
    assert found.verdict is Verdict.FAIL and stated(defect, COMMON.samples) > 0.999


@pytest.mark.slow
@pytest.mark.parametrize("runs", [40, pytest.param(2000, marks=pytest.mark.long)])
@pytest.mark.thorough
def test_what_is_right_fails_as_seldom_as_is_stated(runs: int) -> None:
    rng = np.random.default_rng(5)
    fits = [once(rng, RIGHT, 200) for _ in range(runs)]
    failed = sum(fit.verdict is Verdict.FAIL for fit in fits)
    print(
        f"right: {failed} of {runs} failed; p of chi-square below 0.05: {np.mean([fit.p_value < 0.05 for fit in fits])}"
    )
    assert failed <= ALPHA * runs + 3 * np.sqrt(ALPHA * runs)
    assert np.mean([fit.p_value < 0.05 for fit in fits]) < 0.05 + 3 * np.sqrt(0.05 / runs)
    assert not any(fit.impossible for fit in fits)


def compared(rng: np.random.Generator, defect: int, samples: int) -> ConfigurationFit:
    """One run of the test against samples of the target alone, as in half precision."""
    alone = [place.draw(rng, RIGHT, samples) for place in PLACES]
    last = np.eye(K + 2, dtype=bool)[[K + 1] * samples]
    alone = [Sampled(one.tokens, last) for one in alone]
    drawn = [place.draw(rng, defect, samples) for place in PLACES]
    return against(ARM, alone, drawn, PLACES)


COMPARED = [
    ("temperature 10 % too high", 150),
    ("temperature 10 % too low", 200),
    ("top_p 0.1 too high", 60),
    ("top_p 0.1 too low", 100),
    ("min_p twice as large", 150),
    ("min_p half as large", 120),
    ("bonus from the residual", 60),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "samples", "runs"),
    [(*COMPARED[1], 5), *(pytest.param(*one, 1000, marks=pytest.mark.long) for one in COMPARED)],
)
@pytest.mark.thorough
def test_a_planted_defect_is_found_by_comparing_samples(name: str, samples: int, runs: int) -> None:
    rng, defect = np.random.default_rng(2), NAMES.index(name)
    expected = np.mean([compared(rng, RIGHT, samples).powers[defect].everywhere for _ in range(max(runs // 10, 5))])
    found = np.mean([compared(rng, defect, samples).verdict is Verdict.FAIL for _ in range(runs)])
    print(f"compared, {name}, {samples} samples a place: stated {expected:.3f}, found {found:.3f} of {runs}")
    assert expected > 0.1 and found > expected - 0.03 - spread(float(expected), runs), "no more is stated than is found"


@pytest.mark.slow
@pytest.mark.parametrize("runs", [20, pytest.param(2000, marks=pytest.mark.long)])
@pytest.mark.thorough
def test_equal_samples_differ_as_seldom_as_is_stated(runs: int) -> None:
    rng = np.random.default_rng(7)
    fits = [compared(rng, RIGHT, 200) for _ in range(runs)]
    failed = sum(fit.verdict is Verdict.FAIL for fit in fits)
    print(f"compared, right: {failed} of {runs} failed")
    assert failed <= ALPHA * runs + 3 * np.sqrt(ALPHA * runs)


def test_what_a_defect_adds_to_the_estimated_variance_is_known() -> None:
    """By hand: a defect draws each of two tokens with probability 1/2 from outside; else every sample scores 0.

    So a sample's score is a step times a binomial number N of tokens; of N, N², N³ and N⁴ the means are 1 to 4.5. The
    variance of N is 1/2, but what estimates it, the mean square around 0, has the mean 1.5.
    """
    others = np.ones((1, len(DEFECTS)))
    others[0, 2] = 0.5
    certain = Node.made(np.array([5]), np.array([1.0]), others)
    drawn = Sampled(np.array([[1, 5, 5]] * 10), np.zeros((10, 3), bool))
    evidence = measure(drawn, lambda prefixes: dict.fromkeys(prefixes, certain), is_exact=False)
    step = OUTSIDE - np.log(SOFT + (1 - SOFT) / 2)
    np.testing.assert_allclose(
        evidence.if_wrong[:, 2], 10 * np.array([1, 1.5, 2.5, 4.5]) * step ** np.arange(1, 5), rtol=1e-9
    )
    assert not evidence.if_right.any() and not np.delete(evidence.if_wrong, 2, axis=1).any()
    stated = {}
    for samples in (15, 30, 60):
        many = replace(drawn, tokens=np.array([[1, 5, 5]] * samples), bonus=np.zeros((samples, 3), bool), drafts=1)
        pair = measure(many, lambda prefixes: dict.fromkeys(prefixes, certain), is_exact=False)
        stated[samples] = compared_fit(ARM, [(pair, pair)], [many], [(1.0, 1)]).powers[2].everywhere
    assert stated == pytest.approx({15: found_by_hand(15), 30: found_by_hand(30), 60: found_by_hand(60)}, abs=0.1)


def found_by_hand(samples: int) -> float:
    """P(sum of N > limit * root of the sum of N²), for N the sum of two fair coins, by 20,000 draws."""
    number = np.random.default_rng(0).binomial(2, 0.5, (20_000, samples))
    limit = norm.isf(ALPHA / 2 / (2 * len(DEFECTS)))
    return float((number.sum(1) > limit * np.sqrt((number**2).sum(1))).mean())


def test_a_defect_that_nothing_shows_is_stated_as_blind() -> None:
    """Without a round that accepted all drafts there is no bonus token to look at."""
    place = PLACES[3]
    drawn = place.draw(np.random.default_rng(0), RIGHT, 50)
    none = Sampled(drawn.tokens, np.zeros_like(drawn.bonus), 1, 0)
    fit = exact_fit(ARM, [measure(none, place)], [none])
    assert fit.verdict is Verdict.PASS and fit.powers[BONUS].everywhere == 0.0


def test_a_token_outside_the_support_fails() -> None:
    place = PLACES[0]
    drawn = place.draw(np.random.default_rng(0), RIGHT, 50)
    may_follow = place.node(tuple(drawn.tokens[7, :-1].tolist())).ids
    drawn.tokens[7, -1] = next(i for i in range(VOCABULARY) if i not in may_follow)
    fit = exact_fit(ARM, [measure(drawn, place)], [drawn])
    assert fit.impossible == 1 and fit.verdict is Verdict.FAIL


def test_what_only_the_first_token_shows_is_not_tested() -> None:
    """The first token comes from the prompt's forward pass: no draft had a part in it."""
    certain = Node.made(np.array([5]), np.array([1.0]), np.ones((1, len(DEFECTS))))
    drawn = Sampled(np.array([[0, 5]] * 30 + [[1, 5]] * 30), np.zeros((60, 2), bool), 60, 60)
    evidence: Evidence = measure(drawn, lambda prefixes: dict.fromkeys(prefixes, certain))
    assert evidence.degrees == 0 and exact_fit(ARM, [evidence], [drawn]).verdict is Verdict.NOT_TESTED


def test_no_verified_draft_is_not_tested() -> None:
    place = PLACES[0]
    drawn = place.draw(np.random.default_rng(0), RIGHT, 50)
    undrafted = Sampled(drawn.tokens, drawn.bonus)
    assert exact_fit(ARM, [measure(drawn, place)], [undrafted]).verdict is Verdict.NOT_TESTED


def test_rare_cells_are_pooled() -> None:
    expected = np.array([990.0, 4.0, 4.0, 2.0])
    assert chi_square(np.array([990, 4, 4, 2]), expected) == (pytest.approx(0.0), 1)
    assert chi_square(np.array([7]), np.array([7.0])) == (0.0, 0)


def test_two_samples_by_hand() -> None:
    """After token 1: 30 and 10 against 10 and 30, so chi-square 4 x 10²/20; what few samples have does not count."""
    left = np.array([[1, 5]] * 30 + [[1, 6]] * 10 + [[2, 5]])
    right = np.array([[1, 5]] * 10 + [[1, 6]] * 30 + [[2, 7]])
    sides = (Sampled(side, np.zeros(side.shape, bool)) for side in (left, right))
    assert homogeneity(*sides) == (pytest.approx(20.0), 1)


def test_places_where_rounding_decides_are_left_out() -> None:
    """Two tokens at the edge of top-k with the same logit."""
    logits = torch.tensor([3.0, 2.0, 2.0 - 1e-6, 0.0]).double()
    assert not Node.of(logits, 0, Sampling(top_k=2)).clear and Node.of(logits, 0, Sampling(top_k=1)).clear
    assert not Node.of(logits, 0, Sampling(top_k=0, top_p=float(logits.softmax(-1)[0]) + 1e-6)).clear
