"""Sampled answers must have the target's distribution: a chi-square test of the first tokens, with its power.

Top-k keeps the support small, so the joint distribution of the first tokens has few cells, and its exact probabilities
follow from a replay of the target by transformers alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evals.data.datasets import Question
from evals.data.prompts import opening, render
from evals.errors import require
from evals.lossless.places import LEAST_EXPECTED, WINDOW, Place, Sampling, Search, kept, search
from evals.runs.runner import Asking, Configuration, Model, question_seed
from evals.runs.verdict import Verdict
from evals.runs.worker import Worker
from specdec.requests.sampling import SamplingParams

ALPHA = 1e-3
POWER = 0.99
DEFINITION = (
    "Chi-square test of the joint distribution of the first tokens under top-k sampling, summed over places at which "
    "the target hesitates. float32: against the exact probabilities of a float64 replay, the target alone as a "
    "control; half precision: against samples of the target alone. Cells with fewer than five expected samples are "
    f"pooled. It fails below p = {ALPHA:g}. The stated distance is the total variation that is found with probability "
    f"{POWER:g}. NOT TESTED: no drafted token was open, or no draft was verified."
)

Tokens = tuple[int, ...]
NextProbabilities = Callable[[Sequence[int]], Mapping[int, float]]


@dataclass(frozen=True)
class Fit:
    """One chi-square statistic.

    Attributes:
        impossible: samples in cells whose probability is zero.
        drafted_degrees: degrees of freedom beyond those of the first token, which comes without drafts.
    """

    statistic: float
    degrees: int
    impossible: int
    drafted_degrees: int


@dataclass(frozen=True)
class ConfigurationFit:
    """The test of one configuration over all places.

    Attributes:
        places: with at least one degree of freedom in a drafted token; samples: drawn there.
        drafts, accepted: verified while sampling, and how many were accepted.
        detectable: total variation distance that this many samples find with probability POWER; None: none at all.
        p_value: None without degrees of freedom.
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
    detectable: float | None
    verdict: Verdict


@dataclass(frozen=True)
class Sampled:
    """What the answers to one prompt were. counts: of their first tokens; drafts, accepted: of their rounds."""

    counts: Counter[Tokens]
    drafts: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Tested:
    """Where was sampled, and the test of every configuration there ([] when no place was found)."""

    search: Search
    fits: list[ConfigurationFit]


