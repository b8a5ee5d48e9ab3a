"""Hostile clients take nothing from a well-behaved one: the soak of tests/public/soak_service.py, small."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from tests.public.soak_service import PROMPTS, Server, chat, loaded, soak


@pytest.mark.thorough
def test_hostile_clients_beside_a_good_one() -> None:
    """All but the time to the first token, which other processes change."""
    with loaded() as model:
        right = [done.text for done in model.generate([chat(prompt) for prompt in PROMPTS[:10]], max_new_tokens=8)]
    words = ["--hostile", "12", "--requests", "84", "--thinking", "0.5"]
    found = asyncio.run(soak(Server(checks=True), words, 10, right, 8))
    assert found["hostile"] == 84 and found["clients"] == found["counters"], found
    assert set(found["clients"]) == {"200", "400", "401", "408", "413", "499"}
    assert found["differ from the log"] == found["wrong answers"] == [] and found["idle"], found
    assert found["at SIGTERM"] == {"200": 16, "503": 1} and found["exit"] == 0, found
    assert found["seconds to the end"] <= 10.0
