"""What the model answered: the record of one question under one configuration, as it is kept in a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from specdec.requests.stats import RoundRecord


@dataclass(frozen=True)
class Turn:
    """One answer of the model inside a conversation.

    Attributes:
        text, token_ids, finish_reason: the answer; token_ids include the end token if there was one.
        prompt_tokens: length of the prompt; text_tokens: length of `tokenizer(text).input_ids` (Spec-Bench counts so).
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


def to_json(answer: Answer) -> dict[str, Any]:
    """The answer as JSON values; rounds become [drafted, accepted, emitted]."""
    turns = []
    for turn in answer.turns:
        rounds = [[r.drafted, r.accepted, r.emitted] for r in turn.rounds]
        turns.append({**asdict(turn), "token_ids": list(turn.token_ids), "rounds": rounds})
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
