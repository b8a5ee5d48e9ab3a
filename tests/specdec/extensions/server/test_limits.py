"""What a server refuses, by which counts, and that one client takes nothing from others."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
pytest.importorskip("openai")

from starlette.requests import Request

from specdec.errors import InvalidInputError, QueueFullError
from specdec.extensions.server.clients import Clients
from specdec.extensions.server.record import Refusal, RequestRecord
from specdec.extensions.server.server_settings import ServerSettings
from specdec.requests.grammar import Grammar
from tests.specdec.extensions.server.running import CHAT, Running, ask

LONG = {"max_tokens": 400, "ignore_eos": True}
KEYS = ("first", "second", "third")


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    sizes = {"max_num_seqs": 4, "max_waiting_requests": 2}
    made = Running({"keys": KEYS, "max_n": 3, "max_requests_per_client": 3, "max_grammar_bytes": 50}, **sizes)
    yield made
    made.end()


def post(running: Running, key: str, path: str = "/v1/completions", **body: Any) -> tuple[int, Any, dict[str, str]]:
    status, text, headers = running.answer(path, json.dumps({"max_tokens": 2} | body).encode(), key)
    return status, json.loads(text), headers


def request(host: str | None, authorization: str = "") -> Request:
    headers = [(b"authorization", authorization.encode())]
    return Request({"type": "http", "headers": headers, "client": None if host is None else (host, 1)})


def test_one_client_fills_no_queue_for_others(running: Running) -> None:
    running.client.api_key = "first"
    streams = [ask(running, stream=True, max_tokens=400, extra_body={"ignore_eos": True}) for _ in range(3)]
    status, found, headers = post(running, "first", prompt="Tom")
    assert status == 429 and headers["retry-after"] == "1"
    assert "beside 3 of this client: it may have 3 at once (max_requests_per_client)" in found["error"]["message"]
    assert post(running, "second", prompt="Tom")[0] == 200
    for each in streams:
        each.close()
    assert running.idle() and post(running, "first", prompt="Tom")[0] == 200
    assert running.count(status="429", reason="client_limit") == 1
    assert running.count(status="499", reason="client_gone") == 3


def test_samples_and_prompts_count_each(running: Running) -> None:
    assert post(running, "first", prompt="Tom", n=3)[0] == 200
    for body, reason, words in (
        ({"prompt": "Tom", "n": 4}, "max_n", "4 completions of a prompt (n): at most 3 are served (max_n)"),
        ({"prompt": ["Tom"] * 2, "n": 2}, "client_limit", "4 completions (prompts times n) beside 0 of this client"),
        ({"prompt": [[5, 6]] * 4}, "client_limit", "ask for fewer in a request"),
    ):
        before = running.count(status="400", reason=reason)
        status, found, _ = post(running, "first", **body)
        assert status == 400 and words in found["error"]["message"] and running.idle()
        assert running.count(status="400", reason=reason) == before + 1
    assert running.idle()


def test_all_clients_together_are_limited(running: Running) -> None:
    running.client.api_key = "first"
    own = {"stream": True, "max_tokens": 400, "extra_body": {"ignore_eos": True}, "n": 3, "temperature": 1}
    streams = [ask(running, **own)]
    running.client.api_key = "second"
    streams.append(ask(running, **own))
    status, found, headers = post(running, "third", prompt="Tom")
    assert status == 429 and "6 completions run or wait" in found["error"]["message"] and headers["retry-after"] == "1"
    for each in streams:
        each.close()
    assert running.idle()


def test_a_large_grammar_is_refused(running: Running) -> None:
    schema = {"type": "object", "properties": {f"a{i}": {"type": "integer"} for i in range(9)}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    status, found, _ = post(running, "first", "/v1/chat/completions", messages=CHAT, response_format=form)
    assert status == 400 and "more than 50 bytes of a grammar" in found["error"]["message"]
    short = {"type": "regex", "regex": "a" * 51}
    status, found, _ = post(running, "first", "/v1/chat/completions", messages=CHAT, response_format=short)
    assert status == 400 and "at most 50 are served (max_grammar_bytes)" in found["error"]["message"]


def test_a_large_schema_is_refused_before_it_is_written_out(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing one of 560 KB holds up all threads for 11 ms; a body without one may be as large."""
    monkeypatch.setattr(Grammar, "of_response_format", None)
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": list(range(50))}}}
    status, found, _ = post(running, "first", "/v1/chat/completions", messages=CHAT, response_format=form)
    assert status == 400 and "at most 50 are served (max_grammar_bytes)" in found["error"]["message"]
    assert post(running, "first", "/v1/chat/completions", messages=CHAT, user="a" * 60)[0] == 200


