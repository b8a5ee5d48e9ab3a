"""AnswerFormat: how a family of models writes reasoning and calls; answer_formats.toml has a row for each family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import regex

from attention.cached import cached_property
from attention.toml_tables import read_tables
from specdec.values import Json, wrong

Where = Literal["start", "thought", "content", "after"]
EVERYWHERE: tuple[Where, ...] = ("start", "thought", "content", "after")


@dataclass(frozen=True)
class Opening:
    """What may begin at a marker.

    Attributes:
        kind: "reasoning"; "call": the arguments follow; "object": a JSON object with name and arguments follows;
            "skip": the marker alone, which is no part of the answer.
        pattern: of the module regex. A call's has a group "name", and may have one "id".
        close: pattern at which it ends. In calls it counts outside of JSON strings only.
        where: at the answer's start, behind its reasoning ("thought"), within its content, after a call.
        balanced: the close counts only where all brackets of the arguments are closed.
    """

    kind: Literal["reasoning", "call", "object", "skip"]
    pattern: str
    close: str = ""
    where: tuple[Where, ...] = EVERYWHERE
    balanced: bool = False

    @cached_property
    def opens(self) -> Any:
        return regex.compile(self.pattern, regex.DOTALL)

    @cached_property
    def closes(self) -> Any:
        return regex.compile(self.close, regex.DOTALL)


class StrictCall(NamedTuple):
    """A form of calls whose arguments can be made to follow a schema.

    Attributes:
        trigger: with it every call begins that the family's openings read. begin: what follows it, with "NAME".
        end: behind the arguments. pattern: the trigger is a pattern, of the Rust crate regex.
    """

    trigger: str
    begin: str
    end: str
    pattern: bool = False

    def begin_of(self, name: str) -> str:
        return self.trigger + self.begin.replace("NAME", name)


@dataclass(frozen=True)
class AnswerFormat:
    """How a family of models writes its answers.

    Attributes:
        openings: tried in order where `heads` match. heads: pattern of the markers with which they begin.
        reasoning: markers around reasoning as a prompt may end with them; ("", "") without any.
        special: markers that may be special tokens of the tokenizer, which leave no text otherwise.
        sign: pattern of a chat template that tells the family.
        strict: forms of calls, of which a model may choose one. None of them: `strict` with "auto" is refused.
    """

    openings: Sequence[Opening]
    heads: str
    reasoning: tuple[str, str] = ("", "")
    special: tuple[str, ...] = ()
    sign: str = ""
    strict: tuple[StrictCall, ...] = ()

    @cached_property
    def head(self) -> Any:
        return regex.compile(self.heads, regex.DOTALL)


def _fields(row: Json) -> Json:
    """A row of the table, its lists as tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}


def _format(row: Json) -> AnswerFormat:
    openings = [Opening(**_fields(opening)) for opening in row["openings"]]
    strict = [StrictCall(**call) for call in row.get("strict", ())]
    return AnswerFormat(**_fields(row | {"openings": openings, "strict": strict}))


_TABLES = read_tables("specdec", "extensions/tools/answer_formats.toml")
FORMATS = {name: _format(row) for name, row in _TABLES["families"].items()}
"""Families by name. A row of your own, or `FORMATS[name] = AnswerFormat(…)`, is found by its name and by its sign."""
CALLS = _format(_TABLES["calls"])
"""A JSON list of calls, which `tool_choice="required"` makes a model of any family write."""
ARGUMENTS = _format(_TABLES["arguments"])
"""Arguments of one call, which a `tool_choice` that names a tool makes it write."""


def format_of(name: str, template: Any) -> AnswerFormat | None:
    """The format that is called so. "auto": the one that the chat template shows; None where it shows none.

    Raises:
        InvalidInputError: another name.
    """
    if name == "auto":
        text = "".join(map(str, template.values())) if isinstance(template, dict) else str(template)
        return next((own for own in FORMATS.values() if own.sign and regex.search(own.sign, text, regex.DOTALL)), None)
    if name not in FORMATS:
        raise wrong("format", name, f"allowed are auto, {', '.join(FORMATS)}")
    return FORMATS[name]
