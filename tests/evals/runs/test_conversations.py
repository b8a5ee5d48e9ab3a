"""A worker's facts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from evals.runs import conversations
from evals.runs.conversations import ModelSpec, Worker


def test_weights_are_read_once(plant: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run asks for facts several times, and those of a large model take as long as reading it."""
    read: list[Any] = []
    monkeypatch.setattr(conversations, "weights_sha256", lambda module: read.append(module) or "hash")
    worker = Worker({"main": ModelSpec("scripted")}, lambda spec: plant.Model())
    assert worker.facts() == worker.facts()
    assert read == [worker.models["main"].hf_model]
