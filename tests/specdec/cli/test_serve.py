"""`specdec serve`: its options, its log, what it needs, and its end."""

from __future__ import annotations

import json
import socket
import sys
from importlib import import_module
from typing import Any

import pytest
from click.testing import CliRunner

from specdec.cli.main import cli
from specdec.cli.serve import serve
from tests.specdec.extensions.server.commands import serving

BODY = {"prompt": "Tom has 3", "max_tokens": 4}


def loads_nothing(*_: Any) -> Any:
    raise AssertionError("the model is loaded")


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "prometheus_client"])
def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setattr(import_module("specdec.cli.serve"), "load_model", loads_nothing)
    for name in [name for name in sys.modules if name.startswith(("specdec.extensions.server", f"{package}."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]
    # What the import below leaves there is another module than the one that later tests find in sys.modules.
    monkeypatch.setattr(import_module("specdec.extensions"), "server", None, raising=False)
    result = CliRunner().invoke(cli, ["serve"])
    assert result.exit_code == 2
    assert f"needs {package}" in result.output and 'pip install "specdec-hf[serve]"' in result.output


def test_bad_options_are_refused_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn")
    monkeypatch.setattr(import_module("specdec.cli.serve"), "load_model", loads_nothing)
    # It would change the log of this process, and with it what pytest captures.
    monkeypatch.setattr(import_module("specdec.extensions.server.running"), "start_log", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = [
            (["--port", port], f"cannot listen at 127.0.0.1:{port}"),
            (["--host", "no.such.host.invalid"], "cannot listen at no.such.host.invalid:8000"),
            (["--api-key", "a,,b"], "API key 2 is empty"),
            (["--max-n", "0"], "--max-n"),
            (["--modl", "x"], "--model"),
        ]
        for words, expected in cases:
            result = CliRunner().invoke(cli, ["serve", *words])
            assert result.exit_code == 2 and expected in result.output, (words, result.output)


def test_options_of_the_load_are_those_of_other_commands() -> None:
    generate = import_module("specdec.cli.generate").generate
    load = {name for one in generate.params for name in one.opts if one.name in ("model", "draft", "dtype", "seed")}
    load |= {
        "-k",
        "--num-speculative-tokens",
        "--kv-cache-tokens",
        "--gpu-memory-utilization",
        "--tensor-parallel-size",
    }
    assert load <= {name for one in serve.params for name in one.opts}
    defaults = {one.name: one.default for one in serve.params}
    assert defaults["max_waiting_requests"] == 1024 and defaults["model"] == "gsm-llama"


@pytest.mark.thorough
def test_it_serves_logs_and_ends() -> None:
    pytest.importorskip("uvicorn")
    words = ("-m", "specdec", "serve", "--port", "0", "--log-format", "json", "--log-level", "debug", "--name", "eggs")
    with serving(*words, SPECDEC_API_KEY="one,two") as command:
        assert command.get("/ready") == (200, '{"status": "ok"}')
        assert command.get("/v1/models")[0] == 401
        status, text = command.get("/v1/completions", BODY, Authorization="Bearer two")
        assert status == 200 and json.loads(text)["model"] == "eggs"
        status, seconds = command.end()
        assert status == 0 and seconds < 10
    lines = [json.loads(line) for line in command.lines if line.startswith("{")]
    requests = [line for line in lines if "status" in line]
    assert [line["status"] for line in requests] == [200, 401, 200]
    assert requests[0]["level"] == "DEBUG" and requests[1]["reason"] == "wrong_key"
    assert requests[2]["client"] == "key 2" and requests[2]["address"] == "127.0.0.1"
    assert requests[2]["prompt_tokens"] == 5 and requests[2]["new_tokens"] == 4
    assert any(line.get("message", "").startswith("drained") for line in lines)
