"""OpenAI's form of what was generated."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from specdec.errors import InvalidInputError
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from specdec.service.openai_format import body_of, error_of, events, request_of, response_of, streamed


@pytest.mark.slow
@pytest.mark.parametrize("chat", [True, False])
def test_log_probabilities_of_what_cannot_come_are_json(chat: bool) -> None:
    """A processed one of a token outside of top-k is -inf, which JSON has not."""
    params = SamplingParams(4, top_k=1, temperature=1.0, logprobs=3, logprobs_mode="processed")
    with SpeculativeModel.from_pretrained("gsm-llama", device="cpu", max_num_seqs=2, max_model_len=128) as model:
        found = model.generate(["What is 2 + 3?"], params)
        assert any(top[1] == float("-inf") for each in found[0].logprobs or () for top in each.top)
        text = json.dumps(response_of(found, model.tokenizer, chat), allow_nan=False)
    assert "-9999.0" in text


CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    "more",
    [
        {"tool_choice": "auto"},
        {"tool_choice": "none", "function_call": "none", "tools": [], "functions": []},
        {"modalities": ["text"], "parallel_tool_calls": True, "tools": None},
        {"echo": False, "best_of": 1, "suffix": "", "return_drafts": False},
        {"logprobs": False, "top_logprobs": 0},
        {"max_tokens": 256, "max_completion_tokens": 256, "user": "x"},
    ],
)
def test_what_asks_for_nothing_is_accepted(more: Any) -> None:
    assert request_of({**CHAT, **more}, True)[1] == SamplingParams(temperature=1.0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice='required' is not served; .* give response_format"),
        ({"prompt_logprobs": 0}, "prompt_logprobs: .* has no place for it"),
        ({"best_of": True}, "best_of=True is not served"),
        ({"echo": 0}, "echo=0 is not served"),
        ({"modalities": ["audio"]}, "modalities="),
        ({"logprobs": "yes"}, "logprobs='yes'"),
        ({"logprobs": 3}, "logprobs=3"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs=21: allowed is 0 … 20"),
        ({"logprobs": True, "top_logprobs": "3"}, "top_logprobs='3'"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens=4 and max_completion_tokens=5 are both"),
        ({"max_new_tokens": 4, "max_completion_tokens": 5}, "give one of them"),
        ({"messages": [{"role": "user", "content": None}]}, "content=None: give a text"),
    ],
)
def test_what_is_refused(more: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        request_of({**CHAT, **more}, True)


def test_an_assistant_that_said_nothing_and_prompts_that_are_none() -> None:
    turns = [{"role": "assistant", "content": None, "tool_calls": []}, *CHAT["messages"]]
    assert request_of({"messages": turns}, True)[0][0] == {**turns[0], "content": ""}
    for prompt in ([], None, {}):
        with pytest.raises(InvalidInputError, match=r"prompt=.*give a text"):
            request_of({"prompt": prompt}, False)


def test_bodies() -> None:
    assert body_of(b'{"model": null}', "m") == {"model": None} and body_of(b"{}", "m") == {}
    for data, status in ((b"[" * 200_000, 400), (b'{"seed": ' + b"9" * 5000 + b"}", 400), (b'{"model": "n"}', 404)):
        with pytest.raises(InvalidInputError) as found:
            body_of(data, "m")
        assert error_of(found.value)[0] == status
    assert error_of(RecursionError("x"))[0] == 400
    status, body = error_of(KeyError("secret"))
    assert status == 500 and set(body["error"]) == {"message", "type", "param", "code"} and "secret" not in str(body)


def test_what_is_streamed() -> None:
    assert streamed({}) == streamed({"stream": None, "stream_options": None}) == (False, False)
    assert streamed({"stream": True, "stream_options": {"include_usage": True}}) == (True, True)
    for body in ({"stream": 0}, {"stream_options": [1]}, {"stream_options": {"include_usage": "no"}}):
        with pytest.raises(InvalidInputError, match="stream"):
            streamed(body)


def test_updates_that_are_there_at_once_are_one_text_with_all_of_them() -> None:
    params = SamplingParams(6, temperature=1.0, n=3, seed=1, ignore_eos=True)

    async def read(model: SpeculativeModel) -> list[str]:
        stream = model.stream_async("Tom", params)
        await stream.start()
        return [text async for text in events(stream, model.tokenizer, {"id": "x"}, False, True)]

    with SpeculativeModel.from_pretrained("gsm-llama", device="cpu", max_num_seqs=3, max_model_len=128) as model:
        right = [one.text for one in model.generate("Tom", params)]
        found = asyncio.run(read(model))
    each = "".join(found).split("\n\n")
    assert each[-2:] == ["data: [DONE]", ""] and len(found) < len(each) - 1
    parts = [json.loads(event.removeprefix("data: ")) for event in each[:-2]]
    assert all(part["id"] == "x" and part["object"] == "text_completion" for part in parts)
    assert parts[-1]["usage"]["completion_tokens"] == 18
    texts = ["".join(c["text"] for part in parts for c in part["choices"] if c["index"] == i) for i in range(3)]
    assert texts == right
