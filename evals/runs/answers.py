"""The record of one question under one configuration: as a run keeps it, as Spec-Bench does, and in its pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from specdec.requests.stats import RoundRecord
from specdec.run_files import write_atomically
from specdec.values import Json, TokenIds, ratio


@dataclass(frozen=True)
class Turn:
    """One answer of the model inside a conversation.

    Attributes:
        token_ids: include the end token if there was one. prompt_tokens: length of the prompt.
        text_tokens: length of `tokenizer(text).input_ids` (Spec-Bench counts so).
        rounds: the verification rounds of the request.
        segments: (kind, text) pieces of the answer with its drafts, where they were asked for.
        wall_s: wall seconds of the generate call, divided by the requests in it; prefill_s, decode_s: the engine's.
        logprobs: of each token its log-probability and those of its alternatives, where they were asked for.
    """

    text: str
    token_ids: TokenIds
    finish_reason: str
    prompt_tokens: int
    text_tokens: int
    rounds: tuple[RoundRecord, ...]
    segments: tuple[tuple[str, str], ...] = ()
    wall_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    logprobs: tuple[tuple[float, ...], ...] = ()


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
    def token_ids(self) -> tuple[TokenIds, ...]:
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
    return ratio(seconds, rounds)


def to_json(answer: Answer) -> Json:
    """The answer as JSON values; rounds become [drafted, accepted, emitted]."""
    turns = [{**asdict(turn), "rounds": [astuple(record) for record in turn.rounds]} for turn in answer.turns]
    return {**asdict(answer), "turns": turns}


def from_json(record: Json) -> Answer:
    """The answer that `to_json` wrote. Raises KeyError or TypeError when it is something else."""
    turns = tuple(map(_turn, record["turns"]))
    return Answer(**{**record, "turns": turns})


def _turn(record: Json) -> Turn:
    return Turn(
        **{
            **record,
            "token_ids": _integers(record["token_ids"]),
            "rounds": tuple(RoundRecord(*_integers(row)) for row in record["rounds"]),
            "segments": tuple((kind, text) for kind, text in record["segments"]),
            "logprobs": tuple(map(tuple, record.get("logprobs", ()))),
        }
    )


def _integers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise TypeError(f"a list of whole numbers is needed, not {values!r:.60}")
    return tuple(values)


def spec_bench_line(answer: Answer, model_id: str) -> Json:
    """One line of an answer file of Spec-Bench and EAGLE, so that their own scripts read it.

    Source: hemingkx/Spec-Bench evaluation/eval.py, speed.py; SafeAILab/EAGLE eagle/evaluation/speed.py. Counted as
    there: `new_tokens` and `accept_lengths` are accepted drafts + 1 a round, drafts after a stop included; `idxs` is
    rounds - 1.
    """
    turns = answer.turns
    choice = {
        "index": 0,
        "turns": [turn.text for turn in turns],
        "decoding_steps": [len(turn.rounds) for turn in turns],
        "idxs": [len(turn.rounds) - 1 for turn in turns],
        "new_tokens": [sum(_lengths(turn)) for turn in turns],
        "wall_time": [turn.wall_s for turn in turns],
        "accept_lengths": [length for turn in turns for length in _lengths(turn)],
    }
    return {
        "question_id": int(answer.question_id) if answer.question_id.isdigit() else answer.question_id,
        "category": answer.category,
        "answer_id": f"{answer.question_id}-{answer.arm}",
        "model_id": model_id,
        "choices": [choice],
        "tstamp": 0.0,
    }


def write_spec_bench(folder: Path, answers: Sequence[Answer], model_id: str) -> None:
    """Write one file a configuration into `folder`. Answers with an error are left out."""
    for arm in dict.fromkeys(answer.arm for answer in answers):
        own = [spec_bench_line(a, f"{model_id}-{arm}") for a in answers if a.arm == arm and a.error is None]
        path = folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', arm).strip('-').lower()}.jsonl"
        write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in own))


def _lengths(turn: Turn) -> list[int]:
    return [record.accepted + 1 for record in turn.rounds]


ACCEPTED = "accepted"
REJECTED = "rejected"
TARGET = "target"
_CONTEXT = 8  # tokens decoded before a piece, so that multi-byte characters and spaces come out right


def segments(tokenizer: Any, completion: Any) -> tuple[tuple[str, str], ...]:
    """(kind, text) pieces in reading order; () when the drafts were not returned.

    Kinds: "target" is a token of the target's own, "accepted" an accepted draft, "rejected" the first rejected draft
    and those after it (they are not part of the answer).
    """
    if completion.drafts is None or not completion.token_ids:
        return ()
    ids = list(completion.token_ids)
    parts = [(TARGET, 0, ids[:1])]
    place = 1
    for record, drafts in zip(completion.stats.rounds, completion.drafts, strict=True):
        accepted = min(record.accepted, record.emitted)
        parts.append((ACCEPTED, place, ids[place : place + accepted]))
        place += accepted
        parts.append((REJECTED, place, list(drafts[record.accepted :])))
        own = record.emitted - accepted
        parts.append((TARGET, place, ids[place : place + own]))
        place += own
    pieces = ((kind, _piece(tokenizer, ids[:place], new)) for kind, place, new in parts)
    return tuple((kind, text) for kind, text in pieces if text)


def _piece(tokenizer: Any, before: Sequence[int], new: Sequence[int]) -> str:
    """The text that `new` adds after `before`."""
    if not new:
        return ""
    context = list(before[-_CONTEXT:])
    start = tokenizer.decode(context) if context else ""
    whole = tokenizer.decode(context + list(new))
    return str(whole[len(start) :] if whole.startswith(start) else tokenizer.decode(list(new)))
