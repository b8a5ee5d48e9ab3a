"""The record of one question under one configuration, as a run keeps it, and its pieces by accepted drafts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

from specdec.requests.stats import RoundRecord

Json = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """One answer of the model inside a conversation.

    Attributes:
        token_ids: include the end token if there was one. prompt_tokens: length of the prompt.
        text_tokens: length of `tokenizer(text).input_ids` (Spec-Bench counts so).
        rounds: the verification rounds of the request.
        segments: (kind, text) pieces of the answer with its drafts, where they were asked for.
        wall_s: wall seconds of the generate call, divided by the requests in it; prefill_s, decode_s: the engine's.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    text_tokens: int
    rounds: tuple[RoundRecord, ...]
    segments: tuple[tuple[str, str], ...] = ()
    wall_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True)
class Answer:
    """All turns of one question under one configuration, or the error that ended it (then without turns)."""

    question_id: str
    arm: str
    category: str
    task: str
    turns: tuple[Turn, ...] = ()
    error: str | None = None

    @property
    def rounds(self) -> tuple[RoundRecord, ...]:
        """The rounds of all turns, in order."""
        return tuple(record for turn in self.turns for record in turn.rounds)

    @property
    def token_ids(self) -> tuple[tuple[int, ...], ...]:
        """The token ids of each turn."""
        return tuple(turn.token_ids for turn in self.turns)


def failures(answers: Iterable[Answer]) -> list[dict[str, str]]:
    """The answers that ended in an error, as JSON values."""
    return [{"question_id": a.question_id, "arm": a.arm, "error": a.error} for a in answers if a.error is not None]


def seconds_a_round(answers: Iterable[Answer]) -> float:
    """Mean decode time of the verification rounds of some answers, in seconds; NaN without rounds."""
    answers = list(answers)
    rounds = sum(len(answer.rounds) for answer in answers)
    seconds = sum(turn.decode_s for answer in answers for turn in answer.turns)
    return seconds / rounds if rounds else float("nan")


def to_json(answer: Answer) -> Json:
    """The answer as JSON values; rounds become [drafted, accepted, emitted]."""
    turns = [{**asdict(turn), "rounds": [astuple(record) for record in turn.rounds]} for turn in answer.turns]
    return {**asdict(answer), "turns": turns}


def from_json(record: Mapping[str, Any]) -> Answer:
    """The answer that `to_json` wrote. Raises KeyError or TypeError when it is something else."""
    turns = tuple(_turn(turn) for turn in record["turns"])
    return Answer(**{**record, "turns": turns})


def _turn(record: Mapping[str, Any]) -> Turn:
    return Turn(
        **{
            **record,
            "token_ids": _integers(record["token_ids"]),
            "rounds": tuple(RoundRecord(*_integers(row)) for row in record["rounds"]),
            "segments": tuple((kind, text) for kind, text in record["segments"]),
        }
    )


def _integers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise TypeError(f"a list of whole numbers is needed, not {values!r:.60}")
    return tuple(values)


ACCEPTED, REJECTED, TARGET = "accepted", "rejected", "target"
_CONTEXT = 8  # tokens decoded before a piece, so that multi-byte characters and spaces come out right


def segments(tokenizer: Any, completion: Any) -> tuple[tuple[str, str], ...]:
    """(kind, text) pieces in reading order; () when the drafts were not returned.

    Kinds: "target" is a token of the target's own, "accepted" an accepted draft, "rejected" the first rejected draft
    and those after it (they are not part of the answer).
    """
    if completion.drafts is None or not completion.token_ids:
        return ()
    ids = list(completion.token_ids)
    pieces = [(TARGET, _piece(tokenizer, [], ids[:1]))]
    place = 1
    for record, drafts in zip(completion.stats.rounds, completion.drafts, strict=True):
        accepted = min(record.accepted, record.emitted)
        pieces.append((ACCEPTED, _piece(tokenizer, ids[:place], ids[place : place + accepted])))
        place += accepted
        if record.accepted < record.drafted:
            pieces.append((REJECTED, _piece(tokenizer, ids[:place], list(drafts[record.accepted :]))))
        own = record.emitted - accepted
        pieces.append((TARGET, _piece(tokenizer, ids[:place], ids[place : place + own])))
        place += own
    return tuple((kind, text) for kind, text in pieces if text)


def _piece(tokenizer: Any, before: Sequence[int], new: Sequence[int]) -> str:
    """The text that `new` adds after `before`."""
    if not new:
        return ""
    context = list(before[-_CONTEXT:])
    start = tokenizer.decode(context) if context else ""
    whole = tokenizer.decode(context + list(new))
    return str(whole[len(start) :] if whole.startswith(start) else tokenizer.decode(list(new)))
