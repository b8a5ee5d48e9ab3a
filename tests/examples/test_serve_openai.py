"""examples/serve_openai.py serves by the library's pieces, with a route of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from tests.specdec.extensions.server.commands import serving

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.thorough
def test_it_serves_with_all_its_options() -> None:
    words = ["--model", "gsm-llama", "--draft", "auto", "--name", "eggs", "--host", "127.0.0.1", "--port", "0"]
    words += ["--api-key", "secret", "--max-body-bytes", "5000", "--body-seconds", "5", "--max-num-seqs", "2"]
    words += ["--max-waiting-requests", "3", "--allow-lark", "--family", "auto", "--stalled-seconds", "30"]
    with serving("examples/serve_openai.py", *words, "--drain-seconds", "5") as command:
        assert command.get("/") == (200, "Ask /v1/chat/completions.")
        assert command.get("/v1/models")[0] == 401
        body = {"prompt": "Tom has 3", "max_tokens": 4}
        status, text = command.get("/v1/completions", body, Authorization="Bearer secret")
        assert status == 200 and json.loads(text)["model"] == "eggs"
        assert command.end()[0] == 0
    assert any("path=/v1/completions status=200 prompt_tokens=5 new_tokens=4" in line for line in command.lines)


def test_it_is_a_short_page() -> None:
    source = (ROOT / "examples" / "serve_openai.py").read_text("utf-8")
    assert source.count("\n") <= 60
    assert set(re.findall(r"from (specdec[\w.]*) import", source)) == {
        "specdec",
        "specdec.extensions.server.app",
        "specdec.extensions.server.running",
        "specdec.extensions.server.server_settings",
    }
