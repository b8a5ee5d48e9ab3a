"""What a start is doing is seen on a terminal, and leaves the log as it was."""

from __future__ import annotations

import io
import logging
from threading import Thread

import pytest
from fakes import table_head, tiny_llama, wrap
from rich.console import Console

import specdec.loading.progress
from attention.backends.building import ASIDE
from specdec.loading.progress import log, startup_progress


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=80)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_steps_are_shown_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    console = terminal()
    with startup_progress(console):
        log.info("capturing for %d rows", 8)
        log.info("capturing for %d rows", 4)
        log.warning("careful")
    assert "capturing for 8 rows" in shown(console) and "capturing for 4 rows" in shown(console)
    assert [r.getMessage() for r in caplog.records] == ["careful"]
    assert not log.filters and log.level == logging.NOTSET


def test_a_log_that_shows_steps_keeps_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "specdec"), startup_progress(terminal()):
        log.info("fusing")
    assert [r.getMessage() for r in caplog.records] == ["fusing"]


def test_nothing_is_shown_without_a_terminal() -> None:
    console = Console(file=io.StringIO())
    with startup_progress(console):
        log.info("loading")
    assert shown(console) == "" and not log.filters


def test_steps_are_timed_by_name_and_what_happens_beside_them_ends_none() -> None:
    with startup_progress(Console(file=io.StringIO())) as seconds:
        log.info("loading")
        with startup_progress() as inner:
            log.info("a kernel is ready", extra=ASIDE)
            Thread(target=log.info, args=("of another thread",)).start()
            log.info("capturing for %d rows", 2)
            log.info("loading")
    assert inner is seconds and list(seconds) == ["loading", "capturing for 2 rows"]
    assert all(taken >= 0 for taken in seconds.values()) and not log.filters


def test_what_happens_beside_a_step_is_shown() -> None:
    console = terminal()
    with startup_progress(console):
        log.info("loading")
        log.info("kernel ready after 3.0 s", extra=ASIDE)
    assert "kernel ready" in shown(console)


def test_the_log_is_as_it_was_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), startup_progress(terminal()):
        raise ZeroDivisionError
    assert not log.filters and log.level == logging.NOTSET


def test_loading_a_model_shows_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    console = terminal()
    monkeypatch.setattr(specdec.loading.progress, "Console", lambda **_: console)
    model = tiny_llama()
    wrap(model, table_head(model))
    for step in ("loading the target", "loading the head", "self-test"):
        assert step in shown(console)
