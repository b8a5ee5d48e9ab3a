"""The head check: a head against its target on a few texts, and if it fails, other readings of the head's files.

Only choices that published exporters and engines really make differently, and that `head_overrides` can make.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from drafters.base import FINAL_NORM, Head
from drafters.checkpoints.config_fields import HeadReport
from drafters.eagle3.spec import Eagle3Spec
from specdec.errors import InvalidInputError
from specdec.head_check.measurement import (
    MAX_NEW_TOKENS,
    PROMPTS,
    Chains,
    MapCheck,
    Passage,
    aux_states,
    chains,
    check_map,
    runs_in_chains,
)
from specdec.loading.tokenizers import as_chats
from specdec.model import SpeculativeModel
from specdec.requests.prompts import Prompts
from specdec.requests.sampling import SamplingParams
from specdec.requests.stats import AcceptanceStats, pool_requests
from specdec.wrapped.probing import TargetProbe, probe_target


@runtime_checkable
class Rereadable(Head, Protocol):
    """A head whose tensors can be read by another specification."""

    spec: Eagle3Spec
    checkpoint_report: HeadReport | None

    def reread(self, spec: Eagle3Spec) -> Rereadable:
        """The same tensors under another spec of the same shapes."""


@dataclass(frozen=True)
class Reading:
    """One way to read a head: its spec, and the `head_overrides` that choose it.

    name: what differs from the files as they were read, in words. cause: why they were probably read otherwise.
    """

    name: str
    spec: Eagle3Spec
    overrides: Mapping[str, Any] = field(default_factory=dict)
    cause: str = ""

    def changed(self, name: str, cause: str, overrides: Mapping[str, Any], **changes: Any) -> Reading:
        """This reading with one more change."""
        whole = name if not self.overrides else f"{self.name}, {name}"
        causes = "; ".join(filter(None, (self.cause, cause)))
        return Reading(whole, replace(self.spec, **changes), {**self.overrides, **overrides}, causes)


def as_read(head: Rereadable) -> Reading:
    """The head as its files were read."""
    return Reading("as read", head.spec)


def other_readings(reading: Reading, num_layers: int, rope_theta: float | None) -> tuple[Reading, ...]:
    """Readings that differ from one in a single choice.

    Args:
        num_layers: N of the target. rope_theta: of the target's rotary embedding; None where it has no single one.
    """
    other = not reading.spec.norm_before_residual
    key, cause = "norm_before_residual", "norm_before_residual is absent or wrong, and readers differ in its default"
    return (
        *_other_layers(reading, num_layers),
        *_other_feedback(reading),
        reading.changed(f"{key} = {str(other).lower()}", cause, {key: other}, norm_before_residual=other),
        *_other_rope(reading, rope_theta),
    )


def _other_layers(reading: Reading, num_layers: int) -> list[Reading]:
    layers = reading.spec.aux_layers
    if layers == (FINAL_NORM,):
        return []
    later, earlier = (tuple(layer + by for layer in layers) for by in (1, -1))
    outputs = "the aux layers were given as layers whose output is meant (SpecForge, SGLang), and taken for aux layers"
    numbered = (
        "the aux layers were given as numbered here (vLLM, speculators), and taken for layers whose output is meant"
    )
    default = (2, num_layers // 2, num_layers - 3)
    wanted = [
        ("all aux layers one later", later, outputs),
        ("all aux layers one earlier", earlier, numbered),
        ("the default aux layers", default, "the head was trained on the default aux layers, 2, N//2, N-3"),
    ]
    for place, layer in enumerate(layers):
        for by, word in ((1, "later"), (-1, "earlier")):
            moved = (*layers[:place], layer + by, *layers[place + 1 :])
            wanted.append((f"aux layer {layer} one {word}", moved, f"aux layer {layer} is wrong"))
    found: dict[tuple[int, ...], Reading] = {}
    for name, aux_layers, cause in wanted:
        ascending = all(a < b for a, b in pairwise(aux_layers))
        fits = len(aux_layers) == len(layers) and ascending and aux_layers[0] >= 0 and aux_layers[-1] <= num_layers
        if fits and aux_layers != layers and aux_layers not in found:
            override = {"aux_layers": list(aux_layers)}
            found[aux_layers] = reading.changed(name, cause, override, aux_layers=aux_layers)
    return list(found.values())


def _other_feedback(reading: Reading) -> list[Reading]:
    feedback = "pre_norm" if reading.spec.feedback == "post_norm" else "post_norm"
    cause = "norm_output says otherwise than the head was trained" + (
        " (SpecForge wrote true for heads trained with the state before the norm)" if feedback == "pre_norm" else ""
    )
    name = f"{feedback} state fed back"
    return [reading.changed(name, cause, {"feedback": feedback}, feedback=feedback)]


def _other_rope(reading: Reading, rope_theta: float | None) -> list[Reading]:
    rope = reading.spec.rope
    if rope_theta is None or rope_theta == rope.theta or rope.kind != "default":
        return []
    cause = "rope_theta is absent or wrong in the head's configuration; the target's fits"
    overrides = {"rope_theta": rope_theta, "rope_scaling": None, "rope_parameters": None}
    return [reading.changed(f"rope_theta {rope_theta:g}", cause, overrides, rope=replace(rope, theta=rope_theta))]


LOW = 0.25
"""Least share of first drafts that a right pair has accepted; EAGLE-3 heads have 0.55 to 0.75 on chats."""
_MARGIN, _SIGMAS = 0.1, 4.0
"""Another reading must win so many drafts per chain, and so many standard errors."""
_MOST_CHANGES = 3
_LONGEST = 1024
"""Most tokens of a prompt with its answer: the drafts from all its positions take memory that grows with the square."""

Verdict = Literal["fine", "low", "misread"]


@dataclass(frozen=True)
class Tried:
    """Another reading, and what it gives.

    Attributes:
        reading: how the head is read. stats: its drafts from every position of the answers.
        gain, error: further drafts accepted per chain than as read, and the standard error of that.
    """

    reading: Reading
    stats: AcceptanceStats
    gain: float
    error: float

    @property
    def is_better(self) -> bool:
        """Better beyond doubt."""
        return self.gain >= max(_MARGIN, _SIGMAS * self.error)


@dataclass(frozen=True)
class Agreement:
    """What the agreement check found; num_answers, num_tokens: what the target wrote for it, greedily.

    Attributes:
        rounds: acceptance in the rounds that wrote it. chains: the same drafts from every position of the answers; None
            where that cannot be run.
        tried: the other readings, best first. best: the one that is better beyond doubt, if any; it may be several
            changes.
        verdict: "fine"; "low": few drafts are accepted however the head is read; "misread": `best` is right.
        cause: the likely cause, or what speaks for the head.
    """

    num_answers: int
    num_tokens: int
    rounds: AcceptanceStats
    chains: AcceptanceStats | None
    tried: tuple[Tried, ...]
    best: Tried | None
    verdict: Verdict
    cause: str

    def as_json(self) -> dict[str, Any]:
        """Numbers as they are."""
        return {
            "verdict": self.verdict,
            "cause": self.cause,
            "answers": self.num_answers,
            "tokens": self.num_tokens,
            "rounds": _numbers(self.rounds),
            "chains": None if self.chains is None else _numbers(self.chains),
            "tried": [_tried_json(tried) for tried in self.tried],
            "best": None if self.best is None else _tried_json(self.best),
        }


def _numbers(stats: AcceptanceStats) -> dict[str, Any]:
    return {
        "count": stats.rounds,
        "tau": stats.tau,
        "unconditional": list(stats.unconditional),
        "conditional": list(stats.conditional),
    }


def _tried_json(tried: Tried) -> dict[str, Any]:
    said = {"reading": tried.reading.name, "head_overrides": dict(tried.reading.overrides)}
    return said | {"gain": tried.gain, "error": tried.error} | _numbers(tried.stats)


def check_agreement(model: SpeculativeModel, prompts: Prompts | None = None) -> Agreement:
    """Let the target answer some prompts greedily with the head, and compare other readings of the head on the answers.

    prompts: default `PROMPTS`, as chats where the tokenizer has a template.

    Raises:
        InvalidInputError: the model has no head, drafts nothing, a prompt is too long, or the answers are too short to
            compare anything.
    """
    head, num_drafts = model.head, model.num_speculative_tokens
    if head is None or num_drafts == 0:
        raise InvalidInputError("the agreement check needs a head that drafts: give one, and num_speculative_tokens")
    done = model.generate(as_chats(model.tokenizer, PROMPTS) if prompts is None else prompts, _PARAMS)
    passages = [Passage.of(one, model.device) for one in done if len(one.token_ids) > 1]
    tokens, rounds = sum(len(one.token_ids) for one in done), pool_requests([one.stats for one in done])
    if not passages or not rounds.offered:
        raise InvalidInputError(
            f"the target's answers have {tokens} tokens in all, too few to draft any: give prompts with longer answers"
        )
    _check_lengths(passages)
    if not isinstance(head, Rereadable) or not runs_in_chains(head):
        verdict, cause = _judged(rounds, None, head_can_vary=False)
        return Agreement(len(done), tokens, rounds, None, (), None, verdict, cause)
    search = _Search(head, probe_target(model.hf_model), passages, num_drafts)
    own = search.chains(as_read(head))
    tried, best = search.run(own)
    verdict, cause = _judged(own.stats, best, head_can_vary=True)
    if best is not None:
        cause += _origins(head, best.reading)
    if own.stats.unconditional[0] < LOW and best is None and (found := search.map_check()).is_wrong:
        cause = found.cause
    return Agreement(len(done), tokens, rounds, own.stats, tried, best, verdict, cause)


def _origins(head: Rereadable, reading: Reading) -> str:
    """Where the values came from that another reading changes: " (aux_layers: default 2, N//2, N-3)"."""
    report = head.checkpoint_report
    sources = {} if report is None else {field.name: field.source for field in report.fields}
    changed = [name for name in vars(head.spec) if getattr(head.spec, name) != getattr(reading.spec, name)]
    said = [f"{name}: {sources[name]}" for name in changed if name in sources]
    return f" ({'; '.join(said)})" if said else ""


def _check_lengths(passages: Sequence[Passage]) -> None:
    longest = max(len(passage.token_ids) for passage in passages)
    if longest > _LONGEST:
        raise InvalidInputError(
            f"a prompt of the agreement check has {longest} tokens with its answer; at most {_LONGEST} are compared: "
            "give shorter prompts"
        )


_PARAMS = SamplingParams(max_new_tokens=MAX_NEW_TOKENS)


def _judged(stats: AcceptanceStats, best: Tried | None, head_can_vary: bool) -> tuple[Verdict, str]:
    if best is not None:
        return "misread", best.reading.cause
    if stats.unconditional[0] >= LOW:
        return "fine", "the target accepts what the head drafts" + (
            ", and no other reading of its files is better" if head_can_vary else ""
        )
    tried = "no other reading of its files is better" if head_can_vary else "other readings of this kind are not tried"
    return "low", (
        f"{tried}. Likely causes: the head was trained for another model of the same shape, or for another fine-tune "
        "of it; it is hardly trained; it was trained with another chat template, or on other texts (give some with "
        "--file)"
    )


class _Search:
    """Other readings of a head, compared on some passages."""

    def __init__(self, head: Rereadable, probed: TargetProbe, passages: Sequence[Passage], num_drafts: int) -> None:
        self._head, self._passages, self._num_drafts = head, passages, num_drafts
        self._seen: set[Eagle3Spec] = set()
        self._num_layers = len(probed.layers)
        self._rope_theta = _rope_theta(probed)
        reach = range(-_MOST_CHANGES, _MOST_CHANGES + 1)
        near = {layer + by for layer in head.aux_layers for by in reach if layer >= 0}
        default = (2, self._num_layers // 2, self._num_layers - 3)
        near |= {layer + by for layer in default for by in reach}
        places = [layer for layer in sorted(near | set(head.aux_layers)) if layer <= self._num_layers]
        wanted = [layer for layer in places if layer >= 0 or layer in head.aux_layers]
        self._states: list[Mapping[int, torch.Tensor]] = aux_states(probed, passages, wanted)

    def chains(self, reading: Reading) -> Chains:
        return chains(self._head.reread(reading.spec), self._passages, self._states, self._num_drafts)

    def map_check(self) -> MapCheck:
        """The head's vocabulary map, as the head was read."""
        return check_map(self._head, self._passages, self._states)

    def run(self, own: Chains) -> tuple[tuple[Tried, ...], Tried | None]:
        """Every single change; and while one is better beyond doubt, every further one on top of the best.

        Returns:
            What was tried, best first, and the best where it is better beyond doubt.
        """
        tried: list[Tried] = []
        self._seen = {self._head.spec}
        reading, standing, best = as_read(self._head), own, None
        for _ in range(_MOST_CHANGES):
            found = list(self._round(reading, standing, own))
            tried += [total for _, total, _ in found]
            better = [each for each in found if each[0].is_better]
            if not better:
                break
            _, best, standing = max(better, key=lambda each: each[0].gain)
            reading = best.reading
        return tuple(sorted(tried, key=lambda each: -each.gain)), best

    def _round(self, reading: Reading, standing: Chains, own: Chains) -> Iterator[tuple[Tried, Tried, Chains]]:
        """Each single change of a reading: against that reading, against the head as read, and its chains."""
        for other in other_readings(reading, self._num_layers, self._rope_theta):
            if other.spec in self._seen:
                continue
            self._seen.add(other.spec)
            found = self.chains(other)
            step = Tried(other, found.stats, *found.gain_over(standing))
            yield step, Tried(other, found.stats, *found.gain_over(own)), found


def _rope_theta(probed: TargetProbe) -> float | None:
    parameters = getattr(probed.model.config.get_text_config(), "rope_parameters", None) or {}
    theta = parameters.get("rope_theta")
    return float(theta) if isinstance(theta, (int, float)) else None
