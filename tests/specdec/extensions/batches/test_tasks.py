"""What a row asks, in our own form and in OpenAI's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdec.extensions.batches.lines import Line
from specdec.extensions.batches.tasks import Task, TaskDefaults, task_of
from specdec.requests.sampling import SamplingParams

RUN = TaskDefaults(SamplingParams(max_new_tokens=9, temperature=0.5), seed=3, name="tiny")
MESSAGES = [{"role": "user", "content": "a"}]


def task(row: Any, number: int = 1, asking: TaskDefaults = RUN) -> Task:
    return task_of(Line(number, json.dumps(row).encode()), asking)


def chat(**body: Any) -> dict[str, Any]:
    return {"custom_id": "q", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": MESSAGES, **body}}


def text(**body: Any) -> dict[str, Any]:
    return {"custom_id": "q", "method": "POST", "url": "/v1/completions", "body": {"prompt": "ab", **body}}


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "ab"}, "ab"),
        ({"messages": MESSAGES}, MESSAGES),
        ({"token_ids": [1, 2]}, [1, 2]),
        ({"prompt": None, "token_ids": [3]}, [3]),
        (chat(), MESSAGES),
        (text(), "ab"),
        (text(prompt=["ab"]), "ab"),
        (text(prompt=[4, 5]), [4, 5]),
    ],
)
def test_prompts(row: Any, prompt: Any) -> None:
    found = task(row)
    assert (found.error, found.prompt) == ("", prompt)
    assert (found.params.max_new_tokens, found.params.temperature) == (9, 0.5)


def test_seeds_are_of_keys_of_lines_or_of_the_run() -> None:
    """A row without a key does not draw as the row whose key is its number."""
    row = {"prompt": "a"}
    by_line, by_key = task(row, 7).params.seed, task(row | {"id": 7}, 1).params.seed
    assert by_line not in (None, by_key) and by_key is not None
    assert task(row | {"id": "7"}, 2).params.seed == by_key and task(row, 8).params.seed != by_line
    own = TaskDefaults(SamplingParams(temperature=0.5, seed=11), seed=3)
    assert task(row, 7, own).params.seed == task(row | {"id": 1}, 1, own).params.seed == 11
    assert task(row | {"seed": 5}, 7, own).params.seed == task(row | {"seed": 5}).params.seed == 5


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"max_tokens": 4, "stop": "x"}, {"max_new_tokens": 4, "stop": ("x",)}),
        ({"max_completion_tokens": 4, "n": 2, "seed": 5}, {"max_new_tokens": 4, "n": 2, "seed": 5}),
        ({"logit_bias": {"7": -1}, "presence_penalty": 0.5}, {"logit_bias": ((7, -1.0),), "presence_penalty": 0.5}),
        ({"top_p": None, "stop": None}, {"top_p": 1.0, "stop": ()}),
        ({"logprobs": 3}, {"logprobs": 3}),
    ],
)
def test_options_of_rows(options: dict[str, Any], expected: dict[str, Any]) -> None:
    for row in ({"prompt": "a", **options}, text(**options)):
        found = task(row)
        assert found.error == "" and {name: getattr(found.params, name) for name in expected} == expected


def test_what_only_bodies_have() -> None:
    found = task(chat(logprobs=True, top_logprobs=2, model="m", user="u", stream=False, tools=[], tool_choice="none"))
    assert (found.error, found.params.logprobs, found.kept, found.form) == ("", 2, {"model": "m"}, "chat.completion")
    assert task(chat(logprobs=True)).params.logprobs == 0 and task(chat(logprobs=False)).params.logprobs is None
    assert task(text()).kept == {"model": "tiny"} and task(text()).form == "text_completion"
    grammar = task(chat(response_format={"type": "json_object"})).params.grammar
    assert grammar is not None and grammar.kind == "json"
    assert task(chat(response_format={"type": "text"})).params.grammar is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "InvalidInputError: a row has one of prompt, messages, token_ids, not none of them"),
        ({"prompt": "a", "token_ids": [1]}, "not prompt and token_ids"),
        ({"prompt": 5}, "prompt=5: allowed is one text"),
        ({"prompt": ["a", "b"]}, "allowed is one text"),
        ({"messages": "a"}, "messages='a': allowed is a list of chat messages"),
        ({"messages": []}, "allowed is a list of chat messages"),
        ({"token_ids": []}, "allowed is a list of token ids"),
        ({"token_ids": [1, True]}, "allowed is a list of token ids"),
        ({"prompt": "a", "temperature": "hot"}, "temperature='hot': allowed is"),
        ({"prompt": "a", "temperature": [0.5]}, "temperature="),
        ({"prompt": "a", "stop": 5}, "stop=5: allowed is"),
        ({"prompt": "a", "max_tokens": 4, "max_new_tokens": 5}, "max_tokens=4 and max_new_tokens=5 are both"),
        ({"prompt": "a", "temprature": 1}, "unknown field 'temprature': did you mean temperature"),
        ({"prompt": "a", "answer": "7"}, 'fields of your own go into "metadata"'),
        ({"prompt": "a", "do_sample": True}, "temperature=0 is greedy"),
        ({"prompt": "a", "return_logits": True}, "ask for logprobs"),
        ({"prompt": "a", "logits_processor": "x"}, "logits_processor="),
        ({"prompt": "a", "id": 1.5}, "a key is a text or a whole number"),
        (chat(stream=True), "stream=True is not served; leave it out"),
        (chat(tools=["function"]), "tools="),
        (chat(messages=None), "a row has one of"),
        (text(best_of=3), "best_of=3 is not served"),
        ({**text(), "url": "/v1/embeddings"}, "method and url are 'POST' '/v1/embeddings': allowed is POST with"),
        ({**text(), "method": "GET"}, "method and url are 'GET'"),
        ({**text(), "custom_id": 5}, "custom_id=5: a text is needed"),
        ({**text(), "body": "x"}, "body='x': a JSON object is needed"),
        (chat(response_format={"type": "xml"}), "response_format"),
        (chat(frobnicate=1), "unknown field 'frobnicate'"),
    ],
)
def test_a_row_that_cannot_be_asked_says_why(row: Any, message: str) -> None:
    found = task(row)
    assert found.error.startswith("InvalidInputError: ") and message in found.error, found.error


def test_rows_draw_by_their_keys_and_not_by_their_places() -> None:
    first, moved = task({"id": "x", "prompt": "a"}, 1), task({"prompt": "b", "key": "x"}, 9)
    assert first.params.seed == moved.params.seed is not None
    others = [task({"id": "y", "prompt": "a"}), task({"prompt": "a"}, 1), task({"prompt": "a"}, 2)]
    others += [task({"id": "x", "prompt": "a"}, asking=TaskDefaults(seed=4)), task({"id": "line 1", "prompt": "a"})]
    assert len({one.params.seed for one in [first, *others]}) == 6
    assert task({"id": "x", "prompt": "a", "seed": 5}).params.seed == 5


def test_a_key_that_is_no_unicode_is_one() -> None:
    assert task({"id": "\ud800", "prompt": "a"}).params.seed is not None


def test_a_bias_of_a_huge_key_is_an_error_of_its_row() -> None:
    found = task({"prompt": "a", "logit_bias": {"9" * 5000: 1}})
    assert found.error.startswith("InvalidInputError: logit_bias='999") and len(found.error) < 400


CALLED = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}]}


@pytest.mark.parametrize("make", [chat, lambda **fields: {"messages": MESSAGES, **fields}])
def test_tool_calls_and_options_of_the_template(make: Any) -> None:
    """In both forms as in the service."""
    more = {"continue_final_message": True, "chat_template_kwargs": {"x": 1}}
    found = task(make(messages=[*MESSAGES, CALLED], **more))
    assert found.error == "" and found.prompt[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert found.prompt.options == {"x": 1, "add_generation_prompt": False, "continue_final_message": True}
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert task(make(messages=parts)).prompt == [{"role": "user", "content": "ab"}]
    odd = json.loads(json.dumps(CALLED).replace("1}", "1"))
    assert task(make(messages=[odd])).prompt[0]["tool_calls"][0]["function"]["arguments"] == '{"a": 1'


def test_options_of_the_template_belong_to_messages() -> None:
    assert "continue_final_message: only messages" in task({"prompt": "a", "continue_final_message": True}).error
    assert "unknown field 'continue_final_message'" in task(text(continue_final_message=True)).error
