"""Which tools a request has, and what its answer must be because of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdec.errors import InvalidInputError
from specdec.extensions.openai_format import request_of, tools_of
from specdec.extensions.tools.answer_formats import ARGUMENTS, CALLS, FORMATS
from specdec.extensions.tools.answer_reader import AnswerParser, message_of
from specdec.extensions.tools.tool_use import ToolUse, tool_use

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


TOOLS = [tool("f"), tool("g")]
HERMES = FORMATS["hermes"]


def test_auto_none_and_no_tools() -> None:
    assert tool_use({}, HERMES) == tool_use({"tools": TOOLS, "tool_choice": "none"}, HERMES) == ToolUse(format=HERMES)
    for choice in (None, "auto"):
        found = tool_use({"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": None}, HERMES)
        assert found == ToolUse(TOOLS, None, HERMES, True)
    assert tool_use({"tools": TOOLS, "parallel_tool_calls": False}, HERMES).one
    assert tools_of({"tools": TOOLS}, False) == ToolUse()


def test_required_is_a_list_of_calls() -> None:
    found = tool_use({"tools": TOOLS, "tool_choice": "required"}, None)
    assert found.grammar is not None and found.format is CALLS and found.grammar.begin is None
    schema = json.loads(found.grammar.source)
    each = [one["properties"] for one in schema["items"]["anyOf"]]
    assert each == [{"name": {"const": name}, "parameters": SCHEMA} for name in "fg"] and "maxItems" not in schema
    one = tool_use({"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False}, HERMES, "no thoughts")
    assert one.grammar is not None and json.loads(one.grammar.source)["maxItems"] == 1 and one.grammar.begin is None


def test_a_tool_by_name_behind_the_reasoning() -> None:
    found = tool_use({"tools": TOOLS, "tool_choice": named("g")}, HERMES, "<think> and </think>")
    assert found.grammar is not None and found.grammar.begin == "</think>" and found.name == "g" and found.one
    assert json.loads(found.grammar.source) == SCHEMA and found.format is not None
    parser = AnswerParser(found.format, "", True, found.name)
    message = message_of(parser.feed('<think>\nhm\n</think>\n\n{"a": "]}"}') + parser.finish())
    assert message["reasoning_content"] == "hm" and message["content"] is None
    assert message["tool_calls"][0]["function"] == {"name": "g", "arguments": '{"a": "]}"}'}
    closed = AnswerParser(found.format, "<think>\n\n</think>\n\n", True, found.name)
    assert message_of(closed.feed('{"a": 1}') + closed.finish())["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    parser, text = AnswerParser(found.format, "", True, found.name), '{"a": 1}'
    assert message_of(parser.feed(text) + parser.finish()) == {"role": "assistant", "content": text}


@pytest.mark.parametrize("size", [1, 2, 99])
def test_lists_of_calls_and_arguments_are_read(size: int) -> None:
    text = '[ {"name": "f", "parameters": {"a": {"b": "}, {"}}} , {"name": "g", "parameters": {}}]'
    parser, parts = AnswerParser(CALLS), []
    for at in range(0, len(text), size):
        parts += parser.feed(text[at : at + size])
    message = message_of(parts + parser.finish())
    each = [call["function"] for call in message["tool_calls"]]
    assert each == [{"name": "f", "arguments": '{"a": {"b": "}, {"}}'}, {"name": "g", "arguments": "{}"}]
    parser = AnswerParser(ARGUMENTS, name="f")
    message = message_of(parser.feed('{"a": {}}') + parser.finish())
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": {}}'}


def test_strict_arguments() -> None:
    strict = {"tools": [tool("f", strict=True), tool("g", strict=True)]}
    found = tool_use(strict, HERMES)
    assert found.grammar is not None and found.grammar.kind == "structural_tag" and found.reads_calls
    tags = json.loads(found.grammar.source)
    assert [tag["begin"] for tag in tags] == [f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in "fg"]
    assert all(tag["end"] == "}\n</tool_call>" and tag["schema"] == SCHEMA for tag in tags)
    for given, own, message in (
        (strict, None, 'with tool_choice="auto" it is served for the families hermes, llama3, deepseek'),
        ({"tools": [tool("f", strict=True), tool("g")]}, HERMES, "only some tools have it"),
    ):
        with pytest.raises(InvalidInputError, match=f"strict=True: {message}; .* tool_choice=.required"):
            tool_use(given, own)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tools": "f"}, "tools='f': allowed is a list"),
        ({"tools": [{"type": "web_search"}]}, "tools=.*allowed is .*a JSON schema"),
        ({"tools": [tool("f", parameters=[])]}, "a JSON schema"),
        ({"tools": TOOLS, "tool_choice": "any"}, 'tool_choice=\'any\': allowed is "none", "auto", "required"'),
        ({"tools": TOOLS, "tool_choice": named("h")}, "tool_choice=.*: tools has f, g"),
        ({"tool_choice": named("h")}, "tools has no tool"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls='no'"),
        ({"tools": [tool("f", strict="yes")]}, "strict='yes'"),
    ],
)
def test_what_is_refused(given: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        tool_use(given, HERMES)


def test_bodies_with_tools() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "tool_choice": "required"}
    prompt, params = request_of(body, True)
    assert prompt.options["tools"] == TOOLS and params.grammar == tools_of(body, True).grammar
    prompt, params = request_of({**body, "tool_choice": "none"}, True)
    assert prompt == body["messages"] and not hasattr(prompt, "options") and params.grammar is None
    with pytest.raises(InvalidInputError, match="response_format and tools that constrain"):
        request_of({**body, "response_format": {"type": "json_object"}}, True)
