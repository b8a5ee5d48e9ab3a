"""Where sampled answers can be tested at all: places in the text at which the target hesitates.

A trained model is all but certain of most tokens. Where one token has the whole probability every rule of acceptance
gives that token, so that a sample there shows nothing. The search reads the target's own greedy answers, looks at the
filtered distribution of every token of them, and starts the samples right before tokens that are open. The first token
of a sample comes from the prompt's forward pass, without drafts; so only openness of the tokens after it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from evals.data.datasets import Question

LEAST_EXPECTED = 5.0
TEMPERATURES = (1.0, 2.0, 4.0)
WINDOW = 64
"""Tokens of a greedy answer that are looked at."""
_MOST_QUESTIONS, _CHUNK = 64, 8


class ScoresText(Protocol):
    """The target in higher precision, see `evals.lossless.replay.Replay`."""

    def all_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits after every one of `token_ids`: [T, V]."""


@dataclass(frozen=True)
class Sampling:
    """How the test samples.

    Attributes:
        samples: per prompt and configuration. tokens: first tokens in a cell.
        top_k, temperature, top_p: of the sampling.
    """

    samples: int = 1000
    tokens: int = 3
    top_k: int = 3
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True)
class Place:
    """A prompt to sample from.

    Attributes:
        question_id: of which question; position: tokens of the greedy answer that belong to the prompt.
        prompt: token ids. openness: expected samples that leave the most probable path at a drafted token.
    """

    question_id: str
    position: int
    prompt: tuple[int, ...]
    openness: float


@dataclass(frozen=True)
class Search:
    """What the search found.

    Attributes:
        places: the chosen ones, at most as many as were wanted. temperature: at which they are open.
        questions, positions: how many were read; open_positions: tokens whose second most probable candidate
            has at least LEAST_EXPECTED expected samples.
    """

    places: tuple[Place, ...]
    temperature: float
    questions: int
    positions: int
    open_positions: int

    def __str__(self) -> str:
        return (
            f"{self.open_positions} of {self.positions} tokens of {self.questions} greedy answers are open at "
            f"temperature {self.temperature:g}"
        )


@dataclass(frozen=True)
class _Text:
    """One greedy answer: what the target said after every token. logits: [new tokens, V]."""

    question_id: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    logits: torch.Tensor


Answer = Callable[[Sequence[Question]], Sequence[tuple[Question, Sequence[int], Sequence[int]]]]
"""Questions -> (question, prompt ids, ids of the greedy answer), those whose prompt is too long left out."""


def search(
    answer: Answer, scores: ScoresText, questions: Sequence[Question], sampling: Sampling, wanted: int
) -> Search:
    """Find `wanted` open places, of different questions where there are such.

    Questions are read until there are enough, at most _MOST_QUESTIONS. Where none is open at temperature 1, the next of
    TEMPERATURES is tried on the same texts: acceptance must be right at every temperature.
    """
    texts: list[_Text] = []
    for start in range(0, min(len(questions), _MOST_QUESTIONS), _CHUNK):
        texts += _read(answer, scores, questions[start : start + _CHUNK])
        if len({place.question_id for place in _all_places(texts, sampling, TEMPERATURES[0])}) >= wanted:
            break
    found = [_search_at(texts, sampling, temperature, wanted) for temperature in TEMPERATURES]
    enough = next((one for one in found if len(one.places) >= wanted), None)
    return enough or max(found, key=lambda one: len(one.places))


def _read(answer: Answer, scores: ScoresText, questions: Sequence[Question]) -> list[_Text]:
    texts = []
    for question, prompt, new in answer(questions):
        new = list(new)[:WINDOW]
        logits = scores.all_logits([*prompt, *new])[len(prompt) - 1 : -1]
        texts.append(_Text(question.id, tuple(prompt), tuple(new), logits))
    return texts


def _search_at(texts: Sequence[_Text], sampling: Sampling, temperature: float, wanted: int) -> Search:
    places = sorted(_all_places(texts, sampling, temperature), key=lambda place: -place.openness)
    best: dict[str, Place] = {}
    for place in places:
        best.setdefault(place.question_id, place)
    chosen = [*best.values(), *(place for place in places if place is not best[place.question_id])][:wanted]
    is_open = [_seconds(text, sampling, temperature) * sampling.samples >= LEAST_EXPECTED for text in texts]
    return Search(
        tuple(chosen), temperature, len(texts), sum(len(t.answer) for t in texts), sum(int(o.sum()) for o in is_open)
    )


def _all_places(texts: Sequence[_Text], sampling: Sampling, temperature: float) -> list[Place]:
    return [place for text in texts for place in _places(text, sampling, temperature)]


def _places(text: _Text, sampling: Sampling, temperature: float) -> list[Place]:
    """Starts from which an open token is reached, with drafts before it, often enough."""
    second = _seconds(text, sampling, temperature)
    greedy = 1.0 - second  # at most: a third candidate may have some of it
    found = []
    for start in range(len(text.answer)):
        reached, openness = 1.0, 0.0
        for place in range(start, min(start + sampling.tokens, len(text.answer))):
            if place > start:
                openness = max(openness, reached * float(second[place]) * sampling.samples)
            reached *= float(greedy[place])
        if openness >= 2 * LEAST_EXPECTED:
            found.append(Place(text.question_id, start, (*text.prompt, *text.answer[:start]), openness))
    return found


def _seconds(text: _Text, sampling: Sampling, temperature: float) -> torch.Tensor:
    """[new tokens] probability of the second candidate of each token under the test's sampling."""
    if not len(text.answer):
        return torch.zeros(0)
    probs = kept(text.logits, replace(sampling, temperature=temperature))
    return probs.topk(2).values[:, 1] if probs.shape[-1] > 1 else torch.zeros(len(text.answer))


def kept(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Exact probabilities [..., V] of the next token under the test's sampling, in the dtype of the logits.

    Written apart from the library's own filters, which it judges.

    >>> kept(torch.tensor([0.0, 2.0, 1.0, -9.0]).double(), Sampling(top_k=3, top_p=0.9)).round(decimals=2).tolist()
    [0.0, 0.73, 0.27, 0.0]
    """
    ordered, token_ids = (logits / sampling.temperature).sort(descending=True, stable=True)
    k = min(sampling.top_k, logits.shape[-1])
    ordered = ordered.masked_fill(ordered < ordered[..., k - 1 : k], -torch.inf)
    probs = ordered.softmax(-1)
    above = probs.cumsum(-1) - probs  # of all more probable tokens; the token that crosses top_p stays
    probs = probs.masked_fill((above >= sampling.top_p) & (above > 0), 0.0)
    return torch.zeros_like(probs).scatter(-1, token_ids, probs / probs.sum(-1, keepdim=True))
