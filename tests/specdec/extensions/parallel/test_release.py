"""Leaving ranks that are lost: sums by symmetric memory that wait for them, and graphs that NCCL waits for.

The device is none: its words are plain memory.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterator
from weakref import WeakSet

import pytest
import torch

from specdec.extensions.parallel import collectives, symmetric
from specdec.extensions.parallel.collectives import HelperThread
from specdec.extensions.parallel.ranks import Ranks
from specdec.wrapped.group import ALONE

_WAITS = 20


class OnNoDevice(symmetric.SymmetricCollectives):
    """Its pads are plain memory, and are filled by this thread."""

    def __init__(self, size: int = 2, rank: int = 0) -> None:
        self._device = torch.device("cuda")
        self._leaving, self._watching, self._graphs = HelperThread("leave"), HelperThread("idle"), WeakSet()
        self.rank, self.pads = rank, [torch.zeros(4 * size + 1, dtype=torch.int32) for _ in range(size)]
        self._signals = symmetric.Signals.of(self.pads, rank)

    def _give(self, signals: symmetric.Signals) -> None:
        signals.give()

    def wait(self, ended: threading.Event) -> None:
        """As each block does: its word in a rank's pad goes from 0 to 1, then that rank's in its own from 1 to 0; for
        every rank, itself among them."""
        size = len(self.pads)
        for block, target in itertools.product(range(4), range(size)):
            signal = (self.pads[target], block * size + self.rank, 0), (self.pads[self.rank], block * size + target, 1)
            for pad, word, given in signal:
                while int(pad[word]) != given and not ended.is_set():
                    time.sleep(1e-4)
                pad[word] = 1 - given

    @property
    def touched(self) -> bool:
        """Whether a signal was given."""
        return any(bool(pad.any()) for pad in self.pads)


@pytest.fixture
def ended() -> Iterator[threading.Event]:
    """Ends what still waits after the test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize(("size", "rank"), [(2, 0), (2, 1), (3, 1)])
def test_signals_are_given_until_all_is_done(
    size: int, rank: int, monkeypatch: pytest.MonkeyPatch, ended: threading.Event
) -> None:
    found, done = OnNoDevice(size, rank), list[int]()

    def sums(device: torch.device) -> None:
        for number in range(_WAITS):
            found.wait(ended)
            done.append(number)

    monkeypatch.setattr(torch.cuda, "synchronize", sums)
    started = time.monotonic()
    found.let_go()
    assert len(done) == _WAITS and time.monotonic() - started < symmetric.LONGEST_RELEASE


def test_no_signal_between_other_ranks_is_touched() -> None:
    """Nor one of a rank to itself: its sums wait until that is taken."""
    pads = [torch.full((13,), 7, dtype=torch.int32) for _ in range(3)]
    symmetric.Signals.of(pads, 1).give()
    rows = [pad[:12].view(4, 3)[0].tolist() for pad in pads]
    assert rows == [[7, 0, 7], [1, 7, 1], [7, 0, 7]]
    assert all(torch.equal(pad[:12].view(4, 3), pad[:3].expand(4, 3)) and int(pad[12]) == 7 for pad in pads)


def test_a_device_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch, ended: threading.Event) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: ended.wait(30))
    monkeypatch.setattr(symmetric, "LONGEST_RELEASE", 0.1)
    started = time.monotonic()
    OnNoDevice().let_go()
    assert 0.1 <= time.monotonic() - started < 5


def test_a_device_in_an_error_is_let_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    monkeypatch.setattr(symmetric, "_GIVE_EVERY", 60.0)  # on a busy machine the thread that fails may come late
    found = OnNoDevice()
    found.let_go()
    assert not found.touched


def test_a_device_whose_error_shows_in_the_signals_is_let_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: OnNoDevice, signals: symmetric.Signals) -> None:
        raise RuntimeError("planted")

    ended = threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: ended.wait(30))
    monkeypatch.setattr(OnNoDevice, "_give", fail)
    OnNoDevice().let_go()
    ended.set()


def test_no_thread_is_started_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since Python 3.12 none can be, at the end of a program that has closed nothing."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    asked, left = threading.Event(), threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: asked.set())
    monkeypatch.setattr(collectives, "leave_group", left.set)
    found = OnNoDevice()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    found.leave()
    assert asked.is_set() and left.is_set()


def test_the_watching_thread_ends_with_what_it_is_for() -> None:
    before = set(threading.enumerate())
    found = OnNoDevice()
    threads = set(threading.enumerate()) - before
    assert {thread.name for thread in threads} == {"idle", "leave"}
    del found
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


class Graph:
    """A captured graph, and what NCCL sees of it."""

    def __init__(self) -> None:
        self.dropped = threading.Event()

    def reset(self) -> None:
        self.dropped.set()


class Group:
    """NCCL with a lost rank: the device goes on once the abort has begun, which ends once the graphs are dropped."""

    def __init__(self, graphs: list[Graph], monkeypatch: pytest.MonkeyPatch, ended: threading.Event) -> None:
        self.aborts, self.left, self.order = threading.Event(), False, list[str]()
        self._graphs, self._ended = graphs, ended
        monkeypatch.setattr(collectives, "leave_group", self.leave)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronise)

    def leave(self) -> None:
        self.aborts.set()
        while not all(graph.dropped.is_set() for graph in self._graphs):
            if self._ended.wait(1e-3):
                return
        self.left = True

    def synchronise(self, device: torch.device) -> None:
        assert self.aborts.wait(10)
        assert not any(graph.dropped.is_set() for graph in self._graphs)
        self.order.append("idle")


def test_graphs_are_dropped_once_the_device_is_idle_and_then_the_group_is_left(
    monkeypatch: pytest.MonkeyPatch, ended: threading.Event
) -> None:
    graphs, found = [Graph(), Graph()], OnNoDevice()
    group = Group(graphs, monkeypatch, ended)
    for graph in graphs:
        found.hold(graph)  # type: ignore[arg-type]
    found.leave()
    assert group.left and group.order == ["idle"]


def test_a_graph_that_nobody_noted_costs_a_while_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, ended: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    found, group = OnNoDevice(), Group([Graph()], monkeypatch, ended)
    monkeypatch.setattr(collectives, "_LONGEST_LEAVE", 0.05)
    with caplog.at_level(logging.WARNING, "specdec"):
        found.leave()
    assert not group.left and "did not let go" in caplog.text


def test_graphs_of_a_divided_target_are_noted(monkeypatch: pytest.MonkeyPatch, ended: threading.Event) -> None:
    found = OnNoDevice()
    alone, among, freed = Graph(), Graph(), Graph()
    group = Group([among], monkeypatch, ended)
    ranks = Ranks(0, 2, torch.device("cpu"), found, None)  # type: ignore[arg-type]
    ALONE.note_graph(alone)  # type: ignore[arg-type]
    ranks.note_graph(among)  # type: ignore[arg-type]
    ranks.note_graph(freed)  # type: ignore[arg-type]
    del freed
    found.leave()
    assert group.left and not alone.dropped.is_set()
