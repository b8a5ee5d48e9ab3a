"""Kinds of options: which values one takes, and how a command line writes them. Imports no torch: `--help` reads it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from specdec.errors import InvalidInputError
from specdec.values import (
    MOST_COUNT,
    Options,
    are_texts,
    choice,
    flag,
    listed,
    number,
    refuse,
    scale_pairs,
    share,
    token_ids,
    whole,
    wrong,
)


class Kind:
    """What values an option takes. The base class takes any: they are read where they are used (device, dtype)."""

    def read(self, name: str, value: Any, /) -> Any:
        """The value as it is kept. Raises InvalidInputError: another type, or outside what is allowed."""
        return value

    def from_word(self, name: str, word: Any) -> Any:
        """A value as a command line or lm-eval gives it, before it is read.

        Raises:
            InvalidInputError: a text that this kind cannot be written as.
        """
        return word


OrAuto = bool | Literal["auto"]


@dataclass(frozen=True)
class Whole(Kind):
    """A whole number from `least` to `most`."""

    least: int
    most: int = MOST_COUNT

    def read(self, name: str, value: Any) -> int:
        return whole(name, value, self.least, self.most)


class Fraction(Kind):
    """A number in (0, 1]."""

    read = staticmethod(share)


class Below1(Kind):
    """A number in [0, 1)."""

    read = staticmethod(number("0 or more, less than 1", lambda x: 0 <= x < 1))


class Flag(Kind):
    """True or False."""

    read = staticmethod(flag)


class Switch(Kind):
    """True, False or "auto"; as a word yes, no or auto."""

    def read(self, name: str, value: Any) -> OrAuto:
        """See `Kind.read`. Raises InvalidInputError: it is none of the three."""
        if isinstance(value, str) and value == "auto":
            return "auto"
        try:
            return flag(name, value)
        except InvalidInputError:
            raise wrong(name, value, "allowed are 'auto', True and False") from None

    def from_word(self, name: str, word: Any) -> Any:
        return {"yes": True, "no": False}.get(word, word) if isinstance(word, str) else word


@dataclass(frozen=True)
class Choice(Kind):
    """One of some words, which may become more. `hint`: what the message about another one says, in their place."""

    words: Collection[str]
    hint: str = ""

    def read(self, name: str, value: Any) -> str:
        """See `Kind.read`. Raises InvalidInputError: it is none of the words."""
        return choice(name, value, self.words, self.hint)


@dataclass(frozen=True)
class Name(Kind):
    """A text that is not empty; `allowed` describes it in the message."""

    allowed: str

    def read(self, name: str, value: Any) -> str:
        """See `Kind.read`. Raises InvalidInputError: it is no text, or an empty one."""
        text = str(value) if isinstance(value, PurePath) else value
        if not isinstance(text, str) or not text:
            raise refuse(name, value, f"{self.allowed}, or None")
        return text

    def from_word(self, name: str, word: Any) -> Any:
        """lm-eval reads a commit of digits only as a number."""
        return str(word) if isinstance(word, int) and not isinstance(word, bool) else word


class Scales(Kind):
    """A pair of positive numbers (keys, values) for each layer; as a word K:V;K:V;…"""

    read = staticmethod(scale_pairs)

    def from_word(self, name: str, word: Any) -> Any:
        """See `Kind.from_word`. Raises InvalidInputError: a part of the word is no pair."""
        if not isinstance(word, str):
            return word
        pairs = [tuple(pair.split(":")) for pair in word.split(";")]
        if any(len(pair) != 2 for pair in pairs):
            raise wrong(name, word, "give a pair for each layer, as in 0.5:0.25;0.5:0.5")
        return pairs


class Tokens(Kind):
    """Token ids: a sequence, array or 1-D tensor of them; or a text, the name of a JSON file with a list of them."""

    def read(self, name: str, value: Any) -> str | tuple[int, ...]:
        """See `Kind.read`. Raises InvalidInputError: see `specdec.values.token_ids`."""
        if isinstance(value, (str, PurePath)) and str(value):
            return str(value)
        return token_ids(name, value)


class Overrides(Kind):
    """Keys and values; as words KEY=VALUE, one each or joined by ';', the value in JSON or a plain text."""

    def read(self, name: str, value: Any) -> Options | None:
        """See `Kind.read`. Raises InvalidInputError: it is no mapping of texts to values."""
        if not isinstance(value, Mapping) or not are_texts(value):
            raise refuse(name, value, "a mapping of keys of the head's config.json to values, or None")
        return dict(value) or None

    def from_word(self, name: str, word: Any) -> Any:
        """See `Kind.from_word`. Raises InvalidInputError: a word without '='."""
        if isinstance(word, Mapping) or word is None:
            return word
        pairs = [pair for text in listed(word) for pair in str(text).split(";") if pair.strip()]
        bare = [pair for pair in pairs if "=" not in pair]
        if bare:
            raise wrong(name, bare[0], "give KEY=VALUE, as in rope_theta=500000")
        return {key.strip(): _json_or_text(value) for key, _, value in (pair.partition("=") for pair in pairs)} or None


def _json_or_text(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word
