"""Sampled answers must have the target's distribution: where that can be tested, sampled there and judged.

A trained model is nearly certain of most tokens. Where one token has the whole probability every rule of acceptance
gives that token, so that a sample there shows nothing. The search reads the target's own greedy answers and computes
for every token how well a sample there shows a named defect.

Every token after the first is compared with the exact distribution that follows its prefix (`evidence.py`), which is
replayed by transformers alone; the first comes from the prompt's forward pass, without drafts, and does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from evals.data.datasets import Question
from evals.lossless.evidence import (
    DEFECTS,
    Defect,
    Node,
    Nodes,
    Sampled,
    Sampling,
    Tokens,
    homogeneity,
    kept,
    measure,
    softened,
)
from evals.lossless.greedy import Replay
from evals.lossless.verdicts import ALPHA, POWER, ConfigurationFit, compared_fit, exact_fit
from evals.runs.conversations import Asking, Configuration, Worker, prompt_of, question_seed
from specdec.requests.sampling import SamplingParams
from specdec.values import TokenIds

CONTROL = 250
"""Samples of a place that the target alone draws at most against exact probabilities: as a control, not a reference."""
DEFINITION = (
    "Answers are sampled with top-k, top-p, min-p and all three (without penalties), K+2 tokens long, at places where "
    "the target hesitates. float32: every token after the first against the exact distribution after its prefix, "
    "replayed in float64, the target alone as a control; half precision: against samples of the target alone. Two "
    "tests: chi-square over all prefixes, cells with fewer than five expected samples pooled, and likelihood ratios of "
    f"the named defects. A configuration that is right fails with probability {ALPHA:g} at most (half of it from each "
    "test; the likelihood ratios keep it exactly in float32, chi-square and half precision for many samples). Named "
    f"defects: {', '.join(defect.name for defect in DEFECTS)} (the bonus token after K accepted drafts is drawn from "
    f"what is left of p without the last draft). It is blind for a defect found with probability below {POWER:g}. "
    "NOT TESTED: no drafted token was open, or no draft was verified."
)
TEMPERATURES = (1.0, 2.0, 4.0)
WINDOW = 64
"""Tokens of a greedy answer that are looked at."""
ENOUGH = 30.0
"""Expected log likelihood ratio of a trial's places at which the search ends."""
LEAST = 0.5
"""Expected log likelihood ratio below which a place shows nothing."""
MOST_QUESTIONS = 64
"""Questions whose greedy answers are searched at most."""
_CHUNK = 8
_CANDIDATES = 64


@dataclass(frozen=True)
class Trial:
    """One way of sampling, and the defects (`aims`, names of DEFECTS) that its places are chosen for.

    name: shown in tables. sampling: its temperature is set by the search.
    """

    name: str
    sampling: Sampling
    aims: tuple[str, ...]


def trials(samples: int, k: int) -> tuple[Trial, ...]:
    """The trials of the test: each filter with top-k, and all filters together.

    Answers are K + 2 tokens long, so that the bonus token after K accepted drafts is reached. Every trial keeps at most
    _CANDIDATES tokens. Penalties will be one more trial: their samples' prefixes are known where `Node`s are made.
    """
    common = Sampling(samples=samples, tokens=k + 2)
    temperature = ("temperature 10 % too high", "temperature 10 % too low")
    return (
        Trial("top_k", replace(common, top_k=4), temperature),
        Trial("top_p", replace(common, top_k=40, top_p=0.8), ("top_p 0.1 too high", "top_p 0.1 too low")),
        Trial("min_p", replace(common, top_k=40, min_p=0.1), ("min_p twice as large", "min_p half as large")),
        Trial("all filters", replace(common, top_k=20, top_p=0.95, min_p=0.01), ("bonus from the residual",)),
    )


@dataclass(frozen=True)
class Place:
    """A prompt (token ids) to sample from: the first `position` tokens of a question's greedy answer belong to it.

    telling: expected log likelihood ratio of the trial's defects along the greedy answer.
    """

    question_id: str
    position: int
    prompt: TokenIds
    telling: float

    def __str__(self) -> str:
        return f"{self.question_id}/{self.position}"


@dataclass(frozen=True)
class Spot:
    """A place and how it is sampled there, in the trial named `trial`."""

    trial: str
    sampling: Sampling
    place: Place

    def __str__(self) -> str:
        return f"{self.place} ({self.trial})"


@dataclass(frozen=True)
class Search:
    """The result of the search: what it found for each trial in turn, and how many questions and positions it read."""

    spots: tuple[Spot, ...]
    questions: int
    positions: int


@dataclass(frozen=True)
class _Text:
    """One greedy answer, and the target's logits and ids of candidates before every token, [new tokens, candidates]."""

    question_id: str
    prompt: TokenIds
    answer: TokenIds
    logits: Tensor
    ids: Tensor


Answer = Callable[[Sequence[Question]], Sequence[tuple[Question, Sequence[int], Sequence[int]]]]
"""Questions -> (question, prompt ids, ids of the greedy answer), those whose prompt is too long left out."""


