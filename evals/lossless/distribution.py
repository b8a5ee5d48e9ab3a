"""Sampled answers must have the target's distribution: sampled and judged, with what the test could have found.

Every token after the first is compared with the exact distribution that follows its prefix (`evidence.py`), which is
replayed by transformers alone; the first comes from the prompt's forward pass, without drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from evals.data.datasets import Question
from evals.lossless.evidence import DEFECTS, Evidence, Node, Nodes, Sampled, Sampling, Tokens, homogeneity, measure
from evals.lossless.greedy import Replay
from evals.lossless.places import WINDOW, Place, Search, search, trials
from evals.lossless.verdicts import ALPHA, POWER, ConfigurationFit, compared_fit, exact_fit
from evals.runs.conversations import Asking, Configuration, Model, Worker, prompt_of, question_seed
from specdec.requests.sampling import SamplingParams

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


@dataclass(frozen=True)
class Spot:
    """A place and how it is sampled there, in the trial named `trial`."""

    trial: str
    sampling: Sampling
    place: Place

    def __str__(self) -> str:
        return f"{self.place} ({self.trial})"


@dataclass(frozen=True)
class Tested:
    """The places that were sampled, in the order of `Power.places`, and the test of every configuration there.

    Both are empty when the search found no place.
    """

    search: Search
    spots: tuple[Spot, ...]
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
    samples: int = Sampling.samples
    places: int = 2

    def __call__(self, worker: Worker) -> Tested:
        """Test every configuration. The first one is the target alone."""
        model = worker.models[self.arms[0].model]
        replay = Replay.of(model)
        wanted = trials(self.samples, max(arm.k for arm in self.arms))
        found = search(lambda some: self._answer(model, some), replay, self.questions, self.places, wanted)
        spots = tuple(Spot(one.trial.name, one.sampling, place) for one in found.chosen for place in one.places)
        if not spots:
            return Tested(found, (), [])
        nodes = [NodesAt(replay, spot.place.prompt, spot.sampling) for spot in spots]
        if model.hf_model.dtype in (torch.float32, torch.float64):
            return Tested(found, spots, self._against_exact(worker, spots, nodes))
        return Tested(found, spots, self._against_baseline(worker, spots, nodes))

    def _answer(self, model: Any, questions: Sequence[Question]) -> list[tuple[Question, list[int], list[int]]]:
        """Greedy answers of the target alone; a question that leaves no room for one is left out."""
        most = min(self.asking.params.max_new_tokens, WINDOW)
        params = replace(self.asking.params, temperature=0.0, num_speculative_tokens=0, max_new_tokens=most)
        room = model.config.max_model_len - most - 2 * (max(arm.k for arm in self.arms) + 2)
        asked = [(question, prompt_of(model.tokenizer, question, self.asking)) for question in questions]
        asked = [(question, prompt) for question, prompt in asked if len(prompt) <= room]
        if not asked:
            return []
        done = model.generate([prompt for _, prompt in asked], params)
        return [(question, prompt, c.token_ids) for (question, prompt), c in zip(asked, done, strict=True)]

    def _against_exact(self, worker: Worker, spots: Sequence[Spot], nodes: Sequence[Nodes]) -> list[ConfigurationFit]:
        found = []
        for arm in self.arms:
            drawn = self._draw(worker, arm, spots, self.samples if arm.k else CONTROL)
            evidence = [measure(one, known) for one, known in zip(drawn, nodes, strict=True)]
            found.append(exact_fit(arm, evidence, drawn))
        return found

    def _against_baseline(
        self, worker: Worker, spots: Sequence[Spot], nodes: Sequence[Nodes]
    ) -> list[ConfigurationFit]:
        baseline = self._draw(worker, self.arms[0], spots, self.samples)
        evidence = [measure(one, known, is_exact=False) for one, known in zip(baseline, nodes, strict=True)]
        return [
            against(arm, baseline, evidence, self._draw(worker, arm, spots, self.samples), nodes)
            for arm in self.arms[1:]
        ]

    def _draw(self, worker: Worker, arm: Configuration, spots: Sequence[Spot], most: int) -> list[Sampled]:
        model, seed = worker.models[arm.model], self.asking.seed
        return [
            sample(
                model,
                spot.place.prompt,
                arm,
                replace(spot.sampling, samples=min(spot.sampling.samples, most)),
                f"{seed}/{spot.trial}/{spot.place}",
            )
            for spot in spots
        ]


def against(
    arm: Configuration,
    baseline: Sequence[Sampled],
    evidence: Sequence[Evidence],
    drawn: Sequence[Sampled],
    nodes: Sequence[Nodes],
) -> ConfigurationFit:
    """The test of one configuration against samples of the target alone and their evidence, place by place."""
    own = [measure(one, known, is_exact=False) for one, known in zip(drawn, nodes, strict=True)]
    chi = [homogeneity(left, right) for left, right in zip(baseline, drawn, strict=True)]
    return compared_fit(arm, list(zip(evidence, own, strict=True)), drawn, chi)


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


def sample(model: Model, prompt: Sequence[int], arm: Configuration, sampling: Sampling, name: str) -> Sampled:
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
