"""AnswerFormat: how a family of models writes reasoning and tool calls; FORMATS has a row for each family.

Source: NousResearch, "Hermes function calling", and Qwen, "Function calling" ("hermes"); Meta, "Llama 3.1: JSON based
tool calling" ("llama3"); Mistral AI, "Tokenizers", v3 to v13 ("mistral"); the model cards of deepseek-ai/DeepSeek-V3
and V3.1 ("deepseek"); OpenAI, "Harmony response format" ("harmony").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import regex

from attention.cached import cached_property
from specdec.values import wrong

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


def _object(begin: str, arguments: str = "arguments") -> str:
    """A JSON object that begins with the tool's name, up to the arguments."""
    return begin + rf'\s*\{{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"{arguments}"\s*:\s*'


def _thinking(begin: str, end: str) -> Opening:
    return Opening("reasoning", regex.escape(begin), regex.escape(end), ("start", "thought"))


_ID = r'(?:,\s*"id"\s*:\s*"[^"\\]*"\s*)?'
_THINK = ("<think>", "</think>")
_BRACKETS = ("[THINK]", "[/THINK]")
_TOOL_MARKERS = ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
_CALL = "<｜tool▁call▁begin｜>"
_TO = r" to=(?:functions\.)?(?P<name>[\w.-]+)"
_CHANNEL = r"(?:<\|start\|>assistant)?"
_MESSAGE = r"\s*(?:<\|constrain\|>)?(?:json)?<\|message\|>"
_ENDS = r"<\|(?:end|call|return)\|>|(?=<\|start\|>)"

FORMATS: dict[str, AnswerFormat] = {
    "hermes": AnswerFormat(
        (
            _thinking(*_THINK),
            Opening("call", _object("<tool_call>"), r"\s*\}\s*</tool_call>|\s*</tool_call>"),
            Opening("object", r"<tool_call>(?=\s*\{)", "</tool_call>"),
        ),
        "<think>|<tool_call>",
        reasoning=_THINK,
        special=(*_THINK, "<tool_call>", "</tool_call>"),
        sign=r"\A(?!.*<function=).*<tool_call>",
        strict=(StrictCall("<tool_call>", '\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),),
    ),
    "llama3": AnswerFormat(
        (
            Opening(
                "call",
                _object(r"(?:<\|python_tag\|>)?\s*", "(?:parameters|arguments)"),
                r"\s*\}",
                ("start", "after"),
                balanced=True,
            ),
            Opening("skip", r";\s*(?=\{)", where=("after",)),
            Opening("skip", r"<\|python_tag\|>"),
        ),
        r"<\|python_tag\|>|\{|;",
        special=("<|python_tag|>",),
        sign='"parameters": ',
        strict=(StrictCall(r'\{\s*"name"\s*:\s*"', 'NAME", "parameters": ', "}", pattern=True),),
    ),
    "mistral": AnswerFormat(
        (
            _thinking(*_BRACKETS),
            Opening(
                "call", _object(r"\[TOOL_CALLS\]\s*\["), rf"\s*{_ID}\}}\s*(?:\]|,(?=\s*\{{))", EVERYWHERE, balanced=True
            ),
            Opening("call", _object(""), rf"\s*{_ID}\}}\s*(?:\]|,(?=\s*\{{))", ("after",), balanced=True),
            Opening(
                "call",
                r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\]|(?=\{))",
                r"(?=\[TOOL_CALLS\])",
            ),
        ),
        r"\[TOOL_CALLS\]|\[THINK\]|\{",
        reasoning=_BRACKETS,
        special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", *_BRACKETS),
        sign=r"\[TOOL_CALLS\]",
    ),
    "deepseek": AnswerFormat(
        (
            _thinking(*_THINK),
            Opening(
                "call",
                r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n",
                r"(?:\s*```)?\s*<｜tool▁call▁end｜>",
            ),
            Opening("call", r"<｜tool▁call▁begin｜>(?P<name>[^<\n]+)<｜tool▁sep｜>", r"\s*<｜tool▁call▁end｜>"),
            Opening("skip", r"<｜tool▁calls▁(?:begin|end)｜>"),
        ),
        "<think>|<｜tool▁call",
        reasoning=_THINK,
        special=(*_THINK, *(f"<｜tool▁{own}｜>" for own in _TOOL_MARKERS)),
        sign="<｜tool▁calls▁begin｜>",
        strict=(
            StrictCall(_CALL, "function<｜tool▁sep｜>NAME\n```json\n", "\n```<｜tool▁call▁end｜>"),
            StrictCall(_CALL, "NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        ),
    ),
    "harmony": AnswerFormat(
        (
            Opening("call", rf"{_CHANNEL}{_TO}<\|channel\|>\w+{_MESSAGE}", _ENDS),
            Opening("call", rf"{_CHANNEL}<\|channel\|>\w+{_TO}{_MESSAGE}", _ENDS),
            Opening("reasoning", rf"{_CHANNEL}<\|channel\|>analysis<\|message\|>", _ENDS),
            Opening("skip", rf"{_CHANNEL}<\|channel\|>\w+{_MESSAGE}"),
            Opening("skip", r"<\|(?:end|return|call|start)\|>"),
        ),
        r"<\|(?:start|channel|end|return|call)\|>| to=",
        special=tuple(f"<|{own}|>" for own in ("start", "end", "message", "channel", "constrain", "return", "call")),
        sign=r"<\|channel\|>",
    ),
}
"""Families by name. A row of your own, or `FORMATS[name] = AnswerFormat(…)`, is found by its name and by its sign."""

CALLS = AnswerFormat(
    (
        Opening("call", _object(r"\[", "parameters"), r"\s*\}\s*(?:\]|,)", ("start",), balanced=True),
        Opening("call", _object("", "parameters"), r"\s*\}\s*(?:\]|,)", ("after",), balanced=True),
    ),
    r"\[|\{",
)
"""A JSON list of calls, which `tool_choice="required"` makes a model of any family write."""
ARGUMENTS = AnswerFormat((Opening("call", r"(?P<name>)(?=\{)", "(?!)", ("start",)),), r"\{")
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
