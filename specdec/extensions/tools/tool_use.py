"""ToolUse: which tools a request has, what its answer must be because of them, and how that is read.

Source: OpenAI API reference, "Create chat completion": tools, tool_choice, parallel_tool_calls, strict.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdec.errors import InvalidInputError
from specdec.extensions.tools.answer_formats import ARGUMENTS, CALLS, FORMATS, AnswerFormat
from specdec.requests.grammar import Grammar
from specdec.values import Fields, Json, flag, refuse, wrong

FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
"""Fields of a body that a `ToolUse` is made of."""


@dataclass(frozen=True)
class ToolUse:
    """How the answers of one request are constrained and read.

    Attributes:
        tools: for the chat template. grammar: of the answer; None where any is allowed.
        format: how answers are read; None: as they are. reads_calls: whether they may have calls.
        name: of the tool that must be called. one: the first call alone counts.
    """

    tools: Sequence[Fields] = ()
    grammar: Grammar | None = None
    format: AnswerFormat | None = None
    reads_calls: bool = False
    name: str = ""
    one: bool = False


def tool_use(given: Fields, own: AnswerFormat | None, template: Any = None) -> ToolUse:
    """The `ToolUse` of a body, of which `FIELDS` are read. own: the format of the model's family, if it is known.
    template: its chat template, which tells whether the model reasons first.

    Raises:
        InvalidInputError: tools of another form, a choice that there is not, or a schema that cannot be kept to.
    """
    tools = _tools_of(given.get("tools"))
    choice, name = _choice_of(given.get("tool_choice"), list(tools))
    many = given.get("parallel_tool_calls")
    one = not flag("parallel_tool_calls", True if many is None else many)
    if not tools or choice == "none":
        return ToolUse(format=own)
    found = ToolUse([*given["tools"]], None, own, True, name, one or bool(name))
    if choice == "auto":
        strict = {name: tool for name, tool in tools.items() if flag("strict", tool.get("strict") or False)}
        return replace(found, grammar=_strict(strict, len(tools), own)) if strict else found
    schema = _schema_of(tools[name]) if name else _list_schema(tools, one)
    form = ARGUMENTS if name else CALLS
    end = "" if own is None else own.reasoning[1]
    if own is None or not end or end not in str(template):
        return replace(found, grammar=Grammar.json(schema), format=form)
    reasoning = [opening for opening in own.openings if opening.kind == "reasoning"]
    heads = "|".join((form.heads, *(opening.pattern for opening in reasoning)))
    # The grammar begins behind the reasoning's end: what comes before may be anything, so it is no call.
    calls = [replace(opening, where=("thought", "after")) for opening in form.openings]
    form = AnswerFormat((*reasoning, *calls), heads, own.reasoning, own.special)
    return replace(found, grammar=Grammar.json(schema, begin=end), format=form)


def _tools_of(given: Any) -> dict[str, Fields]:
    """The functions of a body's tools, by name."""
    found = {}
    if given is not None and not isinstance(given, (list, tuple)):
        raise refuse("tools", given, 'a list of {"type": "function", "function": {"name": …, "parameters": …}}')
    for tool in given or ():
        function = _function_of(tool)
        name = function.get("name")
        if not isinstance(name, str) or not isinstance(function.get("parameters", {}), Mapping):
            raise refuse("tools", tool, '{"type": "function", "function": {"name": …, "parameters": a JSON schema}}')
        found[name] = function
    return found


def _function_of(given: Any) -> Fields:
    """The field "function" of a tool or of a choice of one; {} where it has none."""
    function = given.get("function") if isinstance(given, Mapping) and given.get("type") == "function" else None
    return function if isinstance(function, Mapping) else {}


def _choice_of(given: Any, names: Sequence[str]) -> tuple[str, str]:
    """ "none", "auto", "required", or "named" with the tool's name."""
    if given is None:
        return "auto", ""
    name = _function_of(given).get("name")
    if name is None and given not in ("none", "auto", "required"):
        raise refuse("tool_choice", given, '"none", "auto", "required", {"type": "function", "function": {"name": …}}')
    if name is None and (given != "required" or names):
        return given, ""
    if name not in names:
        raise wrong("tool_choice", given, f"tools has {', '.join(names) or 'no tool'}")
    return "named", str(name)


def _schema_of(tool: Fields) -> Json:
    """A call's arguments are an object, whatever the schema says."""
    return {"type": "object", **(tool.get("parameters") or {})}


def _list_schema(tools: Mapping[str, Fields], one: bool) -> Json:
    """Of a list of calls, in the form of `CALLS`."""
    each = []
    for name, tool in tools.items():
        fields = {"name": {"const": name}, "parameters": _schema_of(tool)}
        each.append({"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False})
    found = {"type": "array", "minItems": 1, "items": each[0] if len(each) == 1 else {"anyOf": each}}
    return found | ({"maxItems": 1} if one else {})


def _strict(tools: Mapping[str, Fields], count: int, own: AnswerFormat | None) -> Grammar:
    """Free text in which calls follow their schemas. tools: the strict ones. count: of all; others were ruled out."""
    if own is None or not own.strict or len(tools) < count:
        known = ", ".join(name for name, each in FORMATS.items() if each.strict)
        why = f'with tool_choice="auto" it is served for the families {known}'
        if len(tools) < count:
            why = "only some tools have it"
        raise InvalidInputError(f'strict=True: {why}; give every tool or none strict, or tool_choice="required"')
    written = [
        form._asdict() | {"begin": form.begin_of(json.dumps(name)[1:-1]), "schema": _schema_of(tool)}
        for name, tool in tools.items()
        for form in own.strict
    ]
    return Grammar("structural_tag", json.dumps(written))