def search(
    answer: Answer, scores: Replay, questions: Sequence[Question], wanted: int, trials: Sequence[Trial]
) -> Search:
    """Find `wanted` places for each trial, of different questions where possible.

    Questions are read until every trial has good places at temperature 1, at most MOST_QUESTIONS. For trials without,
    the next of TEMPERATURES are tried on the same texts: acceptance must be right at every temperature.
    """
    texts = []
    for start in range(0, min(len(questions), MOST_QUESTIONS), _CHUNK):
        texts += _read(answer, scores, questions[start : start + _CHUNK])
        temperatures = TEMPERATURES if start else TEMPERATURES[:1]
        if all(_is_content(_chosen(texts, trial, wanted, temperatures), wanted) for trial in trials):
            break
    spots = tuple(spot for trial in trials for spot in _chosen(texts, trial, wanted, TEMPERATURES))
    return Search(spots, len(texts), sum(len(text.answer) for text in texts))


def _is_content(spots: Sequence[Spot], wanted: int) -> bool:
    return len(spots) >= wanted and min(spot.place.telling for spot in spots) >= ENOUGH


def _chosen(texts: Sequence[_Text], trial: Trial, wanted: int, temperatures: Sequence[float]) -> list[Spot]:
    """Places at the first temperature at which they are telling enough, else at the one where they are most telling."""
    found = []
    for temperature in temperatures:
        sampling = replace(trial.sampling, temperature=temperature)
        places = [place for text in texts for place in _places(text, sampling, trial.aims)]
        places.sort(key=lambda place: -place.telling)
        best = {place.question_id: place for place in reversed(places)}
        # of each question its best place first
        places.sort(key=lambda place: place is not best[place.question_id])
        found.append([Spot(trial.name, sampling, place) for place in places[:wanted]])
        if _is_content(found[-1], wanted):
            return found[-1]
    return max(found, key=lambda spots: sum(min(spot.place.telling, ENOUGH) for spot in spots))


def _read(answer: Answer, scores: Replay, questions: Sequence[Question]) -> list[_Text]:
    texts = []
    for question, prompt, new in answer(questions):
        new = list(new)[:WINDOW]
        if not new:
            continue
        logits = scores.all_logits([*prompt, *new])[len(prompt) - 1 : -1]
        best = logits.double().topk(min(_CANDIDATES, logits.shape[-1]))
        texts.append(_Text(question.id, tuple(prompt), tuple(new), best.values, best.indices))
    return texts


def _places(text: _Text, sampling: Sampling, aims: Sequence[str]) -> list[Place]:
    """Starts from which tokens are reached, with drafts before them, that tell of the defects `aims`."""
    probs = kept(text.logits, sampling)
    taken = (text.ids == torch.tensor(text.answer)[:, None]).double()
    path = (probs * taken).sum(-1).numpy()
    ratios = [_ratios(text, probs, sampling, defect) for defect in DEFECTS if defect.name in aims]
    found = []
    for start in range(len(path)):
        window = slice(start, start + sampling.tokens)
        reached = np.cumprod([1.0, *path[window][:-1]])
        told = ((reached[first:] * of_token[window][first:]).sum() * sampling.samples for of_token, first in ratios)
        if (telling := float(min(told, default=0.0))) >= LEAST:
            found.append(Place(text.question_id, start, text.prompt + text.answer[:start], telling))
    return found


def _ratios(text: _Text, probs: Tensor, sampling: Sampling, defect: Defect) -> tuple[ndarray, int]:
    """A sample's log likelihood ratio of a defect at each token, and the first token of an answer that counts."""
    before = torch.tensor([text.prompt[-1], *text.answer[:-1]])
    other = defect.instead(probs, text.logits, (text.ids == before[:, None]).double(), sampling)
    first = 1 if defect.change else sampling.tokens - 1  # only the last token can be the bonus token after all drafts
    inside = probs > 0
    ratio = torch.where(inside, softened(other, probs).clamp(min=1e-12).log(), ENOUGH)
    return (other * ratio).sum(-1).numpy(), first


@dataclass(frozen=True)
class Tested:
    """What the search found, and the test of every configuration there, none where it found no place.

    `Power.places` are in the order of the search's spots.
    """

    search: Search
    fits: list[ConfigurationFit]


