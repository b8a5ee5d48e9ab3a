"""How the distribution test samples: which parameters, how many tokens, and which of them are bonus tokens."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from evals.lossless.distribution import sample, search, trials
from evals.lossless.evidence import DEFECTS, Node, Sampling, kept, measure
from evals.lossless.verdicts import exact_fit
from evals.runs.conversations import Configuration
from evals.runs.verdict import Verdict
from specdec.requests.sampling import SamplingArrays, SamplingParams, SamplingTensors
from specdec.requests.stats import RoundRecord
from specdec.requests.target_probs import target_probs

pytest.importorskip("scipy")

PROBS = {10: 0.6, 11: 0.3, 12: 0.1}
K = 2
SAMPLING = Sampling(samples=2000, tokens=K + 2)


class SampledModel:
    """Samples tokens with PROBS; `rule` says how a token after the first is drawn. Rounds accept all their drafts."""

    def __init__(self, rule: Any) -> None:
        self.asked: list[SamplingParams] = []
        self._rule = rule

    def generate(self, prompts: Any, params: Any) -> list[Any]:
        self.asked += params
        done = []
        for one in params:
            rng = random.Random(one.seed)
            first = rng.choices(list(PROBS), list(PROBS.values()))[0]
            rest = [self._rule(rng) for _ in range(one.max_new_tokens - 1)]
            k = one.num_speculative_tokens
            stats = SimpleNamespace(rounds=(RoundRecord(k, k, k + 1),) if k else ())
            done.append(SimpleNamespace(token_ids=[first, *rest], stats=stats))
        return done


def right(rng: random.Random) -> int:
    """Speculative sampling with a uniform draft, done right."""
    draft = rng.choice(list(PROBS))
    if rng.random() < min(1.0, PROBS[draft] * 3):
        return draft
    left = {token: max(p - 1 / 3, 0.0) for token, p in PROBS.items()}
    return rng.choices(list(left), list(left.values()))[0]


def resamples_from_p(rng: random.Random) -> int:
    """The planted defect, none of the named ones: after a rejection it draws from p, not from the remainder."""
    draft = rng.choice(list(PROBS))
    if rng.random() < min(1.0, PROBS[draft] * 3):
        return draft
    return rng.choices(list(PROBS), list(PROBS.values()))[0]


def nodes(prefixes: Any) -> Any:
    ids, probs = np.array(list(PROBS)), np.array(list(PROBS.values()))
    return {prefix: Node.made(ids, probs, np.tile(probs[:, None], len(DEFECTS))) for prefix in prefixes}


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "verdict"), [(right, Verdict.PASS), (resamples_from_p, Verdict.FAIL)])
@pytest.mark.cases(1)
def test_a_wrong_rule_that_has_no_name_is_found_too(rule: Any, verdict: Verdict) -> None:
    drawn = sample(SampledModel(rule), [1], Configuration("k", K), SAMPLING, "a")
    assert exact_fit(Configuration("k", K), [measure(drawn, nodes)], [drawn]).verdict is verdict


def test_answers_reach_the_bonus_token_after_all_drafts() -> None:
    (model, sampling), few = (SampledModel(right), trials(5, K)[3].sampling), Configuration("k", K)
    drawn = sample(model, [1], few, sampling, "a")
    assert drawn.tokens.shape == drawn.bonus.shape == (5, K + 2)
    assert drawn.bonus.tolist() == [[False] * (K + 1) + [True]] * 5
    asked = model.asked[0]
    assert (asked.top_k, asked.top_p, asked.min_p) == (20, 0.95, 0.01) and asked.max_new_tokens == K + 2


def test_a_round_with_fewer_drafts_has_no_bonus_after_k() -> None:
    class Cut(SampledModel):
        def generate(self, prompts: Any, params: Any) -> list[Any]:
            done = super().generate(prompts, params)
            for one in done:
                one.stats = SimpleNamespace(rounds=(RoundRecord(2, 1, 2), RoundRecord(1, 1, 2)))
            return done

    drawn = sample(Cut(right), [1], Configuration("k", K), Sampling(samples=3, tokens=5), "a")
    assert not drawn.bonus.any() and (drawn.drafts, drawn.accepted) == (9, 6)


@pytest.mark.parametrize("trial", trials(1, K), ids=lambda trial: trial.name)
@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_the_judge_and_the_library_agree_on_what_is_kept(trial: Any, temperature: float) -> None:
    """Two implementations, written apart."""
    own = trial.sampling
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 2, (40, 60)))
    params = SamplingParams(temperature=temperature, top_k=own.top_k, top_p=own.top_p, min_p=own.min_p)
    arrays = SamplingArrays.of([params] * len(logits))
    parts = (torch.from_numpy(part) for part in (arrays.temperature, arrays.top_k, arrays.top_p, arrays.min_p))
    theirs = target_probs(logits.float(), SamplingTensors(*parts, filters=True)).double()
    mine = kept(logits, Sampling(1, 1, own.top_k, temperature, own.top_p, own.min_p))
    torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-6)


def test_places_are_chosen_where_their_defect_shows() -> None:
    """The fourth of six tokens is open; the fifth repeats it, so that a bonus drawn without it shows."""
    answer = [5, 6, 7, 8, 8, 9]
    logits = torch.full((len(answer) + 2, 20), -40.0)
    for at, token in enumerate(answer, 1):
        logits[at, token] = 5.0
    logits[4, 11] = 4.0  # the fourth token of the answer could be another one
    logits[5, 12] = 3.0  # and so, less often, the fifth
    scores = SimpleNamespace(all_logits=lambda ids: logits)
    question = SimpleNamespace(id="q")
    found = search(lambda some: [(question, [1, 2], answer)], scores, [question], 1, trials(1000, K))
    by_name = {spot.trial: spot.place for spot in found.spots}
    assert 0 <= 3 - by_name["top_k"].position <= K + 1
    assert by_name["all filters"].position == 4 - (K + 1)
    assert by_name["top_k"].prompt[:2] == (1, 2)


def test_nothing_open_gives_no_place() -> None:
    logits = torch.full((8, 20), -400.0)
    for at, token in enumerate([5, 6, 7, 8, 4, 9], 1):
        logits[at, token] = 400.0
    scores = SimpleNamespace(all_logits=lambda ids: logits)
    question = SimpleNamespace(id="q")
    found = search(lambda some: [(question, [1, 2], [5, 6, 7, 8, 4, 9])], scores, [question], 1, trials(100, K))
    assert found.spots == ()
