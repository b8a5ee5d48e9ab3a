"""GSM8K's training split as training text: read, split off a part for model selection, tidy the answers, vary them."""

from __future__ import annotations

import json
import os
import random
import re
from dataclasses import dataclass
from pathlib import Path

from evals.data.arithmetic import MEN, WOMEN
from specdec.errors import InvalidInputError

DEV_SIZE = 500
_DEV_SEED = 2026
_NUMBER = re.compile(r"\d+")
_UNSAFE = re.compile(r"\d[.,:/%]\d|\d\s?%|\d(?:st|nd|rd|th)\b|[A-Za-z]\d|\d[A-Za-z]|\d-\w")
_NOTE = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")
_RESULT = re.compile(r"\s*=\s*(\$?)\s*<<([^<>=]+)=([^<>=]+)>>\s*\$?[\d.,]*\d")
_UNIT = re.compile(r"/?[A-Za-z][A-Za-z']*|[\s$]")
_FIXED = {2, 7, 10, 12, 24, 30, 52, 60, 100, 365}  # often units (days, months, cents, a pair): never varied


@dataclass(frozen=True)
class Pair:
    """A question and its worked answer."""

    question: str
    answer: str


def read(split: str) -> list[Pair]:
    """All pairs of `$SPECDEC_DATA/gsm8k/{split}.jsonl`, answers tidied.

    Raises:
        InvalidInputError: SPECDEC_DATA is not set or the file is not there.
    """
    path = Path(os.environ.get("SPECDEC_DATA", "")) / "gsm8k" / f"{split}.jsonl"
    if "SPECDEC_DATA" not in os.environ or not path.is_file():
        raise InvalidInputError(f"{path} is not there. Set SPECDEC_DATA to a folder that holds gsm8k/{split}.jsonl.")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Pair(row["question"].strip(), tidy(row["answer"])) for row in rows]


def split_dev(pairs: list[Pair]) -> tuple[list[Pair], list[Pair]]:
    """(for training, for model selection): a fixed random part of the training split is kept for the latter."""
    order = random.Random(_DEV_SEED).sample(range(len(pairs)), len(pairs))
    return [pairs[i] for i in order[DEV_SIZE:]], [pairs[i] for i in order[:DEV_SIZE]]


def tidy(answer: str) -> str:
    """One way of writing for all answers: calculations stand as in their note, without units and thousands commas.

    >>> tidy("It is $1,000 x 2 books = $<<1000*2=2000>>2,000 in all\\n#### 2,000")
    'It is 1000*2 = $<<1000*2=2000>>2000 in all.\\n#### 2000'
    """
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", answer.strip())
    lines = [" ".join(_tidy_line(line).split()) for line in text.splitlines()]
    return "\n".join(_stopped(line) for line in lines if line)


def _tidy_line(line: str) -> str:
    done, rest = "", line
    while match := _RESULT.search(rest):
        dollar, noted, result = match.groups()
        start = _start_of(rest[: match.start()], _compact(noted))
        if start is None:
            done += rest[: match.end()]
        else:
            done += f"{rest[:start]}{_compact(noted)} = {dollar}<<{_compact(noted)}={result}>>{result}"
        rest = rest[match.end() :]
    return done + rest


def _start_of(before: str, noted: str) -> int | None:
    """Where in the text before a result its calculation starts, if that is the one in the note."""
    starts = [m.start() for m in re.finditer(r"(?<![\w.$(])[$(]*[\d.]", before)]
    return next((start for start in reversed(starts) if _compact(before[start:]) == noted), None)


def _compact(expression: str) -> str:
    times = re.sub(r"(?<=[\s\d)])[x×](?=[\s\d($])", "*", expression)
    return _UNIT.sub("", times)


def _stopped(line: str) -> str:
    return line if line.startswith("####") or not line[-1].isalnum() else f"{line}."


def renamed(pair: Pair, rng: random.Random) -> Pair:
    """The same pair with its first names exchanged for others of the same kind; unchanged where none is known."""
    words = set(re.findall(r"\b[A-Z][a-z]+\b", pair.question + " " + pair.answer))
    new: dict[str, str] = {}
    for names in (WOMEN, MEN):
        old = sorted(words.intersection(names))
        new.update(zip(old, rng.sample([n for n in names if n not in words], len(old)), strict=True))
    if not new:
        return pair
    pattern = re.compile(r"\b(" + "|".join(new) + r")\b")
    return Pair(*(pattern.sub(lambda m: new[m.group(1)], text) for text in (pair.question, pair.answer)))


def renumbered(pair: Pair, rng: random.Random) -> Pair | None:
    """The same pair with other numbers and all its calculations redone; None where that is not safe.

    Safe is: plain integers only; each number of the question occurs once in it; every number of the answer is one of
    the question, an earlier result, or a constant inside a calculation; no two of them are equal.
    """
    notes = _NOTE.findall(pair.answer)
    given = [int(n) for n in _NUMBER.findall(pair.question)]
    if not _safe(pair, given, notes):
        return None
    varied = [n for n in given if n not in _FIXED]
    for _ in range(30):
        new = {n: rng.randint(max(2, n // 2), n + n // 2 + 2) for n in varied}
        if _recalculate(notes, new):
            return Pair(_replaced(pair.question, new), _replaced(pair.answer, new))
    return None


def _safe(pair: Pair, given: list[int], notes: list[tuple[str, str]]) -> bool:
    text = pair.question + "\n" + pair.answer
    if _UNSAFE.search(pair.question) or re.search(r"\d[.,%:]\d|\d%", pair.answer) or not notes:
        return False
    if not all(re.fullmatch(r"[\d+\-*/()]+", left) and right.isdigit() for left, right in notes):
        return False
    results = [int(right) for _, right in notes]
    known = set(given) | set(results)
    if any(_used_too_early(notes, i) for i in range(len(notes))):
        return False
    constants = {int(n) for left, _ in notes for n in _NUMBER.findall(left)} - known
    if len(known) != len(given) + len(results) or max(known) > 9999 or constants - _FIXED - set(range(11)):
        return False
    return {int(n) for n in _NUMBER.findall(text)} <= known | constants


def _used_too_early(notes: list[tuple[str, str]], i: int) -> bool:
    """Whether calculation i holds a number that is a later result: then it is a constant there."""
    return bool({int(n) for n in _NUMBER.findall(notes[i][0])} & {int(right) for _, right in notes[i:]})


def _recalculate(notes: list[tuple[str, str]], new: dict[int, int]) -> bool:
    """Add the result of every calculation to `new`; False when one is not a positive integer below 10,000."""
    for left, right in notes:
        expression = _replaced(left, new)
        if re.search(r"(?<!\d)0\d|/0", expression):
            return False
        value = eval(expression, {"__builtins__": {}})  # digits, + - * / and brackets only, checked by _safe
        if value != int(value) or not 1 <= value <= 9999:
            return False
        new[int(right)] = int(value)
    return True


def _replaced(text: str, new: dict[int, int]) -> str:
    return _NUMBER.sub(lambda match: str(new.get(int(match.group()), match.group())), text)
