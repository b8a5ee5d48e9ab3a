"""A call between ranks has ended or failed when it reports so, not when a wait for it runs out of time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from specdec.extensions.parallel.collectives import Collectives, RankGoneError


class Work:
    """A call on a CPU whose first waits run out of time; it ends between one of them and the look at its state."""

    def __init__(self, slow: int, error: str = "") -> None:
        self._slow, self._error = slow, error
        self._ended = False
        self.num_waits = 0

    def wait(self, timeout: timedelta) -> None:
        self.num_waits += 1
        assert self.num_waits < 20, "waits for ever"
        if not self._ended:
            raise RuntimeError("Application timeout caused pair closure")
        if self._error:
            raise RuntimeError(self._error)

    def is_completed(self) -> bool:
        self._ended = self._ended or self.num_waits >= self._slow
        return self._ended


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> Collectives:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    return Collectives(torch.device("cpu"))


def calls_give(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    def reduce(x: torch.Tensor, *args: Any, **kwargs: Any) -> Work:
        x.mul_(2)
        return work

    monkeypatch.setattr(dist, "all_reduce", reduce)


@pytest.mark.parametrize("slow", [1, 3])
def test_a_slow_rank_is_not_a_lost_one(slow: int, collectives: Collectives, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait runs out of time, the other rank comes, and only then is it asked whether the call is over."""
    calls_give(Work(slow), monkeypatch)
    assert collectives.sum(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    calls_give(Work(slow), monkeypatch)
    assert collectives.least([3, 4]) == [6, 8]


def test_a_lost_rank_is_named_by_what_the_call_reports(
    collectives: Collectives, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls_give(Work(2, "Connection closed by peer"), monkeypatch)
    with pytest.raises(RankGoneError, match="Connection closed by peer"):
        collectives.sum(torch.ones(3))
