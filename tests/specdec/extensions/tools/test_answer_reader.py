"""Answers of five families: what their templates write is parsed into the message that it was written from."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.errors import InvalidInputError
from specdec.extensions.tools.answer_formats import FORMATS, format_of
from specdec.extensions.tools.answer_reader import AnswerParser, AnswerReader, answer_of, message_of
from specdec.extensions.tools.tool_use import ToolUse
from specdec.requests.chats import chat_ids, with_options, with_tool_calls
from tests.specdec.extensions.tools.families import ENDS, TEMPLATES, tokenizer_of

known = functools.cache(tokenizer_of)
USER = {"role": "user", "content": "Weather? <think> [TOOL_CALLS] <tool_call>"}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
MARKERS = '</tool_call> "x" </think> [TOOL_CALLS]; {"name": <｜tool▁call▁end｜> <|call|> ``` \\ }}]'


def call(name: str, arguments: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": "", "type": "function", "function": {"name": name, "arguments": text}}


def said(content: str | None, *calls: Any, reasoning: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {"role": "assistant", "content": content}
    found |= {"reasoning_content": reasoning} if reasoning else {}
    return found | ({"tool_calls": [*calls]} if calls else {})


ANSWERS = {
    "text": said("It is {warm} é."),
    "a call": said(None, call("weather", {"city": "Łódź", "days": [1, {"a": None}]})),
    "several calls": said(None, call("weather", {}), call("other-tool", {"b": {"c": []}}), call("weather", {"d": 1.5})),
    "text and a call": said("I look.", call("weather", {"city": "Rome"})),
    "markers in strings": said(None, call("weather", {"text": MARKERS, MARKERS: [MARKERS]}), call("weather", {"a": 1})),
    "wrong arguments": said(None, call("weather", '{"city": Rome'), call("weather", "[1]")),
    "reasoning": said("Hm.", reasoning='First "a", then <tool_call>\n\n{"name": 1}.'),
    "reasoning and calls": said(None, call("weather", {"a": "</think>"}), call("weather", {}), reasoning="Two of them"),
}
"""What models say; families that have no such form leave it out."""
ABSENT = {("llama3", "text and a call"), ("llama3", "reasoning"), ("llama3", "reasoning and calls")}
LATER = {("llama3", "wrong arguments")}
"""Without an end marker, arguments whose brackets are not closed take what follows."""


def ids_of(messages: list[Any], tokenizer: Any, **options: Any) -> list[int]:
    plain = [with_tool_calls(message) for message in messages]
    return chat_ids(with_options(plain, {"tools": TOOLS, **options}), tokenizer)


def canonical(family: str, answer: Any) -> tuple[list[int], list[int]]:
    """The prompt, and what the template writes of the answer behind it."""
    tokenizer = known(family)
    prompt = ids_of([USER], tokenizer)
    both = ids_of([USER, answer], tokenizer, add_generation_prompt=False)
    assert both[: len(prompt)] == prompt
    ends = tokenizer.convert_tokens_to_ids([ENDS[family], "<|call|>"])
    while both[-1] not in ends:  # a line's end
        both.pop()
    return prompt, both[len(prompt) :]


def read(family: str, prompt: list[int], ids: list[int], sizes: int, **use: Any) -> dict[str, Any]:
    """The message of these tokens, which come `sizes` at a time."""
    own = ToolUse(format=FORMATS[family], **({"reads_calls": True} | use))
    reader, parts = AnswerReader(own, known(family), prompt), []
    for at in range(0, len(ids), sizes):
        parts += reader.read(ids[at : at + sizes], at + sizes >= len(ids))
    found = message_of(parts)
    for each in found.get("tool_calls", ()):
        assert len(each["id"]) == 9
        each["id"] = ""
    return found


CASES = [(family, name) for family in TEMPLATES for name in ANSWERS if (family, name) not in ABSENT]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_what_the_template_writes_is_parsed_and_written_again(family: str, name: str) -> None:
    answer = ANSWERS[name]
    prompt, ids = canonical(family, answer)
    for sizes in (1, 3, len(ids)):
        found = read(family, prompt, ids, sizes)
        if (family, name) in LATER:
            assert "".join(c["function"]["arguments"] for c in found["tool_calls"]).startswith('{"city": Rome')
            continue
        assert found == answer
        assert canonical(family, found) == (prompt, ids)


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_chat_template_tells_the_family(family: str) -> None:
    assert format_of("auto", TEMPLATES[family]) is FORMATS[family] is format_of(family, None)


def test_other_templates_and_names() -> None:
    assert format_of("auto", None) is None and format_of("auto", {"default": "{{ x }}"}) is None
    with pytest.raises(InvalidInputError, match="format='x': allowed are auto, hermes, llama3"):
        format_of("x", None)


@pytest.mark.parametrize("family", TEMPLATES)
def test_without_tools_calls_are_text(family: str) -> None:
    prompt, ids = canonical(family, ANSWERS["a call"])
    found = read(family, prompt, ids, 1, reads_calls=False)
    assert "tool_calls" not in found and ("weather" in found["content"] or family == "harmony")
    assert read(family, *canonical(family, ANSWERS["text"]), 1, reads_calls=False) == ANSWERS["text"]


def test_the_first_call_alone() -> None:
    prompt, ids = canonical("hermes", ANSWERS["several calls"])
    assert read("hermes", prompt, ids, 1, one=True)["tool_calls"] == [call("weather", {})]


def parsed(family: str, text: str, prompt_end: str = "") -> dict[str, Any]:
    """The message of a text, which is the same however it is divided."""
    found = []
    for size in (1, 2, 7, len(text)):
        parser, parts = AnswerParser(FORMATS[family], prompt_end), []
        for at in range(0, len(text), size):
            parts += parser.feed(text[at : at + size])
        found.append(message_of(parts + parser.finish()))
        for each in found[-1].get("tool_calls", ()):
            each["id"] = ""
    assert all(one == found[0] for one in found)
    return found[0]


HERMES_CALL = '<tool_call>\n{"name": "f", "arguments": '


@pytest.mark.parametrize(
    ("family", "text", "right"),
    [
        ("hermes", '<tool_call>{"arguments": {"é": 1}, "name": "f"}</tool_call>', said(None, call("f", {"é": 1}))),
        ("hermes", f"{HERMES_CALL}get it}}\n</tool_call>\nyes", said("yes", call("f", "get it"))),
        ("hermes", f'{HERMES_CALL}{{"a": "b}}\n}}\n</tool_call>', said(None, call("f", '{"a": "b}'))),
        ("hermes", f'{HERMES_CALL}{{"a": 1}}\n</tool_call>', said(None, call("f", {"a": 1}))),
        ("hermes", f'{HERMES_CALL}{{"a": {{"b": 1}}', said(None, call("f", '{"a": {"b": 1}'))),
        ("hermes", f'{HERMES_CALL}{{"a": 1}}}}\n</tool_', said(None, call("f", {"a": 1}))),
        ("hermes", f'{HERMES_CALL}{{"a": "\\"</tool_call>', said(None, call("f", '{"a": "\\"</tool_call>'))),
        ("hermes", 'a <tool_call> {"b": 1}\n</tool_call>', said('a <tool_call> {"b": 1}\n</tool_call>')),
        ("hermes", '<tool_call>\n{"na', said('<tool_call>\n{"na')),
        ("hermes", "a <think>b</think> <tool_call> \n", said("a <think>b</think> <tool_call> \n")),
        ("hermes", "<think>a", said("", reasoning="a")),
        ("llama3", '{"name": "f"}', said('{"name": "f"}')),
        ("llama3", 'So {"name": "f", "parameters": {}}', said('So {"name": "f", "parameters": {}}')),
        ("llama3", '<|python_tag|>{"name": "f", "parameters": {}}', said(None, call("f", {}))),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}, "id": "1"}, {"name": "g", "arguments": {}}]',
            said(None, call("f", {"a": "]"}), call("g", {})),
        ),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": {}}}', said(None, call("f", {"a": {}}))),
        (
            "deepseek",
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            said(None, call("f", {"a": 1})),
        ),
        (
            "harmony",
            ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>',
            said(None, call("f", {"a": 1})),
        ),
    ],
)
def test_other_forms_and_wrong_ones(family: str, text: str, right: Any) -> None:
    """Nothing is lost: what is no call is content, and arguments are what the model wrote."""
    assert parsed(family, text) == right


def test_reasoning_that_the_prompt_has_opened() -> None:
    text = "a\n</think>\n\nb"
    assert parsed("deepseek", text, "<｜Assistant｜><think>\n") == said("b", reasoning="a")
    assert parsed("deepseek", text, "<｜Assistant｜>") == said(text)


RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}
"""As a tokenizer may bring it. Source: huggingface/transformers, docs of response parsing."""


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (
            "<think>hm</think>I look.<tool_call>\n<function=f>\n<parameter=a>\n{1}\n</parameter>\n"
            "</function>\n</tool_call>",
            said("I look.", call("f", {"a": "{1}"}), reasoning="hm"),
        ),
        ("Hm.<|im_end|>", said("Hm.")),
        ("Hm. STOP it", said("Hm.")),
    ],
)
def test_a_tokenizers_response_template(text: str, right: Any) -> None:
    """For a family that is no row of the table: its chat template shows calls in another form."""
    tokenizer = tokenizer_of("hermes")
    tokenizer.chat_template = "<|im_start|>{{ messages }}<tool_call>\n<function=name>, in <tool_call></tool_call>"
    ids, prompt = (tokenizer(own, add_special_tokens=False).input_ids for own in (text, "<|im_start|>assistant\n"))
    completion: Any = SimpleNamespace(token_ids=ids, prompt_token_ids=prompt, text=text)
    assert answer_of(completion, tokenizer) == said(text)
    tokenizer.response_template = RESPONSES
    found = answer_of(completion, tokenizer, stops=[" STOP"])
    for each in found.get("tool_calls", ()):
        each["id"] = ""
    assert found == right
    tokenizer.response_template = {**RESPONSES, "fields": {"content": {"content": "int"}}}
    assert answer_of(completion, tokenizer) == said(text), "what is not of the template's form is text"


def test_a_completion_as_a_message() -> None:
    prompt, ids = canonical("deepseek", ANSWERS["reasoning and calls"])
    completion: Any = SimpleNamespace(token_ids=ids, prompt_token_ids=prompt, text="x")
    found = answer_of(completion, known("deepseek"))
    assert [each["function"]["name"] for each in found["tool_calls"]] == ["weather", "weather"]
    assert answer_of(completion, SimpleNamespace()) == {"role": "assistant", "content": "x"}
    end = answer_of(completion, known("deepseek"), "deepseek", stops=["of them"])
    assert end == said("", reasoning="Two")
