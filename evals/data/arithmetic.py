"""Generated word problems with worked answers: training data, tests and an evaluation task of the built-in targets.

The layout of an answer is GSM8K's: a sentence a step, each calculation annotated as `<<48/2=24>>`, last line `#### 24`.
None of GSM8K's text is used. Words and sentences are in `problem_texts.toml`, with their meaning.
Source: the annotation format is described in openai/grade-school-math README.md.

>>> problem = problems("train", 1, seed=0)[0]
>>> problem.answer.endswith(f"#### {problem.result}")
True
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import lru_cache

from attention.toml_tables import read_tables
from specdec.errors import InvalidInputError
from specdec.values import Json

SPLITS = ("train", "heldout")
LARGEST = 999
_STEPS = (1, 1, 2, 2, 2, 2, 3, 3, 3)  # how many lines an answer has, before the last one: a draw from this
_HELDOUT_BYTES = 32  # of 256 values of the first hash byte


_TEXTS: Json = read_tables("evals", "data/problem_texts.toml")

WOMEN, MEN, THINGS = (tuple(_TEXTS[name].split()) for name in ("women", "men", "things"))
ITEMS = tuple(_TEXTS["items"])
PLACES = tuple(_TEXTS["places"])
BOXES: tuple[tuple[str, str], ...] = tuple((one, several) for one, several in _TEXTS["boxes"])
QUESTIONS: dict[str, tuple[str, ...]] = {subject: tuple(texts) for subject, texts in _TEXTS["questions"].items()}


@dataclass(frozen=True)
class Frame:
    """One sentence of a problem and the lines that it adds to the answer."""

    needs: str
    gives: str
    text: str
    lines: tuple[tuple[str, str], ...]


def _frames(kind: str) -> tuple[Frame, ...]:
    return tuple(Frame(needs, gives, text, tuple(map(tuple, lines))) for needs, gives, text, *lines in _TEXTS[kind])


OPENINGS = _frames("openings")
EVENTS = _frames("events")


@dataclass(frozen=True)
class Problem:
    """A word problem. `answer` is worked line by line and ends with `#### {result}`."""

    question: str
    answer: str
    result: int


@dataclass(frozen=True)
class _State:
    """A problem while it is being put together: `value` is the running value v, `steps` the frames used so far."""

    subject: str
    value: int
    sentences: tuple[str, ...]
    lines: tuple[str, ...]
    used: tuple[Frame, ...]


def problems(split: str, n: int, seed: int = 0) -> list[Problem]:
    """`n` different problems of one split; the same arguments always give the same problems.

    The splits are disjoint for every seed: a hash of the question decides to which of the two it belongs.

    Raises:
        InvalidInputError: `split` is neither "train" nor "heldout", or `n` is negative.
    """
    if split not in SPLITS:
        raise InvalidInputError(f"Unknown split {split!r}. Allowed are: {', '.join(SPLITS)}.")
    if n < 0:
        raise InvalidInputError(f"n is {n}; it must be 0 or more.")
    return list(_drawn(split, n, seed))


@lru_cache(maxsize=4)  # an evaluation asks for its questions once a configuration: 0.4 s for 1000 held-out ones
def _drawn(split: str, n: int, seed: int) -> tuple[Problem, ...]:
    rng = random.Random(f"{split}/{seed}")
    found: dict[str, Problem] = {}
    while len(found) < n:
        problem = _attempt(rng)
        if problem is not None and is_heldout(problem.question) == (split == "heldout"):
            found.setdefault(problem.question, problem)
    return tuple(found.values())


def is_heldout(question: str) -> bool:
    """Whether a question belongs to the held-out split: one in eight does, by the first byte of its SHA-256."""
    return hashlib.sha256(question.encode()).digest()[0] < _HELDOUT_BYTES


def _attempt(rng: random.Random) -> Problem | None:
    """One problem, or None where no numbers fit."""
    words = _words(rng)
    steps = rng.choice(_STEPS)
    frame = rng.choice([frame for frame in OPENINGS if len(frame.lines) <= steps])
    state = _apply(rng, frame, _State("", rng.randint(*((4, 60) if frame.lines else (10, 300))), (), (), ()), words)
    while state is not None and (room := steps - len(state.lines)) > 0:
        events = [f for f in EVENTS if f.needs == state.subject and len(f.lines) <= room and f not in state.used]
        state = _apply(rng, rng.choice(events), state, words) if events else None
    if state is None:
        return None
    question = " ".join((*state.sentences, rng.choice(QUESTIONS[state.subject]).format(**words)))
    return Problem(question, "\n".join((*state.lines, f"#### {state.value}")), state.value)


def _apply(rng: random.Random, frame: Frame, state: _State, words: dict[str, str]) -> _State | None:
    """The state after one more frame, or None when no allowed numbers were found."""
    numbers = {"v": state.value}
    lines = []
    for expression, sentence in frame.lines:
        if not _draw(rng, expression, numbers):
            return None
        left, operator, right = tuple(expression)
        a = _value(left, numbers)
        b = _value(right, numbers)
        numbers["w"] = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[operator]
        calculation = f"{a}{operator}{b} = {{}}<<{a}{operator}{b}={numbers['w']}>>{numbers['w']}"
        filled = sentence.format(calc=calculation.format(""), money=calculation.format("$"), **words)
        lines.append(_capital(filled))
    text = _capital(frame.text.format(**words, **numbers))
    value = numbers.get("w", state.value)
    return _State(frame.gives, value, (*state.sentences, text), (*state.lines, *lines), (*state.used, frame))


def _value(symbol: str, numbers: dict[str, int]) -> int:
    return int(symbol) if symbol.isdigit() else numbers[symbol]


def _draw(rng: random.Random, expression: str, numbers: dict[str, int]) -> bool:
    """Draw the numbers that an expression still misses, into `numbers`; False when none would do."""
    left, operator, right = tuple(expression)
    if left == "n" and right == "m":
        top_n, top_m = (150, 150) if operator == "+" else (12, 25)
        numbers["n"] = rng.randint(2, top_n)
        numbers["m"] = rng.randint(2, top_m)
    elif "n" in (left, right):
        choices = _choices(operator, numbers["v"], reverse=left == "n")
        if not choices:
            return False
        numbers["n"] = rng.choice(choices)
    return _allowed(operator, _value(left, numbers), _value(right, numbers))


def _choices(operator: str, value: int, reverse: bool) -> range | list[int]:
    """Numbers n for which v+n, v-n, n-v (reverse), v*n or v/n is neither too hard nor too large."""
    if reverse:
        return [bill for bill in (20, 50, 100, 150, 200, 300, 500) if value < bill <= 3 * value + 20]
    if operator == "+":
        return range(2, min(LARGEST - value, max(value, 60)) + 1)
    if operator == "-":
        return range(2, value - 1)
    if operator == "*":
        return range(2, 10)
    return [n for n in range(2, 13) if value % n == 0]


def _allowed(operator: str, a: int, b: int) -> bool:
    """Whether a step is small enough to be learned, and its result is an integer of at least 2."""
    if operator == "+":
        return a + b <= LARGEST
    if operator == "-":
        return a - b >= 2
    if operator == "*":
        return a * b <= 400 and min(a, b) <= 12
    return a % b == 0 and a // b >= 2 and a <= 400


def _words(rng: random.Random) -> dict[str, str]:
    p, q = rng.sample(WOMEN + MEN, 2)
    he, his, him = ("she", "her", "her") if p in WOMEN else ("he", "his", "him")
    box, boxes = rng.choice(BOXES)
    item, other = rng.sample(ITEMS, 2)
    return {
        "p": p, "q": q, "he": he, "his": his, "him": him, "things": rng.choice(THINGS),
        "box": box, "boxes": boxes, "item": item, "other": other, "place": rng.choice(PLACES),
    }  # fmt: skip


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]