def test_only_what_becomes_the_grammar_is_measured(running: Running) -> None:
    """A long description beside a short schema, which is no part of it; a schema that is not asked for."""
    named = {"name": "a", "description": "b" * 99, "schema": {"type": "integer"}}
    form = {"type": "json_schema", "json_schema": named}
    assert post(running, "first", "/v1/chat/completions", messages=CHAT, response_format=form)[0] == 200
    unread = {"type": "text", "json_schema": {"name": "a", "schema": {"enum": list(range(50))}}}
    assert post(running, "first", "/v1/chat/completions", messages=CHAT, response_format=unread)[0] == 200


def test_pages_of_the_interface_are_not_there(running: Running) -> None:
    assert [running.get(path)[0] for path in ("/docs", "/redoc", "/openapi.json")] == [404] * 3


def test_a_server_that_ends_is_not_ready_and_is_kept(running: Running) -> None:
    assert [running.get(path) for path in ("/ready", "/health")] == [(200, '{"status": "ok"}')] * 2
    running.service.draining = True
    assert running.get("/ready") == (503, '{"status": "draining"}')
    assert running.get("/health") == (200, '{"status": "draining"}')
    running.service.draining = False


def test_a_round_that_does_not_end_is_seen(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    age = {"round_age_seconds": 61.0}
    monkeypatch.setattr(running.model, "metrics", lambda: age)
    assert [running.get(path) for path in ("/ready", "/health")] == [(503, '{"status": "stalled"}')] * 2
    age["round_age_seconds"] = 59.0
    assert running.get("/ready")[0] == 200


def logged(caplog: pytest.LogCaptureFixture, count: int) -> list[Any]:
    """Records of the server's log, waiting for so many: a line is written behind the answer."""
    end = time.monotonic() + 10
    while len(found := [each for each in caplog.records if each.name == "specdec.server"]) < count:
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def test_each_request_has_one_line(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("specdec.server").propagate = True
    with caplog.at_level(logging.INFO, "specdec.server"):
        body = json.dumps({"prompt": "Tom has 3", "max_tokens": 4, "temperature": 0}).encode()
        given = running.answer("/v1/completions", body, "second", **{"X-Request-Id": "mine-1"})
        made = running.answer("/v1/completions", body, "second", **{"X-Request-Id": "not one\tword"})
        post(running, "second", prompt="")
        running.get("/v1/models", key="wrong")
        running.get("/v1/no%0alines", key="first")
        lines = logged(caplog, 5)
    first, second, third, fourth, fifth = [record.fields for record in lines]
    assert given[2]["x-request-id"] == first["id"] == "mine-1"
    assert made[2]["x-request-id"] == second["id"] and len(second["id"]) == 32
    assert first["client"] == "key 2" and first["address"] == "127.0.0.1" and first["path"] == "/v1/completions"
    assert (first["status"], first["prompt_tokens"], first["new_tokens"]) == (200, 5, 4)
    assert 0 < first["first_token_s"] <= first["total_s"] and first["accepted"] <= first["drafts"] > 0
    assert "reason" not in first
    assert third["status"] == 400 and third["reason"] == "InvalidInputError" and "empty" in third["error"]
    assert fourth["status"] == 401 and fourth["reason"] == "wrong_key"
    assert fifth["status"] == 404 and r'path="/v1/no\nlines"' in lines[-1].getMessage()
    assert 'id=mine-1 client="key 2" address=127.0.0.1' in lines[0].getMessage()


def test_an_error_of_the_server_has_a_line_of_its_own(
    running: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*_: Any) -> Any:
        raise ZeroDivisionError("planted")

    logging.getLogger("specdec.server").propagate = True
    monkeypatch.setattr(running.model, "stream_async", faulty)
    with caplog.at_level(logging.INFO, "specdec.server"):
        status, found, headers = post(running, "first", prompt="Tom")
        error, line = logged(caplog, 2)
    assert status == 500 and found["error"]["message"] == "the server failed; its log says why"
    assert (
        error.levelname == "ERROR"
        and error.exc_info
        and headers.get("x-request-id", line.fields["id"]) in error.getMessage()
    )
    assert line.levelname == "WARNING" and line.fields["reason"] == "ZeroDivisionError"


def test_numbers_are_those_of_the_requests(running: Running) -> None:
    def numbers() -> dict[str, float]:
        metrics = running.service.monitor.registry.collect()
        return {each.name: each.value for metric in metrics for each in metric.samples if not each.labels}

    before = numbers()
    done = post(running, "first", prompt=["Tom has 3", "Ann"], max_tokens=5, ignore_eos=True)[1]
    assert running.idle()
    more = {name: value - before[name] for name, value in numbers().items()}
    assert more["specdec_time_to_first_token_seconds_count"] == more["specdec_request_seconds_count"] == 1
    assert more["specdec_queue_seconds_count"] == more["specdec_time_per_output_token_seconds_count"] == 2
    assert more["specdec_requests_finished_total"] == 2
    assert more["specdec_generated_tokens_total"] == done["usage"]["completion_tokens"] == 10
    told = running.get("/metrics", key=None)[1]
    assert 'specdec_http_requests_total{path="/v1/completions",reason="",status="200"}' in told
    assert "specdec_http_in_flight 0.0" in told


def test_clients_are_keys_or_addresses() -> None:
    several, one = Clients(("a", "b"), None, None), Clients(("a",), None, None)
    assert several.named(request("1.2.3.4", "Bearer b")) == "key 2"
    assert one.named(request("1.2.3.4", "bearer a")) == Clients((), None, None).named(request("1.2.3.4")) == "1.2.3.4"
    assert one.named(request("2001:db8::1:2:3:4", "Bearer a")) == one.named(request("2001:db8::9", "Bearer a"))
    assert one.named(request(None, "Bearer a")) == "local"
    for wrong in ("", "Bearer c", "Basic a", "Bearer é", "Bearer "):
        with pytest.raises(Refusal) as refused:
            several.named(request("1.2.3.4", wrong))
        assert refused.value.status_code == 401


def test_what_is_given_back_can_be_taken() -> None:
    clients = Clients((), 3, 4)
    one, two = (RequestRecord("1", "POST", "/", "a", client=client) for client in ("a", "b"))
    clients.take(one, 1)
    clients.take(one, 3)
    with pytest.raises(QueueFullError):
        clients.take(two, 2)
    clients.take(two, 1)
    assert clients.in_flight == 4
    clients.give_back(one)
    clients.take(two, 3)
    clients.give_back(two)
    assert clients.in_flight == 0


@pytest.mark.parametrize("key", ["", " ", "é"])
def test_a_key_that_no_request_can_have_is_refused(key: str) -> None:
    with pytest.raises(InvalidInputError, match="API key 2 is empty or not ASCII"):
        ServerSettings(name="a", keys=("a", key))


def test_the_event_loop_goes_on_while_a_large_body_is_read(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    began, goes_on, asked = threading.Event(), threading.Event(), running.service.asked

    def slow(data: bytes, chat: bool) -> Any:
        if len(data) > 4000:
            began.set()
            assert goes_on.wait(60)
        return asked(data, chat)

    monkeypatch.setattr(running.service, "asked", slow)
    monkeypatch.setattr("specdec.extensions.server.app._SHORT", 4000)
    found = list[int]()
    first = threading.Thread(target=lambda: found.append(post(running, "first", prompt="Tom has " * 560)[0]))
    first.start()
    assert began.wait(60)
    assert post(running, "second", prompt="Tom")[0] == 200
    goes_on.set()
    first.join(60)
    assert found == [400]
