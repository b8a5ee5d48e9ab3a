"""An exception from outside ends an evaluation as it is: a TimeoutError is an OSError, of which stores make errors."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from evals.acceptance import acceptance
from evals.errors import DataError


def late(number: int, frame: Any) -> None:
    raise TimeoutError("the time is up")


def test_an_alarm_while_a_run_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def struck(*given: Any) -> None:
        try:
            signal.raise_signal(signal.SIGALRM)
        except OSError as error:
            raise DataError("the run folder cannot be written") from error

    monkeypatch.setattr(acceptance, "collect", struck)
    plan: Any = SimpleNamespace(warmup=0, arms=())
    before = signal.signal(signal.SIGALRM, late)
    try:
        with pytest.raises(TimeoutError, match="the time is up"):
            acceptance.run(plan, plan, SimpleNamespace(answers=[]), print)  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGALRM, before)
