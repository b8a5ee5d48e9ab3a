"""What rank 0 makes of what its processes say and how they end. The processes are none of ours: they only wait."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from specdec import ModelLoadError
from specdec.extensions.parallel import processes, workers
from specdec.extensions.parallel.collectives import RankGoneError
from specdec.extensions.parallel.messages import Failed, Load
from specdec.extensions.parallel.worker import Follower, failed
from specdec.options import LoadOptions

GONE = Failed("RankGoneError", "another rank is gone", follows=True)
OWN = Failed("OSError", "planted")


def idle(rank: int, folder: str) -> processes.Process:
    ours, theirs = socket.socketpair()
    theirs.close()
    return processes.Process(rank, subprocess.Popen(["sleep", "60"]), ours, Connection(os.dup(ours.fileno())))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(workers, "_GRACE", 0.01)
    monkeypatch.setattr(workers, "_LAST_WORDS", 0.5)
    monkeypatch.setattr(workers.Workers, "_listen", lambda self, process: None)


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(workers, "start", idle)
    found = workers.Workers(4)
    yield found
    found.end()


def test_the_rank_that_failed_first_is_named_whoever_is_heard_first(four: Any) -> None:
    first, second, last = four.processes
    first.failed, second.failed, last.failed = GONE, GONE, OWN
    assert four.found_failure() == f"{last}: OSError: planted"
    first.lost = second.lost = str(GONE)

    def end() -> None:
        with four.changed:
            last.failed, last.lost = None, "it was killed by SIGKILL"
            four.changed.notify_all()

    timer = threading.Timer(0.1, end)
    timer.start()
    assert four.found_loss() == f"{last} is lost: it was killed by SIGKILL"
    timer.join()


def test_where_nobody_failed_first_one_that_followed_is_named(four: Any) -> None:
    four.processes[1].failed = GONE
    assert four.found_failure() == f"{four.processes[1]}: RankGoneError: another rank is gone"


def test_how_long_words_are_waited_for_does_not_grow_with_the_ranks(four: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_LAST_WORDS", 1.0)
    started = time.monotonic()
    assert not four.same_failures("OSError")
    assert 1.0 <= time.monotonic() - started < 1.9
    for process in four.processes:
        process.failed = OWN
    assert four.same_failures("OSError") and not any(each.failed for each in four.processes)
    four.processes[2].failed, started = OWN, time.monotonic()
    assert not four.same_failures("HeadLoadError") and time.monotonic() - started < 0.9


def test_ranks_that_cannot_be_started_leave_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[processes.Process] = []

    def start(rank: int, folder: str) -> processes.Process:
        if rank == 2:
            raise BlockingIOError("planted")
        started.append(idle(rank, folder))
        return started[-1]

    monkeypatch.setattr(workers, "start", start)
    with pytest.raises(ModelLoadError, match="a rank did not start: rank 2: planted"):
        workers.Workers(4)
    (only,) = started
    assert only.process.poll() is not None and list(tmp_path.iterdir()) == []


def test_nobody_waits_for_a_process_once_the_load_is_over(four: Any) -> None:
    (process, *_) = four.processes
    with four.loading():
        watching = threading.Thread(target=four.end_waiting, args=(process, four.load), daemon=True)
        watching.start()
        time.sleep(0.05)
        assert watching.is_alive()
    watching.join(1)
    assert not watching.is_alive() and process.process.poll() is None


@pytest.mark.parametrize("gone", [True, False])
def test_a_rank_ends_where_its_load_fails_for_another_is_gone(monkeypatch: pytest.MonkeyPatch, gone: bool) -> None:
    """Else the ranks that wait for it would wait until it is ended for them, each in turn."""
    said: list[Failed] = []

    messages = [(0, Load("x", None, LoadOptions(), []))]

    class Inbox:
        say = staticmethod(said.append)
        get = staticmethod(messages.pop)

    def share(*args: Any) -> None:
        try:
            raise RankGoneError("another rank is gone") if gone else OSError("no such file")
        except (RankGoneError, OSError) as error:
            raise ModelLoadError("planted") from error

    monkeypatch.setattr("specdec.extensions.parallel.worker.SpeculativeModel.in_group", share)
    monkeypatch.setattr("specdec.extensions.parallel.worker.Ranks.together", lambda self: threading.Lock())
    follower: Any = object.__new__(Follower)
    vars(follower).update(_inbox=Inbox(), _rank=1, _size=2, _device="cpu", _collectives=None)
    with pytest.raises(ModelLoadError if gone else IndexError) as found:  # there is no second message
        follower.run()
    assert said == ([] if gone else [Failed("ModelLoadError", "planted")])
    assert failed(found.value).follows == gone
