"""Agents with OpenAI's client and the server: a scripted model says what the families' templates write."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
pytest.importorskip("openai")

from specdec.requests.chats import Chat, chat_ids
from tests.fakes import tiny_llama, wrap
from tests.specdec.extensions.server.running import Running
from tests.specdec.extensions.tools.families import TEMPLATES, tokenizer_of
from tests.specdec.extensions.tools.test_answer_reader import MARKERS, call, said

pytestmark = pytest.mark.slow
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


class Scripted(Running):
    """A model that says `answer` as its chat template writes it, whatever the prompt is."""

    def __init__(self) -> None:
        tokenizer = tokenizer_of(*TEMPLATES)
        target = tiny_llama(len(tokenizer))
        target.config.max_position_embeddings = 2048
        sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 512, "page_size": 16, "kv_cache_tokens": 2048}
        super().__init__({"max_body_bytes": 10**5}, wrap(target, tokenizer=tokenizer, max_model_len=2000, **sizes))
        self.answer: Any = None
        self.prompt: list[int] = []
        self._stream = self.model.stream_async
        self.model.stream_async = self.stream_async

    def written(self, messages: Any, answer: Any) -> list[int]:
        """The answer behind these messages, and the token that ends it."""
        both = Chat([*messages, answer])
        both.options = {**getattr(messages, "options", {}), "add_generation_prompt": False}
        ids = chat_ids(both, self.model.tokenizer)
        assert ids[: len(self.prompt)] == self.prompt
        while self.model.tokenizer.decode(ids[-1:]).isspace():  # a line's end behind the turn's
            ids.pop()
        return [*ids[len(self.prompt) :], 0]

    def stream_async(self, messages: Any, params: Any) -> Any:
        self.prompt = chat_ids(messages, self.model.tokenizer)
        params = replace(params, stop_token_ids=(0,), temperature=0.0)
        if params.grammar is None:
            ids, begin = self.written(messages, self.answer), len(self.prompt)
            script = {"prefix_allowed_tokens_fn": lambda _, before: [ids[len(before) - begin]]}
            params = replace(params, max_new_tokens=len(ids), **script)
        return self._stream(messages, params)

    def ask(self, messages: Any, stream: bool, **options: Any) -> tuple[dict[str, Any], str]:
        """The message, and how it ended."""
        own = {"model": "gsm-llama", "messages": messages, "tools": TOOLS, "max_tokens": 300} | options
        found = self.client.chat.completions.create(stream=stream, **own)
        if stream:
            return gathered(found)
        choice = found.choices[0]
        message = choice.message.model_dump(exclude_none=True)
        return {"content": None, **message}, choice.finish_reason


def gathered(stream: Any) -> tuple[dict[str, Any], str]:
    """The message of a stream's deltas."""
    message: dict[str, Any] = {"content": None}
    calls, reason = list[Any](), ""
    for chunk in stream:
        choice = chunk.choices[0]
        reason = choice.finish_reason or reason
        for name, value in choice.delta.model_dump(exclude_none=True).items():
            if name == "role":
                message["role"] = value
            elif name != "tool_calls":
                message[name] = (message.get(name) or "") + value
            elif len(value[0]["function"]) == 2:
                assert value[0]["index"] == len(calls)
                calls.append({key: own for key, own in value[0].items() if key != "index"})
            else:
                calls[value[0]["index"]]["function"]["arguments"] += value[0]["function"]["arguments"]
    return message | ({"tool_calls": calls} if calls else {}), reason


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    made = Scripted()
    yield made
    made.end()


def drawn(family: str, draw: random.Random) -> dict[str, Any]:
    """What a model may say: reasoning, text, calls, wrong arguments, markers inside strings."""
    words = [*"abc", "é{", '"', "\\", "\n", MARKERS, "<think>"]

    def value(depth: int = 0) -> Any:
        kinds = [lambda: draw.choice(words), lambda: draw.randrange(9), lambda: None]
        kinds += [] if depth > 1 else [lambda: [value(depth + 1)], lambda: {draw.choice(words): value(depth + 1)}]
        return draw.choice(kinds)()

    given = [{draw.choice(words): value() for _ in range(draw.randrange(3))} for _ in range(draw.randrange(4))]
    calls = [call("weather", one) for one in given]
    if calls and draw.random() < 0.3:
        wrong = ["[1]", "{'a': 1}", *(['{"a": b'] if family != "llama3" else [])]  # which has no end marker
        calls[-1] = call("weather", draw.choice(wrong))
    reasoning = draw.choice(["", "I think {so}", "a [TOOL_CALLS] of <tool_call>"]) if family != "llama3" else ""
    text = "Fine." if not calls else None if family == "llama3" else draw.choice([None, "I look:"])
    return said(text, *calls, reasoning=reasoning)


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**each, "id": ""} for each in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls} if calls else message


def converse(scripted: Scripted, family: str, answer: Any, stream: bool) -> None:
    """A question, the model's answer, the tools' results, and a last answer."""
    scripted.model.tokenizer.chat_template = TEMPLATES[family]
    messages: list[Any] = [{"role": "user", "content": "Warm?"}]
    scripted.answer = answer
    found, reason = scripted.ask(messages, stream)
    assert without_ids(found) == answer
    assert reason == ("tool_calls" if "tool_calls" in answer else "stop")
    results = [{"role": "tool", "content": "20", "tool_call_id": each["id"]} for each in found.get("tool_calls", ())]
    again = [*messages, found, *(results or [{"role": "user", "content": "And?"}])]
    before = [*scripted.prompt, *scripted.written(with_tools(messages), answer)[:-1]]
    scripted.answer = said("Yes.")
    assert without_ids(scripted.ask(again, stream)[0]) == scripted.answer
    assert scripted.prompt[: len(before)] == before


def with_tools(messages: Any) -> Any:
    chat = Chat(messages)
    chat.options = {"tools": TOOLS}
    return chat


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.cases(1)
def test_agents(scripted: Scripted, family: str, stream: bool) -> None:
    for seed in (1, 2):
        converse(scripted, family, drawn(family, random.Random(seed)), stream)


@pytest.mark.thorough
def test_two_hundred_conversations(scripted: Scripted) -> None:
    families = list(TEMPLATES)
    for i in range(200):
        family = families[i % 5]
        converse(scripted, family, drawn(family, random.Random(i)), i % 2 == 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.cases(1)
def test_calls_by_a_grammar(scripted: Scripted, stream: bool) -> None:
    pytest.importorskip("llguidance")
    scripted.model.tokenizer.chat_template = TEMPLATES["llama3"]
    messages = [{"role": "user", "content": "Warm?"}]
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        found, reason = scripted.ask(messages, stream, tool_choice=choice, parallel_tool_calls=False)
        (one,) = found["tool_calls"]
        assert one["function"]["name"] == "weather" and json.loads(one["function"]["arguments"]) == {"a": 1}
        assert reason == "tool_calls" and found["content"] is None
    scripted.answer = said('{"name": "weather", "parameters": {}}')
    assert scripted.ask(messages, stream, tool_choice="none")[0] == scripted.answer
