"""The server, asked by OpenAI's client and by plain HTTP; the code of its page runs."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
openai = pytest.importorskip("openai")

from specdec import Grammar  # noqa: E402
from tests.specdec.extensions.server.running import CHAT, KEY, Running, ask  # noqa: E402

ROOT = Path(__file__).resolve().parents[4]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    made = Running({"max_requests_per_client": 3}, max_num_seqs=2, max_waiting_requests=1)
    yield made
    made.end()


def direct(running: Running, **options: Any) -> Any:
    return running.model.generate(CHAT, **({"max_new_tokens": 24} | options))[0]


@pytest.mark.thorough
def test_a_chat_is_what_generate_says(running: Running) -> None:
    found, right = ask(running), direct(running)
    assert found.choices[0].message.content == right.text and found.choices[0].finish_reason == "length"
    told = found.usage.completion_tokens_details
    assert found.usage.completion_tokens == 24 and found.usage.prompt_tokens == len(right.prompt_token_ids)
    assert told.accepted_prediction_tokens == right.pooled.accepted > 0
    assert told.rejected_prediction_tokens == right.pooled.drafted - right.pooled.accepted


def test_a_stream_is_the_same_in_parts(running: Running) -> None:
    parts = list(ask(running, stream=True, stream_options={"include_usage": True}))
    text = "".join(part.choices[0].delta.content for part in parts[:-1])
    assert text == direct(running).text and len(parts) > 3
    assert parts[0].choices[0].delta.role == "assistant" and parts[-2].choices[0].finish_reason == "length"
    assert parts[-1].choices == [] and parts[-1].usage.completion_tokens == 24


def test_sampling_options_and_log_probabilities(running: Running) -> None:
    own = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "frequency_penalty": 0.5, "logit_bias": {"70": -100}}
    found = ask(running, n=2, logprobs=True, top_logprobs=2, **own)
    right = running.model.generate(CHAT, max_new_tokens=24, n=2, logprobs=2, **{**own, "logit_bias": {70: -100}})
    for choice, completion in zip(found.choices, right, strict=True):
        assert choice.message.content == completion.text
        told = [one.logprob for one in choice.logprobs.content]
        # Not to the bit: a batch of another shape sums in another order.
        assert told == pytest.approx([one.logprob for one in completion.logprobs], abs=1e-4)
        assert all(len(one.top_logprobs) == 2 for one in choice.logprobs.content)
        assert bytes(b for one in choice.logprobs.content for b in one.bytes).decode() == completion.text
    text = running.client.completions.create(model="gsm-llama", prompt=["Tom", [5, 6, 7]], max_tokens=3, logprobs=1)
    assert [choice.index for choice in text.choices] == [0, 1]
    for told in (choice.logprobs for choice in text.choices):
        assert [told.text_offset[i] for i in range(3)] == [len("".join(told.tokens[:i])) for i in range(3)]
    own = {"model": "gsm-llama", "prompt": "Tom", "max_tokens": 9, "logprobs": 0, "temperature": 0}
    parts = [part.choices[0].logprobs for part in running.client.completions.create(**own, stream=True)]
    whole = running.client.completions.create(**own)
    assert [offset for part in parts for offset in part.text_offset] == whole.choices[0].logprobs.text_offset
    assert whole.id.startswith("cmpl-") and found.id.startswith("chatcmpl-")
    assert len(text.choices[1].logprobs.token_logprobs) == len(text.choices[0].logprobs.top_logprobs) == 3


def test_stop_and_a_response_format(running: Running) -> None:
    pytest.importorskip("llguidance")
    assert ask(running, stop=" =").choices[0].message.content == direct(running, stop=" =").text
    found = ask(running, response_format={"type": "regex", "regex": "[0-9]{3}"}).choices[0]
    assert found.message.content == direct(running, grammar=Grammar.regex("[0-9]{3}")).text
    assert re.fullmatch("[0-9]{3}", found.message.content) and found.finish_reason == "stop"


def test_a_time_limit_and_parts_of_a_message(running: Running) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": CHAT[0]["content"]}]}]
    assert ask(running, messages=parts).choices[0].message.content == direct(running).text
    found = ask(running, max_tokens=400, extra_body={"max_time": 0.0, "ignore_eos": True}).choices[0]
    assert (found.finish_reason, found.stop_reason) == ("length", "timeout")


@pytest.mark.parametrize(
    ("more", "status", "words"),
    [
        ({"tools": [{"type": "function"}]}, 400, "a JSON schema"),
        ({"functions": [{"name": "f"}]}, 400, "is not served; leave it out; give tools and tool_choice in a chat"),
        ({"temperature": -1}, 400, "temperature=-1"),
        ({"temprature": 1}, 400, "did you mean temperature"),
        ({"return_logits": True}, 400, "has no place for it"),
        ({"top_logprobs": 2}, 400, "without logprobs=true"),
        ({"messages": "text"}, 400, "messages: give a list"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "only text is served"),
        ({"messages": [{"role": "system"}]}, 400, "give a text"),
        ({"response_format": {"type": "poem"}}, 400, "response_format"),
        ({"max_tokens": 10**9, "strict_length": True}, 400, "max_new_tokens"),
        ({"model": "gpt"}, 404, "there is no model 'gpt'"),
        ({"user": "x" * 6000}, 413, "more than 5000 bytes"),
        (
            {"stream": True, "n": 4, "temperature": 1},
            400,
            "it may have 3 at once (max_requests_per_client)",
        ),
        ({"stream": True, "stream_options": "x"}, 400, "stream_options='x'"),
        ({"stream": "false"}, 400, "stream='false': allowed are True and False"),
        ({"logit_bias": {"9" * 4500: 1}}, 400, "logit_bias='999"),
        ({"temprature\ud800": 1}, 400, "the body is no JSON: no low surrogate"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, 400, "max_completion_tokens=5"),
    ],
)
def test_errors_have_a_status_and_openai_s_format(running: Running, more: Any, status: int, words: str) -> None:
    body = json.dumps({"model": "gsm-llama", "messages": CHAT, "temperature": 0} | more).encode()
    found, text = running.get("/v1/chat/completions", body)
    error = json.loads(text)["error"]
    assert found == status == error["code"] and words in error["message"] and error["type"].endswith("_error")
    assert running.idle()


def test_other_errors_and_pages(running: Running) -> None:
    assert running.get("/v1/chat/completions", b"{no")[0] == running.get("/v1/completions", b"[]")[0] == 400
    assert running.get("/v1/models", key=None)[0] == running.get("/v1/models", key="other")[0] == 401
    assert running.get("/v1/models", key=f"{KEY}s")[0] == 401
    deep = running.get("/v1/completions", b"[" * 4900)
    assert deep[0] == 400 and "the body is no JSON: depth limit exceeded" in json.loads(deep[1])["error"]["message"]
    assert running.get("/v1/nothing")[0] == 404 and running.get("/v1/completions")[0] == 405
    assert json.loads(running.get("/v1/models")[1])["data"][0]["id"] == "gsm-llama"
    assert json.loads(running.get("/v1/models/gsm-llama")[1])["object"] == "model"
    unknown = running.get("/v1/models/a/b")
    assert unknown[0] == 404 and "there is no model 'a/b'" in json.loads(unknown[1])["error"]["message"]
    assert running.get("/health", key=None) == (200, '{"status": "ok"}')
    for wrong in ({"type": "grammar", "grammar": "start: /a/"}, {"type": "regex", "regex": "("}):
        assert running.get("/v1/completions", json.dumps({"prompt": "a", "response_format": wrong}).encode())[0] == 400
    heads = [running.raw("HEAD", path, f"bearer {KEY}")[0] for path in ("/v1/models", "/health", "/v1/completions")]
    assert heads == [200, 200, 405] and running.raw("OPTIONS", "/v1/models", f"bearer {KEY}")[0] == 405
    assert "specdec_requests_finished_total " in running.get("/metrics", key=None)[1]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_cancels_its_request(running: Running, stream: bool) -> None:
    before = running.model.metrics()["requests_dropped_total"]
    own = {"max_tokens": 400, "extra_body": {"ignore_eos": True}, "stream": stream, "timeout": 0.3}
    try:
        found = ask(running, **own)
        next(iter(found))
        found.close()
    except openai.APITimeoutError:
        assert not stream
    assert running.idle()
    assert running.model.metrics()["requests_dropped_total"] == before + 1


def test_a_full_queue_is_told_by_429(running: Running) -> None:
    streams = [ask(running, max_tokens=400, stream=True, extra_body={"ignore_eos": True}) for _ in range(3)]
    found, text = running.get("/v1/chat/completions", json.dumps({"messages": CHAT}).encode())
    assert found == 429 and "ask again when some have ended" in json.loads(text)["error"]["message"]
    for each in streams:
        each.close()
    assert running.idle()


@pytest.mark.thorough
def test_a_body_that_does_not_arrive_is_refused_and_holds_up_no_end() -> None:
    running = Running({"drain_seconds": 0.2, "body_seconds": 0.3})
    with running.begin_body() as one:
        answer = b"".join(iter(lambda: one.recv(4096), b"")).decode()
    assert answer.startswith("HTTP/1.1 408 ") and "has not arrived within 0.3 s" in answer
    running.service.settings = replace(running.service.settings, body_seconds=600.0)
    with running.begin_body():
        time.sleep(0.3)
        begun = time.monotonic()
        running.end()
        assert not running.thread.is_alive() and time.monotonic() - begun < 20


def asked_meanwhile(running: Running, found: dict[str, Any], max_tokens: int) -> threading.Thread:
    """A thread whose request runs now, and whose answer will be `found["done"]`."""
    asking = threading.Thread(
        target=lambda: found.update(done=ask(running, max_tokens=max_tokens, extra_body={"ignore_eos": True}))
    )
    asking.start()
    while not running.model.engine.scheduler.running:
        time.sleep(0.002)
    return asking


@pytest.mark.thorough
def test_a_signal_lets_running_requests_end_and_refuses_new_ones() -> None:
    running, found = Running({"keys": ()}), dict[str, Any]()
    right = direct(running, max_new_tokens=150, ignore_eos=True).text
    asking = asked_meanwhile(running, found, 150)
    running.drain()
    refused = running.get("/v1/completions", json.dumps({"prompt": "Tom"}).encode())
    asking.join()
    running.thread.join(60)
    assert found["done"].choices[0].message.content == right
    assert refused[0] == 503 and "ends what it has" in refused[1], "in the midst of the running request"


def test_at_the_limit_requests_are_cancelled_and_answered() -> None:
    running, found = Running({"drain_seconds": 0.05}), dict[str, Any]()
    asking = asked_meanwhile(running, found, 400)
    running.end()
    asking.join()
    assert found["done"].choices[0].stop_reason == "cancelled"
    assert not running.thread.is_alive()


@pytest.mark.thorough
def test_the_code_of_the_page_runs(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "service.md").read_text("utf-8")
    client, calls, metrics = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(client.replace("http://127.0.0.1:8000", running.url).replace('"none"', repr(KEY)), {})
    assert capsys.readouterr().out.startswith("Tom has 3*12")
    names: dict[str, Any] = {"model": running.model, "prompts": ["Tom"], "prompt": "Ann"}
    body = "".join(f"    {line}\n" for line in calls.splitlines())
    exec(f"async def main():\n{body}    return completions\n", names)
    assert len(asyncio.run(names["main"]())[0].token_ids) > 1
    exec(metrics, names)
    assert "specdec_requests_running 0.0\n" in capsys.readouterr().out
