"""Sums by symmetric memory that wait for a lost rank: the words they wait on, and a device that is none."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from specdec.parallel import symmetric

_WAITS = 20


class OnNoDevice(symmetric.SymmetricCollectives):
    """Its pads are plain memory, and are filled by this thread."""

    def __init__(self) -> None:
        self._watch = symmetric.IdleWatch(torch.device("cpu"))
        self._own_pad, self._other_pads = torch.zeros(8, dtype=torch.int32), [torch.zeros(8, dtype=torch.int32)]

    def _fill(self, own: torch.Tensor, others: list[torch.Tensor]) -> None:
        own.fill_(1)
        for pad in others:
            pad.fill_(0)

    def wait(self, ended: threading.Event) -> None:
        """As a kernel does: a word of another's pad goes from 0 to 1, then one of the own from 1 to 0."""
        for pad, given in ((self._other_pads[0], 0), (self._own_pad, 1)):
            while int(pad[3]) != given and not ended.is_set():
                time.sleep(1e-4)
            pad[3] = 1 - given

    @property
    def touched(self) -> bool:
        """Whether a signal was given."""
        return bool(self._own_pad.any())


@pytest.fixture
def ended() -> Iterator[threading.Event]:
    """Ends what still waits after the test."""
    event = threading.Event()
    yield event
    event.set()


def test_signals_are_given_until_all_is_done(monkeypatch: pytest.MonkeyPatch, ended: threading.Event) -> None:
    found, done = OnNoDevice(), list[int]()

    def sums(device: torch.device) -> None:
        for number in range(_WAITS):
            found.wait(ended)
            done.append(number)

    monkeypatch.setattr(torch.cuda, "synchronize", sums)
    started = time.monotonic()
    found.release()
    assert len(done) == _WAITS and time.monotonic() - started < symmetric.LONGEST_RELEASE


def test_a_device_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch, ended: threading.Event) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: ended.wait(30))
    monkeypatch.setattr(symmetric, "LONGEST_RELEASE", 0.1)
    started = time.monotonic()
    OnNoDevice().release()
    assert 0.1 <= time.monotonic() - started < 5


def test_a_device_in_an_error_is_let_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    found = OnNoDevice()
    found.release()
    assert not found.touched


def test_a_device_whose_error_shows_in_the_signals_is_let_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: OnNoDevice, own: torch.Tensor, others: list[torch.Tensor]) -> None:
        raise RuntimeError("planted")

    ended = threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: ended.wait(30))
    monkeypatch.setattr(OnNoDevice, "_fill", fail)
    OnNoDevice().release()
    ended.set()


def test_no_thread_is_started_when_signals_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since Python 3.12 none can be, at the end of a program that has closed nothing."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    asked = threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: asked.set())
    found = OnNoDevice()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    found.release()
    assert asked.is_set()


def test_the_watching_thread_ends_with_what_it_is_for() -> None:
    before = set(threading.enumerate())
    found = OnNoDevice()
    (watching,) = (thread for thread in set(threading.enumerate()) - before if thread.name == "idle")
    assert watching.is_alive()
    del found
    watching.join(10)
    assert not watching.is_alive()
