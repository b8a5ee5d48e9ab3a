"""The head check: a head against its target on a few texts, and other readings of the head's files on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from drafters.base import OtherReading
from drafters.checkpoints.config_fields import Reported
from drafters.families import FAMILIES
from drafters.unroll import Gain
from specdec.errors import InvalidInputError
from specdec.extensions.head_check.measurement import (
    MAX_NEW_TOKENS,
    PROMPTS,
    Chains,
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
from specdec.values import Json
from specdec.wrapped.probing import probe_target

LOW = 0.25
"""Least share of first drafts that a right pair has accepted; EAGLE-3 heads have 0.55 to 0.75 on chats."""
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

    reading: OtherReading
    stats: AcceptanceStats
    gain: float
    error: float

    @property
    def is_better(self) -> bool:
        """Better beyond doubt."""
        return Gain(self.gain, self.error).is_clear

    def as_json(self) -> Json:
        """Numbers as they are."""
        return {
            "reading": self.reading.name,
            "config" if self.reading.in_config else "head_overrides": dict(self.reading.overrides),
            "gain": self.gain,
            "error": self.error,
            **_numbers(self.stats),
        }


@dataclass(frozen=True)
class Agreement:
    """What the agreement check found; num_answers, num_tokens: what the target wrote for it, greedily.

    Attributes:
        rounds: acceptance in the rounds that wrote it. chains: the same drafts from every position of the answers; None
            where that cannot be run.
        tried: the other readings, best first. best: the one that is better beyond doubt, if any.
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

    def as_json(self) -> Json:
        """Numbers as they are."""
        return {
            "verdict": self.verdict,
            "cause": self.cause,
            "answers": self.num_answers,
            "tokens": self.num_tokens,
            "rounds": _numbers(self.rounds),
            "chains": self.chains and _numbers(self.chains),
            "tried": [tried.as_json() for tried in self.tried],
            "best": self.best and self.best.as_json(),
        }


def _numbers(stats: AcceptanceStats) -> Json:
    return {
        "count": stats.rounds,
        "tau": stats.tau,
        "unconditional": list(stats.unconditional),
        "conditional": list(stats.conditional),
    }


def check_agreement(model: SpeculativeModel, prompts: Prompts | None = None) -> Agreement:
    """Let the target answer some prompts greedily with the head, and compare other readings of the head on the answers.

    prompts: default `PROMPTS`, as chats where the tokenizer has a template.

    Raises:
        InvalidInputError: the model has no head, drafts nothing, a prompt is too long, or the answers are too short to
            compare anything.
    """
    head = model.head
    num_drafts = model.num_speculative_tokens
    if head is None or num_drafts == 0:
        raise InvalidInputError("the agreement check needs a head that drafts: give one, and num_speculative_tokens")
    done = model.generate(as_chats(model.tokenizer, PROMPTS) if prompts is None else prompts, _PARAMS)
    passages = [Passage.of(one, model.device) for one in done if len(one.token_ids) > 1]
    tokens = sum(len(one.token_ids) for one in done)
    rounds = pool_requests([one.stats for one in done])
    if not passages or not rounds.offered:
        raise InvalidInputError(
            f"the target's answers have {tokens} tokens in all, too few to draft any: give prompts with longer answers"
        )
    _check_lengths(passages)
    probed = probe_target(model.hf_model)
    layers = len(probed.layers)
    theta = (getattr(probed.model.config.get_text_config(), "rope_parameters", None) or {}).get("rope_theta")
    theta = float(theta) if isinstance(theta, (int, float)) else None
    readings = [own for each in FAMILIES.values() for own in each.optional("other_readings", head, layers, theta) or ()]
    own: Chains | None = None
    tried: tuple[Tried, ...] = ()
    if readings and runs_in_chains(head):
        wanted = {layer for each in (head, *(reading.head for reading in readings)) for layer in each.aux_layers}
        states = aux_states(probed, passages, sorted(wanted))
        own = chains(head, passages, states, num_drafts)
        others = ((reading, chains(reading.head, passages, states, num_drafts)) for reading in readings)
        each = (Tried(reading, other.stats, *Gain.of(other.accepted - own.accepted)) for reading, other in others)
        tried = tuple(sorted(each, key=lambda one: -one.gain))
    best = tried[0] if tried and tried[0].is_better else None
    verdict, cause = _judged(rounds if own is None else own.stats, best, head_can_vary=own is not None)
    if best is not None:
        # Where the value came from that another reading changes: " (aux_layers: default 2, N//2, N-3)".
        report = head.checkpoint_report if isinstance(head, Reported) else None
        sources = {} if report is None else {field.name: field.source for field in report.fields}
        cause += f" ({best.reading.field}: {sources[best.reading.field]})" if best.reading.field in sources else ""
    elif own is not None and verdict == "low" and (found := check_map(head, passages, states)).is_wrong:
        cause = found.cause
    return Agreement(len(done), tokens, rounds, None if own is None else own.stats, tried, best, verdict, cause)


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
