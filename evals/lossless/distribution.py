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
from evals.runs.runner import Arm, Asking, Model, question_seed
from evals.runs.worker import Worker
from specdec.requests.sampling import SamplingParams

ALPHA = 1e-3
POWER = 0.99
_LEAST_EXPECTED = 5.0
DEFINITION = (
    "Chi-square test of the joint distribution of the first tokens under top-k sampling, summed over the prompts. "
    "float32: against the exact probabilities of a float64 replay, the target alone as a control; half precision: "
    "against samples of the target alone. Cells with fewer than five expected samples are pooled. It fails below "
    f"p = {ALPHA:g}. The stated distance is the total variation that is found with probability {POWER:g}."
)

Tokens = tuple[int, ...]
NextProbabilities = Callable[[Sequence[int]], Mapping[int, float]]


@dataclass(frozen=True)
class Sampling:
    """How the test samples.

    Attributes:
        samples: a prompt and arm. tokens: how many first tokens make a cell. top_k, temperature: of the sampling.
    """

    samples: int = 1000
    tokens: int = 3
    top_k: int = 3
    temperature: float = 1.0


@dataclass(frozen=True)
class Fit:
    """One chi-square statistic: `impossible` counts samples in cells whose probability is zero."""

    statistic: float
    degrees: int
    impossible: int


@dataclass(frozen=True)
class ArmFit:
    """The test of one arm over all prompts.

    Attributes:
        detectable: total variation distance that this many samples find with probability POWER.
    """

    arm: str
    k: int
    prompts: int
    samples: int
    statistic: float
    degrees: int
    impossible: int
    p_value: float
    detectable: float
    passed: bool


@dataclass(frozen=True)
class DistributionTest:
    """The test as work for one worker: its models are sampled there."""

    questions: tuple[Question, ...]
    arms: tuple[Arm, ...]
    asking: Asking
    sampling: Sampling

    def __call__(self, worker: Worker) -> list[ArmFit]:
        """Test every arm. The first one is the target alone."""
        import torch

        model = worker.models[self.arms[0].model]
        if model.hf_model.dtype in (torch.float32, torch.float64):
            return self._against_exact(worker, _replayed(model, self.sampling))
        return self._against_baseline(worker)

    def _against_exact(self, worker: Worker, next_probabilities: NextProbabilities) -> list[ArmFit]:
        model = worker.models[self.arms[0].model]
        prompts = [_first_prompt(model, question, self.asking) for question in self.questions]
        exact = [exact_joint(next_probabilities, prompt, self.sampling.tokens) for prompt in prompts]
        found = []
        for arm in self.arms:
            pairs = zip(self._counts(worker, arm), exact, strict=True)
            fits = [goodness_of_fit(counts, probabilities) for counts, probabilities in pairs]
            found.append(_combined(arm, self.sampling.samples, fits))
        return found

    def _against_baseline(self, worker: Worker) -> list[ArmFit]:
        baseline = self._counts(worker, self.arms[0])
        found = []
        for arm in self.arms[1:]:
            fits = [homogeneity(a, b) for a, b in zip(baseline, self._counts(worker, arm), strict=True)]
            found.append(_combined(arm, self.sampling.samples // 2, fits))  # two samples tell half as much as one
        return found

    def _counts(self, worker: Worker, arm: Arm) -> list[Counter[Tokens]]:
        model = worker.models[arm.model]
        counts = []
        for question in self.questions:
            prompt = _first_prompt(model, question, self.asking)
            counts.append(sample(model, prompt, arm, self.sampling, f"{self.asking.seed}/{question.id}"))
        return counts


def sample(model: Model, prompt: list[int], arm: Arm, sampling: Sampling, name: str) -> Counter[Tokens]:
    """Counts of the first tokens of `sampling.samples` answers to one prompt. Arms draw from different seeds."""
    params = SamplingParams(
        max_new_tokens=sampling.tokens + max(arm.k, 1),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        ignore_eos=True,
        num_speculative_tokens=arm.k,
    )
    each = [replace(params, seed=question_seed(arm.k, name, i)) for i in range(sampling.samples)]
    completions = model.generate([prompt] * sampling.samples, each)
    return Counter(tuple(completion.token_ids[: sampling.tokens]) for completion in completions)


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
    observed, expected = _pooled(observed, expected)
    return Fit(float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1, impossible)


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
    return Fit(statistic, degrees, 0)


def _pooled(observed: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Put the cells with small expectation into one. Cells come by falling expectation."""
    large = int((expected >= _LEAST_EXPECTED).sum())
    if large == len(expected):
        return observed, expected
    if expected[large:].sum() < _LEAST_EXPECTED:
        large = max(large - 1, 0)
    return (
        np.append(observed[:large], observed[large:].sum()),
        np.append(expected[:large], expected[large:].sum()),
    )


def _combined(arm: Arm, samples: int, fits: Sequence[Fit]) -> ArmFit:
    """One test of all prompts. samples: a prompt, or what two samples of it are worth."""
    require("scipy", "eval")
    from scipy.stats import chi2

    statistic, degrees = sum(fit.statistic for fit in fits), sum(fit.degrees for fit in fits)
    impossible = sum(fit.impossible for fit in fits)
    p_value = float(chi2.sf(statistic, degrees)) if degrees else 1.0
    return ArmFit(
        arm=arm.name,
        k=arm.k,
        prompts=len(fits),
        samples=samples * len(fits),
        statistic=statistic,
        degrees=degrees,
        impossible=impossible,
        p_value=p_value,
        detectable=detectable_distance(samples * len(fits), degrees),
        passed=p_value >= ALPHA and impossible == 0,
    )


def detectable_distance(samples: int, degrees: int) -> float:
    """Total variation distance that the test finds with probability POWER.

    A distance d gives a noncentrality of at least 4·n·d² (Cauchy-Schwarz), whatever cells it lies in.
    """
    from scipy.optimize import brentq
    from scipy.stats import chi2, ncx2

    if degrees < 1:
        return float("nan")
    critical = chi2.isf(ALPHA, degrees)
    noncentrality = brentq(lambda x: ncx2.sf(critical, degrees, x) - POWER, 1e-6, 1e6)
    return float(min(np.sqrt(noncentrality / (4 * samples)), 1.0))


def _replayed(model: Any, sampling: Sampling) -> NextProbabilities:
    from evals.lossless.replay import Replay

    replay = Replay(model.hf_model)

    def next_probabilities(ids: Sequence[int]) -> dict[int, float]:
        logits = replay.logits(ids) / sampling.temperature
        kept = (logits >= logits.topk(sampling.top_k).values[-1]).nonzero()[:, 0]
        return dict(zip(kept.tolist(), logits[kept].softmax(0).tolist(), strict=True))

    return next_probabilities


def _first_prompt(model: Any, question: Question, asking: Asking) -> list[int]:
    messages = [*opening(question, asking.system), {"role": "user", "content": question.turns[0]}]
    return render(model.tokenizer, messages, asking.templated)