@dataclass(frozen=True)
class DistributionTest:
    """The distribution test as work for one worker, whose models are sampled.

    Attributes:
        questions: texts to find places in; samples: per place and configuration; places: how many of each trial.
    """

    questions: tuple[Question, ...]
    arms: tuple[Configuration, ...]
    asking: Asking
    samples: int
    places: int

    def __call__(self, worker: Worker) -> Tested:
        """Test every configuration. The first one is the target alone."""
        model = worker.models[self.arms[0].model]
        replay = Replay.of(model)
        wanted = trials(self.samples, max(arm.k for arm in self.arms))
        found = search(lambda some: self._answer(model, some), replay, self.questions, self.places, wanted)
        if not found.spots:
            return Tested(found, [])
        nodes = [NodesAt(replay, spot.place.prompt, spot.sampling) for spot in found.spots]
        if model.hf_model.dtype in (torch.float32, torch.float64):
            return Tested(found, [self._exact_fit(worker, arm, found.spots, nodes) for arm in self.arms])
        baseline = self._draw(worker, self.arms[0], found.spots, self.samples)
        drawn = ((arm, self._draw(worker, arm, found.spots, self.samples)) for arm in self.arms[1:])
        return Tested(found, [against(arm, baseline, own, nodes) for arm, own in drawn])

    def _answer(self, model: Any, questions: Sequence[Question]) -> list[tuple[Question, list[int], list[int]]]:
        """Greedy answers of the target alone; a question that leaves no room for one is left out."""
        most = min(self.asking.params.max_new_tokens, WINDOW)
        params = replace(self.asking.params, temperature=0.0, num_speculative_tokens=0, max_new_tokens=most)
        room = model.config.max_model_len - most - 2 * (max(arm.k for arm in self.arms) + 2)
        asked = [(question, prompt_of(model.tokenizer, question, self.asking)) for question in questions]
        asked = [(question, prompt) for question, prompt in asked if len(prompt) <= room]
        done = model.generate([prompt for _, prompt in asked], params) if asked else []
        return [(question, prompt, c.token_ids) for (question, prompt), c in zip(asked, done, strict=True)]

    def _exact_fit(
        self, worker: Worker, arm: Configuration, spots: Sequence[Spot], nodes: Sequence[Nodes]
    ) -> ConfigurationFit:
        drawn = self._draw(worker, arm, spots, self.samples if arm.k else CONTROL)
        return exact_fit(arm, [measure(one, known) for one, known in zip(drawn, nodes, strict=True)], drawn)

    def _draw(self, worker: Worker, arm: Configuration, spots: Sequence[Spot], most: int) -> list[Sampled]:
        model = worker.models[arm.model]
        drawn = []
        for spot in spots:
            sampling = replace(spot.sampling, samples=min(spot.sampling.samples, most))
            name = f"{self.asking.seed}/{spot.trial}/{spot.place}"
            drawn.append(sample(model, spot.place.prompt, arm, sampling, name))
        return drawn


def against(
    arm: Configuration, baseline: Sequence[Sampled], drawn: Sequence[Sampled], nodes: Sequence[Nodes]
) -> ConfigurationFit:
    """The test of one configuration against samples of the target alone, place by place."""
    pairs = []
    chi = []
    for alone, own, known in zip(baseline, drawn, nodes, strict=True):
        pairs.append((measure(alone, known, is_exact=False), measure(own, known, is_exact=False)))
        chi.append(homogeneity(alone, own))
    return compared_fit(arm, pairs, drawn, chi)


@dataclass(frozen=True)
class NodesAt:
    """The nodes of one place, each replayed once. Penalties would be applied here, where whole prefixes are known."""

    replay: Replay
    prompt: Tokens
    sampling: Sampling
    known: dict[Tokens, Node] = field(default_factory=dict)

    def __call__(self, prefixes: Sequence[Tokens]) -> Mapping[Tokens, Node]:
        """The nodes of `prefixes`, which follow the prompt."""
        missing = {prefix for prefix in prefixes if prefix not in self.known}
        begun = {prefix[:length] for prefix in missing for length in range(1, len(prefix))}
        whole = sorted(missing - begun, key=lambda text: (len(text), text))
        for text, logits in self.replay.logits_after(self.prompt, whole):
            for length in range(1, len(text) + 1):
                prefix = text[:length]
                if prefix in missing and prefix not in self.known:
                    self.known[prefix] = Node.of(logits[length - 1], prefix[-1], self.sampling)
        return self.known


def sample(model: Any, prompt: Sequence[int], arm: Configuration, sampling: Sampling, name: str) -> Sampled:
    """The first tokens of `sampling.samples` answers to one prompt. Configurations draw from different seeds.

    The answers share the pages of their prompt: what is tested is the rounds that follow it.
    """
    params = SamplingParams(
        max_new_tokens=max(sampling.tokens, arm.k + 2),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        ignore_eos=True,
        num_speculative_tokens=arm.k,
    )
    each = [replace(params, seed=question_seed(arm.k, name, i)) for i in range(sampling.samples)]
    completions = model.generate([list(prompt)] * sampling.samples, each)
    rounds = [completion.stats.rounds for completion in completions]
    return Sampled(
        np.array([completion.token_ids[: sampling.tokens] for completion in completions]),
        np.array([_bonus(of_one, arm.k, sampling.tokens) for of_one in rounds]),
        sum(record.drafted for of_one in rounds for record in of_one),
        sum(record.accepted for of_one in rounds for record in of_one),
    )


def _bonus(rounds: Sequence[Any], k: int, tokens: int) -> list[bool]:
    """Which of the first tokens are the bonus token of a round that accepted all K drafts."""
    found = [False] * tokens
    found[-1] = k == 0  # of the target alone: where others can have one
    place = 1
    for record in rounds:
        place += record.emitted
        if k and record.accepted == record.drafted == k and record.emitted == k + 1 and place <= tokens:
            found[place - 1] = True
    return found
