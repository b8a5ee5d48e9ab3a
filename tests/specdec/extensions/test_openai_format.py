"""OpenAI's form of what was generated."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import orjson
import pytest

from specdec.errors import InvalidInputError
from specdec.extensions.openai_format import Pieces, body_of, error_of, events, request_of, response_of, streamed, told
from specdec.model import SpeculativeModel
from specdec.requests.logprobs import TokenLogprobs
from specdec.requests.sampling import SamplingParams
from specdec.requests.text import Vocabulary


@pytest.mark.slow
@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.cases(1)
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
        ({"tool_choice": "required"}, "tool_choice='required': tools has no tool"),
        ({"function_call": {"name": "f"}}, "function_call=.* is not served; .* give tools and tool_choice in a chat"),
        ({"chat_template": "{{ x }}"}, "chat_template: this service takes no templates"),
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
        ({"response_format": {"type": "grammar", "grammar": "start: /a/"}}, "takes no grammar in Lark's syntax"),
    ],
)
def test_what_is_refused(more: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        request_of({**CHAT, **more}, True)


def test_grammars_in_larks_syntax_are_taken_where_the_service_says_so() -> None:
    body = {**CHAT, "response_format": {"type": "grammar", "grammar": "start: /a/"}}
    assert request_of(body, True, allow_lark=True)[1].grammar.kind == "lark"
    assert request_of({**CHAT, "response_format": {"type": "regex", "regex": "a"}}, True)[1].grammar.kind == "regex"


def test_an_assistant_that_said_nothing_and_prompts_that_are_none() -> None:
    turns = [{"role": "assistant", "content": None, "tool_calls": []}, *CHAT["messages"]]
    assert request_of({"messages": turns}, True)[0][0] == {**turns[0], "content": ""}
    for prompt in ([], None, {}):
        with pytest.raises(InvalidInputError, match=r"prompt=.*give a text"):
            request_of({"prompt": prompt}, False)


CALLED = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}]}


def test_tool_calls_and_options_of_the_template() -> None:
    more = {"continue_final_message": True, "chat_template_kwargs": {"x": 1}, "add_generation_prompt": None}
    prompt, params = request_of({"messages": [*CHAT["messages"], CALLED], **more}, True)
    assert prompt[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert prompt.options == {"x": 1, "add_generation_prompt": False, "continue_final_message": True}
    assert params == SamplingParams(temperature=1.0)
    for body in ({**CHAT, "continue_final_message": "yes"}, {**CHAT, "chat_template_kwargs": {"tokenize": False}}):
        with pytest.raises(InvalidInputError, match="allowed are"):
            request_of(body, True)
    with pytest.raises(InvalidInputError, match="unknown sampling option 'continue_final_message'"):
        request_of({"prompt": "a", "continue_final_message": True}, False)


@pytest.mark.parametrize("loads", [json.loads, orjson.loads])
def test_bodies(loads: Any) -> None:
    assert body_of(b'{"model": null}', "m", loads) == {"model": None} and body_of(b"{}", "m", loads) == {}
    for data, status in ((b"[" * 200_000, 400), (b'{"seed": ' + b"9" * 5000 + b"}", 400), (b'{"model": "n"}', 404)):
        with pytest.raises(InvalidInputError) as found:
            body_of(data, "m", loads)
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


class Sentences:
    """As SentencePiece's decoders: the space of the first token is dropped, and two tokens may have one text."""

    names = ("▁a", "b", "<0xE2>", "<0x82>", "<0xAC>", "b", "<s>", "▁")

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return self.names[token_id]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        data = b""
        for name in (self.names[i] for i in token_ids if not (skip_special_tokens and i == 6)):
            data += bytes([int(name[3:5], 16)]) if name.startswith("<0x") else name.replace("▁", " ").encode()
        return data.decode("utf-8", "replace").removeprefix(" ")


def with_alternatives(*token_ids: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(own, -0.5 - own, 0, tuple((i, -0.5 - i) for i in range(8))) for own in token_ids]


def test_tokens_are_pieces_of_the_text() -> None:
    """The bytes of all are the text's, and each begins at its offset: of spaces and parts of characters, too."""
    ids = [6, 0, 2, 3, 4, 1, 0, 6, 7, 5]
    text = Sentences().decode(ids, skip_special_tokens=True)
    found = told(Pieces(Vocabulary(Sentences())), with_alternatives(*ids), chat=True)
    assert found is not None and text == "a€b a b"
    assert b"".join(bytes(each["bytes"]) for each in found["content"]) == text.encode()
    assert [each["token"] for each in found["content"]][:4] == ["<s>", "a", "bytes:\\xe2", "bytes:\\x82"]
    found = told(Pieces(Vocabulary(Sentences())), with_alternatives(*ids), chat=False)
    assert found is not None and found["text_offset"] == [0, 0, 1, 1, 1, 2, 3, 5, 5, 6]
    whole = [pair for pair in zip(found["tokens"], found["text_offset"], strict=True) if pair[0][:1] in ("a", "b", " ")]
    assert all(text.startswith(token, at) for token, at in whole if not token.startswith("bytes:"))


def test_alternatives_of_equal_texts_are_all_there() -> None:
    """The token that was drawn has its own text and its own value, whichever others have that text."""
    for own in range(8):
        found = told(Pieces(Vocabulary(Sentences())), with_alternatives(0, own), chat=False)
        assert found is not None
        top, token = found["top_logprobs"][1], found["tokens"][1]
        assert len(top) == 8 and top[token] == found["token_logprobs"][1] == -0.5 - own
        assert sorted(top.values()) == [-0.5 - i for i in reversed(range(8))]
    (one,) = with_alternatives(5)
    found = told(Pieces(Vocabulary(Sentences())), [one._replace(top=((1, -0.1),))], chat=False)
    assert found is not None and found["top_logprobs"] == [{"token_id:1": -0.1, "b": -5.5}], "and it is there always"
    found = told(Pieces(Vocabulary(Sentences())), [one._replace(top=())], chat=False)
    assert found is not None and found["top_logprobs"] is None


@pytest.mark.slow
@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.cases(1)
def test_a_stream_tells_the_same_of_tokens_as_an_answer(chat: bool) -> None:
    options: dict[str, Any] = {"temperature": 30.0, "seed": 3, "logprobs": 20, "ignore_eos": True}

    async def read(model: SpeculativeModel, params: SamplingParams) -> list[Any]:
        each = [text async for text in events(model.stream_async("Tom", params), model.tokenizer, {}, chat, False)]
        return [json.loads(event.removeprefix("data: ")) for event in "".join(each).split("\n\n")[:-2]]

    with SpeculativeModel.from_pretrained("gsm-llama", device="cpu", max_num_seqs=1, max_model_len=128) as model:
        parts_of_characters = model.tokenizer.encode("日本 é", add_special_tokens=False)
        params = SamplingParams(12, allowed_token_ids=parts_of_characters, **options)
        done = model.generate("Tom", params)
        right = response_of(done, model.tokenizer, chat)["choices"][0]["logprobs"]
        parts = [part["choices"][0]["logprobs"] for part in asyncio.run(read(model, params))]
    assert {name: [one for part in parts for one in part[name]] for name in right} == right
    if chat:
        data = b"".join(bytes(one["bytes"]) for one in right["content"])
        assert data.decode("utf-8", "replace") == done[0].text and "\ufffd" in done[0].text
    else:
        assert {len(top) for top in right["top_logprobs"]} <= {20, 21}
