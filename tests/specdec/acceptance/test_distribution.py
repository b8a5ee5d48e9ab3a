"""Sampled generation has the target's distribution: chi-square over the joint distribution of the first three tokens.

Six tokens in the vocabulary, so 216 outcomes; their exact probabilities come from transformers' forward and warpers on
every prefix. K = 3 and four tokens beside the first, so that the tokens judged come out of speculation. The same test
catches three wrong rules that are planted.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import check_mode, random_prompts, table_head, tiny_llama, wrap
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import specdec.acceptance.judge
from specdec.acceptance.accept import SampledInputs, VerificationResult, accept_sampled
from specdec.requests.sampling import SamplingParams
from specdec.requests.target_probs import draw

VOCAB = 6
PROMPT = random_prompts([7], seed=1, vocab_size=VOCAB)[0]
SAMPLES = 2000
MODEL = {"vocab_size": VOCAB, "seed": 3, "context": 0.1}
PLAIN = SamplingParams(max_new_tokens=5, temperature=1.5)
VARIANTS = {
    "temperature": PLAIN,
    "low temperature": replace(PLAIN, temperature=0.6),
    "top-k": replace(PLAIN, top_k=4),
    "top-p": replace(PLAIN, top_p=0.8),
    "min-p": replace(PLAIN, min_p=0.25),
    "all": replace(PLAIN, temperature=2.0, top_k=5, top_p=0.9, min_p=0.1),
}


@functools.cache
def exact(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every outcome of three tokens, prefix by prefix."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    warpers += [TopKLogitsWarper(params.top_k)] if params.top_k else []
    warpers += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    warpers += [MinPLogitsWarper(params.min_p)] if params.min_p else []
    probability: dict[tuple[int, ...], float] = {(): 1.0}
    for depth in range(3):
        prefixes = list(itertools.product(range(VOCAB), repeat=depth))
        ids = torch.tensor([PROMPT + list(prefix) for prefix in prefixes])
        with torch.no_grad():
            probs = warpers(ids, tiny_llama(**MODEL)(ids).logits[:, -1]).softmax(-1).double()
        for prefix, row in zip(prefixes, probs.tolist(), strict=True):
            probability |= {(*prefix, token): probability[prefix] * p for token, p in enumerate(row)}
    return {outcome: p for outcome, p in probability.items() if len(outcome) == 3}


def p_value(outcomes: Counter[tuple[int, ...]], params: SamplingParams) -> float:
    """Chi-square against the exact probabilities; rare outcomes are pooled, impossible ones decide alone."""
    right = exact(params)
    total = outcomes.total()
    if any(right[outcome] == 0 for outcome in outcomes):
        return 0.0
    common = [o for o, p in right.items() if p * total >= 5]
    observed = np.array([outcomes[o] for o in common] + [total - sum(outcomes[o] for o in common)], float)
    expected = np.array([right[o] * total for o in common] + [total * (1 - sum(right[o] for o in common))])
    if expected[-1] < 5:
        observed = np.append(observed[:-2], observed[-2:].sum())
        expected = np.append(expected[:-2], expected[-2:].sum())
    return float(stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)


def sample(
    params: SamplingParams, known: tuple[int, ...] = (), num_drafts: int = 3, samples: int = SAMPLES
) -> tuple[Counter[tuple[int, ...]], float]:
    """First three tokens of so many requests, and the acceptance length."""
    model = tiny_llama(**MODEL)
    head = table_head(model, disturbance=0.8, known=known)
    wrapped = wrap(
        model,
        head,
        num_speculative_tokens=num_drafts,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        page_size=16,
        kv_cache_tokens=16 * 256,
    )
    with check_mode(False):  # the validators look at every page of 256 rows whenever one ends
        completions = wrapped.generate([PROMPT] * samples, params)
    rounds = [r for c in completions for r in c.stats.rounds]
    tau = sum(r.emitted for r in rounds) / len(rounds)
    return Counter(tuple(c.token_ids[:3]) for c in completions), tau


ONE_FILTER = ("temperature", "low temperature", "top-k", "top-p", "min-p")
"""Left out by `make test`: it has all filters at once, and top-p alone with a reduced vocabulary."""


@pytest.mark.slow
@pytest.mark.parametrize("variant", [pytest.param(v, marks=[pytest.mark.long] * (v in ONE_FILTER)) for v in VARIANTS])
def test_the_joint_distribution_is_the_targets(variant: str) -> None:
    outcomes, tau = sample(VARIANTS[variant])
    assert p_value(outcomes, VARIANTS[variant]) > 1e-3
    assert tau > 1.3, "speculation must have decided something"


@pytest.mark.slow
@pytest.mark.parametrize(
    "params", [pytest.param(PLAIN, marks=pytest.mark.long), VARIANTS["top-p"]], ids=["plain", "top-p"]
)
@pytest.mark.thorough
def test_a_reduced_draft_vocabulary_keeps_the_distribution(params: SamplingParams) -> None:
    outcomes, tau = sample(params, known=(0, 2, 3, 5))
    assert p_value(outcomes, params) > 1e-3
    assert tau > 1.15


@pytest.mark.slow
@pytest.mark.thorough
def test_without_speculation_too() -> None:
    outcomes, tau = sample(PLAIN, num_drafts=0)
    assert p_value(outcomes, PLAIN) > 1e-3
    assert tau == 1.0


Rule = Callable[[torch.Tensor, torch.Tensor, SampledInputs], VerificationResult]


def accept_over_half(drafts: torch.Tensor, n: torch.Tensor, inputs: SampledInputs) -> VerificationResult:
    """Accept when p > q/2, always."""
    if inputs.draft_probs is None:
        return accept_sampled(drafts, n, inputs)
    index = drafts[:, :, None]
    p, q = (t.gather(2, index)[:, :, 0] for t in (inputs.target_probs[:, :-1], inputs.draft_probs))
    return accept_sampled(drafts, n, replace(inputs, accept_uniform=torch.where(p > q / 2, -1.0, 2.0)))


def resample_from_p(drafts: torch.Tensor, n: torch.Tensor, inputs: SampledInputs) -> VerificationResult:
    """Resample from p instead of the residual."""
    result = accept_sampled(drafts, n, inputs)
    at = result.num_accepted[:, None, None].expand(-1, 1, inputs.target_probs.shape[2])
    uniform = inputs.next_uniform.gather(1, result.num_accepted[:, None])[:, 0]
    return VerificationResult(result.num_accepted, draw(inputs.target_probs.gather(1, at)[:, 0], uniform))


def same_uniform_twice(drafts: torch.Tensor, n: torch.Tensor, inputs: SampledInputs) -> VerificationResult:
    """Resample with the uniform that rejected the draft."""
    shared = torch.cat([inputs.accept_uniform, inputs.next_uniform[:, -1:]], 1)
    return accept_sampled(drafts, n, replace(inputs, next_uniform=shared))


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    [resample_from_p, *(pytest.param(rule, marks=pytest.mark.long) for rule in (same_uniform_twice, accept_over_half))],
)
@pytest.mark.thorough
def test_a_wrong_rule_is_caught(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specdec.acceptance.judge, "accept_sampled", rule)
    outcomes, _ = sample(PLAIN)
    assert p_value(outcomes, PLAIN) < 1e-4


@pytest.mark.long
def test_drafts_that_do_not_come_from_the_q_they_are_judged_by_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the most probable draft is taken, and judged as if it had been drawn."""
    monkeypatch.setattr(specdec.acceptance.judge, "draw", lambda q, uniform: q.argmax(-1))
    outcomes, _ = sample(PLAIN)
    assert p_value(outcomes, PLAIN) < 1e-4


@pytest.mark.slow
@pytest.mark.thorough
def test_judging_drawn_drafts_as_certain_is_lossless_and_accepts_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given the draft x, accept with p(x), else p without x: that is p, however x was found. It only costs length."""
    _, right = sample(PLAIN, samples=500)
    rule = functools.partial(replace, draft_probs=None)
    monkeypatch.setattr(
        specdec.acceptance.judge, "accept_sampled", lambda d, n, inputs: accept_sampled(d, n, rule(inputs))
    )
    outcomes, tau = sample(PLAIN)
    assert p_value(outcomes, PLAIN) > 1e-3
    assert tau < right - 0.1