@dataclass(frozen=True)
class DistributionTest:
    """The test as work for one worker: its models are sampled there.

    Attributes:
        questions: where places are looked for; places: how many are sampled.
    """

    questions: tuple[Question, ...]
    arms: tuple[Configuration, ...]
    asking: Asking
    sampling: Sampling
    places: int = 2

    def __call__(self, worker: Worker) -> Tested:
        """Test every configuration. The first one is the target alone."""
        import torch

        from evals.lossless.replay import Replay

        model = worker.models[self.arms[0].model]
        replay = Replay.of(model)
        found = search(lambda some: self._answer(model, some), replay, self.questions, self.sampling, self.places)
        sampling = replace(self.sampling, temperature=found.temperature)
        if not found.places:
            return Tested(found, [])
        if model.hf_model.dtype in (torch.float32, torch.float64):
            return Tested(
                found, self._against_exact(worker, found.places, sampling, exact_next(replay.logits, sampling))
            )
        return Tested(found, self._against_baseline(worker, found.places, sampling))

    def _answer(self, model: Any, questions: Sequence[Question]) -> list[tuple[Question, list[int], list[int]]]:
        """Greedy answers of the target alone; a question that leaves no room for one is left out."""
        most = min(self.asking.params.max_new_tokens, WINDOW)
        params = replace(self.asking.params, temperature=0.0, num_speculative_tokens=0, max_new_tokens=most)
        room = model.config.max_model_len - most - self.sampling.tokens - max(arm.k for arm in self.arms)
        asked = [(question, _first_prompt(model, question, self.asking)) for question in questions]
        asked = [(question, prompt) for question, prompt in asked if len(prompt) <= room]
        if not asked:
            return []
        done = model.generate([prompt for _, prompt in asked], params)
        return [(question, prompt, c.token_ids) for (question, prompt), c in zip(asked, done, strict=True)]

    def _against_exact(
        self, worker: Worker, places: Sequence[Place], sampling: Sampling, next_probabilities: NextProbabilities
    ) -> list[ConfigurationFit]:
        exact = [exact_joint(next_probabilities, place.prompt, sampling.tokens) for place in places]
        found = []
        for arm in self.arms:
            drawn = self._draw(worker, arm, places, sampling)
            fits = [goodness_of_fit(one.counts, cells) for one, cells in zip(drawn, exact, strict=True)]
            found.append(combined(arm, sampling.samples, fits, drawn))
        return found

    def _against_baseline(self, worker: Worker, places: Sequence[Place], sampling: Sampling) -> list[ConfigurationFit]:
        baseline = self._draw(worker, self.arms[0], places, sampling)
        found = []
        for arm in self.arms[1:]:
            drawn = self._draw(worker, arm, places, sampling)
            fits = [homogeneity(a.counts, b.counts) for a, b in zip(baseline, drawn, strict=True)]
            found.append(combined(arm, sampling.samples // 2, fits, drawn))  # two samples tell half as much as one
        return found

    def _draw(self, worker: Worker, arm: Configuration, places: Sequence[Place], sampling: Sampling) -> list[Sampled]:
        model, seed = worker.models[arm.model], self.asking.seed
        names = [f"{seed}/{place.question_id}/{place.position}" for place in places]
        return [sample(model, p.prompt, arm, sampling, name) for p, name in zip(places, names, strict=True)]


def sample(model: Model, prompt: Sequence[int], arm: Configuration, sampling: Sampling, name: str) -> Sampled:
    """The first tokens of `sampling.samples` answers to one prompt. Configurations draw from different seeds."""
    params = SamplingParams(
        max_new_tokens=sampling.tokens + max(arm.k, 1),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        ignore_eos=True,
        num_speculative_tokens=arm.k,
        cache_prefix=False,  # each sample is a draw of its own, its prompt's logits included
    )
    each = [replace(params, seed=question_seed(arm.k, name, i)) for i in range(sampling.samples)]
    completions = model.generate([list(prompt)] * sampling.samples, each)
    rounds = [record for completion in completions for record in completion.stats.rounds]
    return Sampled(
        Counter(tuple(completion.token_ids[: sampling.tokens]) for completion in completions),
        sum(record.drafted for record in rounds),
        sum(record.accepted for record in rounds),
    )


def exact_joint(next_probabilities: NextProbabilities, prompt: Sequence[int], tokens: int) -> dict[Tokens, float]:
    """Probabilities of every sequence of `tokens` first tokens.

    >>> exact_joint(lambda ids: {7: 0.25, 8: 0.75}, [1], 2)[8, 7]
    0.1875
    """
    cells: dict[Tokens, float] = {(): 1.0}
    for _ in range(tokens):
        cells = {
            (*cell, token): mass * probability
            for cell, mass in cells.items()
            for token, probability in next_probabilities([*prompt, *cell]).items()
        }
    return cells


def goodness_of_fit(counts: Mapping[Tokens, int], exact: Mapping[Tokens, float]) -> Fit:
    """Chi-square of observed counts against exact probabilities, rare cells pooled."""
    total = sum(counts.values())
    impossible = sum(count for cell, count in counts.items() if exact.get(cell, 0.0) == 0.0)
    cells = sorted(exact, key=lambda cell: exact[cell], reverse=True)
    observed = np.array([counts.get(cell, 0) for cell in cells], np.float64)
    expected = total * np.array([exact[cell] for cell in cells])
    drafted = _drafted_degrees(dict(zip(cells, expected.tolist(), strict=True)))
    observed, expected = _pooled(observed, expected)
    return Fit(float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1, impossible, drafted)


def homogeneity(left: Mapping[Tokens, int], right: Mapping[Tokens, int]) -> Fit:
    """Chi-square of two equally large samples against their common distribution, rare cells pooled."""
    cells = sorted({*left, *right}, key=lambda cell: (-left.get(cell, 0) - right.get(cell, 0), cell))
    both = np.array([[side.get(cell, 0) for cell in cells] for side in (left, right)], np.float64)
    common = both.sum(0) / 2
    statistic, degrees = 0.0, 0
    for side in both:
        observed, expected = _pooled(side, common)
        statistic += float(((observed - expected) ** 2 / expected).sum())
        degrees = len(expected) - 1
    return Fit(statistic, degrees, 0, _drafted_degrees(dict(zip(cells, common.tolist(), strict=True))))


def _drafted_degrees(expected: Mapping[Tokens, float]) -> int:
    """Degrees of freedom of the joint distribution that those of its first token do not explain."""
    first: dict[int, float] = {}
    for cell, count in expected.items():
        first[cell[0]] = first.get(cell[0], 0.0) + count
    both = (np.array(sorted(side.values(), reverse=True), np.float64) for side in (expected, first))
    joint, marginal = (len(_pooled(side, side)[1]) - 1 for side in both)
    return max(joint - marginal, 0)


def _pooled(observed: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Put the cells with small expectation into one. Cells come by falling expectation."""
    large = int((expected >= LEAST_EXPECTED).sum())
    if large == len(expected):
        return observed, expected
    if expected[large:].sum() < LEAST_EXPECTED:
        large = max(large - 1, 0)
    return (
        np.append(observed[:large], observed[large:].sum()),
        np.append(expected[:large], expected[large:].sum()),
    )


def combined(arm: Configuration, samples: int, fits: Sequence[Fit], drawn: Sequence[Sampled]) -> ConfigurationFit:
    """One test of all places. samples: a place, or what two samples of it are worth."""
    require("scipy", "eval")
    from scipy.stats import chi2

    telling = [fit for fit in fits if fit.drafted_degrees]
    statistic, degrees = sum(fit.statistic for fit in telling), sum(fit.degrees for fit in telling)
    impossible = sum(fit.impossible for fit in fits)
    drafts, accepted = sum(one.drafts for one in drawn), sum(one.accepted for one in drawn)
    p_value = float(chi2.sf(statistic, degrees)) if degrees else None
    if impossible or (p_value is not None and p_value < ALPHA):
        verdict = Verdict.FAIL
    else:
        verdict = Verdict.NOT_TESTED if p_value is None or (arm.k and not drafts) else Verdict.PASS
    return ConfigurationFit(
        arm=arm.name,
        k=arm.k,
        places=len(telling),
        samples=samples * len(telling),
        drafts=drafts,
        accepted=accepted,
        statistic=statistic,
        degrees=degrees,
        impossible=impossible,
        p_value=p_value,
        detectable=detectable_distance(samples * len(telling), degrees) if degrees else None,
        verdict=verdict,
    )


def detectable_distance(samples: int, degrees: int) -> float:
    """Total variation distance that the test finds with probability POWER. `degrees`: at least 1.

    A distance d gives a noncentrality of at least 4·n·d² (Cauchy-Schwarz), whatever cells it lies in.
    """
    from scipy.optimize import brentq
    from scipy.stats import chi2, ncx2

    critical = chi2.isf(ALPHA, degrees)
    noncentrality = brentq(lambda x: ncx2.sf(critical, degrees, x) - POWER, 1e-6, 1e6)
    return float(min(np.sqrt(noncentrality / (4 * samples)), 1.0))


def exact_next(logits_after: Callable[[Sequence[int]], Any], sampling: Sampling) -> NextProbabilities:
    """Exact probabilities of the next token under the test's sampling. logits_after: ids -> [V]."""

    def next_probabilities(ids: Sequence[int]) -> dict[int, float]:
        probs = kept(logits_after(ids), sampling)
        token_ids = probs.nonzero()[:, 0]
        return dict(zip(token_ids.tolist(), probs[token_ids].tolist(), strict=True))

    return next_probabilities


def _first_prompt(model: Any, question: Question, asking: Asking) -> list[int]:
    messages = [*opening(question, asking.system), {"role": "user", "content": question.turns[0]}]
    return render(model.tokenizer, messages, asking.templated)
