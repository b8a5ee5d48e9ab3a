"""Places in the text at which the target hesitates, the only ones where sampled answers can be tested.

A trained model is nearly certain of most tokens. Where one token has the whole probability every rule of acceptance
gives that token, so that a sample there shows nothing. The search reads the target's own greedy answers and computes
for every token how well a sample there shows a named defect. The first token of a sample comes from the
prompt's forward pass, without drafts; so only the tokens after it count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from evals.data.datasets import Question
from evals.lossless.evidence import DEFECTS, Defect, Sampling, kept, softened
from evals.lossless.greedy import Replay

TEMPERATURES = (1.0, 2.0, 4.0)
WINDOW = 64
"""Tokens of a greedy answer that are looked at."""
ENOUGH = 30.0
"""Expected log likelihood ratio of a trial's places at which the search ends."""
LEAST = 0.5
"""Expected log likelihood ratio below which a place shows nothing."""
_MOST_QUESTIONS, _CHUNK, _CANDIDATES = 64, 8, 64


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
    prompt: tuple[int, ...]
    telling: float

    def __str__(self) -> str:
        return f"{self.question_id}/{self.position}"


@dataclass(frozen=True)
class TrialPlaces:
    """A trial at its temperature, and its places: at most as many as were wanted."""

    trial: Trial
    places: tuple[Place, ...]

    @property
    def sampling(self) -> Sampling:
        """How its places are sampled."""
        return self.trial.sampling


@dataclass(frozen=True)
class Search:
    """The result of the search. chosen: the trials that have places; questions, positions: how many were read."""

    chosen: tuple[TrialPlaces, ...]
    questions: int
    positions: int

    def __str__(self) -> str:
        found = "; ".join(
            f"{one.trial.name}: {len(one.places)} place(s) at temperature {one.sampling.temperature:g}"
            for one in self.chosen
        )
        return f"{self.positions} tokens of {self.questions} greedy answers read; {found or 'no open place'}"


@dataclass(frozen=True)
class _Text:
    """One greedy answer, and the target's logits and ids of candidates before every token, [new tokens, candidates]."""

    question_id: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    logits: torch.Tensor
    ids: torch.Tensor


Answer = Callable[[Sequence[Question]], Sequence[tuple[Question, Sequence[int], Sequence[int]]]]
"""Questions -> (question, prompt ids, ids of the greedy answer), those whose prompt is too long left out."""


def search(
    answer: Answer, scores: Replay, questions: Sequence[Question], wanted: int, trials: Sequence[Trial]
) -> Search:
    """Find `wanted` places for each trial, of different questions where possible.

    Questions are read until every trial has good places at temperature 1, at most _MOST_QUESTIONS. For trials without,
    the
    next of TEMPERATURES are tried on the same texts: acceptance must be right at every temperature.
    """
    texts: list[_Text] = []
    for start in range(0, min(len(questions), _MOST_QUESTIONS), _CHUNK):
        texts += _read(answer, scores, questions[start : start + _CHUNK])
        temperatures = TEMPERATURES if start else TEMPERATURES[:1]
        if all(_content(_chosen(texts, trial, wanted, temperatures), wanted) for trial in trials):
            break
    chosen = (_chosen(texts, trial, wanted) for trial in trials)
    return Search(tuple(one for one in chosen if one.places), len(texts), sum(len(text.answer) for text in texts))


def _content(chosen: TrialPlaces, wanted: int) -> bool:
    return len(chosen.places) >= wanted and min(place.telling for place in chosen.places) >= ENOUGH


def _chosen(
    texts: Sequence[_Text], trial: Trial, wanted: int, temperatures: Sequence[float] = TEMPERATURES
) -> TrialPlaces:
    """The trial at the first temperature whose places are telling enough, else at the most telling one."""
    found = [_choose(texts, trial, temperature, wanted) for temperature in temperatures]
    enough = next((one for one in found if _content(one, wanted)), None)
    return enough or max(found, key=lambda one: sum(min(place.telling, ENOUGH) for place in one.places))


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


def _choose(texts: Sequence[_Text], trial: Trial, temperature: float, wanted: int) -> TrialPlaces:
    warm = replace(trial, sampling=replace(trial.sampling, temperature=temperature))
    places = sorted((place for text in texts for place in _places(text, warm)), key=lambda place: -place.telling)
    best: dict[str, Place] = {}
    for place in places:
        best.setdefault(place.question_id, place)
    others = (place for place in places if place is not best[place.question_id])
    return TrialPlaces(warm, tuple([*best.values(), *others][:wanted]))


def _places(text: _Text, trial: Trial) -> list[Place]:
    """Starts from which telling tokens are reached, with drafts before them."""
    sampling = trial.sampling
    probs = kept(text.logits, sampling)
    taken = (text.ids == torch.tensor(text.answer)[:, None]).double()
    path = (probs * taken).sum(-1).tolist()
    aims = [_told(text, probs, sampling, defect) for defect in DEFECTS if defect.name in trial.aims]
    found = []
    for start in range(len(path)):
        last = min(start + sampling.tokens, len(path))
        told = []
        for of_token, is_bonus in aims:
            reached, total = 1.0, 0.0
            for at in range(start, last):
                if at - start == sampling.tokens - 1 or (at > start and not is_bonus):
                    total += reached * of_token[at] * sampling.samples
                reached *= path[at]
            told.append(total)
        telling = min(told, default=0.0)
        if telling >= LEAST:
            found.append(Place(text.question_id, start, (*text.prompt, *text.answer[:start]), telling))
    return found


def _told(text: _Text, probs: torch.Tensor, sampling: Sampling, defect: Defect) -> tuple[list[float], bool]:
    """A sample's log likelihood ratio of a defect at each token; and whether only bonus tokens count."""
    is_bonus = defect.change is None
    if is_bonus:
        before = torch.tensor([text.prompt[-1], *text.answer[:-1]])
        other = defect.residual(probs, (text.ids == before[:, None]).double())
    else:
        other = kept(text.logits, defect.changed(sampling))
    inside = probs > 0
    ratio = torch.where(inside, softened(other, probs).clamp(min=1e-12).log(), 0.0)
    told = (other * ratio).sum(-1) + torch.where(inside, 0.0, other).sum(-1) * ENOUGH
    return told.tolist(), is_bonus
