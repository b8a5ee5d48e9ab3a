"""Words and sentences of the generated word problems: what `problem_texts.toml` holds, which says what they mean."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

_TEXTS: dict[str, Any] = tomllib.loads(files("evals").joinpath("data/problem_texts.toml").read_text("utf-8"))

WOMEN, MEN, THINGS = (tuple(_TEXTS[name].split()) for name in ("women", "men", "things"))
ITEMS, PLACES = tuple(_TEXTS["items"]), tuple(_TEXTS["places"])
BOXES: tuple[tuple[str, str], ...] = tuple((one, several) for one, several in _TEXTS["boxes"])
QUESTIONS: dict[str, tuple[str, ...]] = {subject: tuple(texts) for subject, texts in _TEXTS["questions"].items()}


@dataclass(frozen=True)
class Frame:
    """One sentence of a problem and the lines of the answer that it asks for."""

    needs: str
    gives: str
    text: str
    lines: tuple[tuple[str, str], ...]


def _frames(kind: str) -> tuple[Frame, ...]:
    return tuple(Frame(needs, gives, text, tuple(map(tuple, lines))) for needs, gives, text, *lines in _TEXTS[kind])


OPENINGS, EVENTS = _frames("openings"), _frames("events")
