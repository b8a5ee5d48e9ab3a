"""How requests enter a scheduler's batch with pages from another engine, and leave it with theirs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specdec.config import EngineConfig
from specdec.extensions.handoff.held import take_pages
from specdec.extensions.handoff.moved import Arrival
from specdec.extensions.handoff.moving import MovingRequests, take_out
from specdec.extensions.handoff.tensors import Arrived
from specdec.requests.request import Request
from tests.specdec.engine.test_scheduler import WINDOWED, Made, decoding, request, scheduled, verified

TENSORS: Any = SimpleNamespace(places=lambda taken, count: None, receive=lambda round_, draft, entered: entered)
"""Of an executor whose drafts lie at no fixed places."""


class Coming(MovingRequests):
    """`Guests` of a scheduler alone."""

    tensors = TENSORS


class Hosting(Made):
    """A scheduler that requests from other engines come to, and its rows and sizes."""

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.scheduler = self
        self.coming: Any = Coming(self)
        self.guests = self.coming

    @property
    def config(self) -> EngineConfig:
        return self._config

    def entered(self) -> list[Arrived]:
        """Those that have entered, each once."""
        nothing: Any = None
        found: Any = self.coming.join(nothing, nothing)
        return found or []


def arriving(scheduler: Hosting, number: int, length: int, num_drafts: int) -> Request:
    """A request with `length` committed tokens from another engine: its pages are aside, its drafts with it."""
    came = request(number, prompt=length - 1)
    came.committed = np.arange(length, dtype=np.int32)
    counts = [pool.pages_for(length - 1) for pool in scheduler.pools()]
    tensors = {"drafts": torch.arange(num_drafts)} if num_drafts else {}
    scheduler.coming.expect(came, Arrival(take_pages(scheduler.pools(), counts), tensors))
    return came


@pytest.mark.parametrize(("brought", "expected"), [(3, [3, 3, 0]), (0, [3, 0, 0])])
def test_requests_from_other_engines_stand_before_prompts_that_are_read_on(brought: int, expected: list[int]) -> None:
    """Row 0 verifies, row 1 reads a chunk; what comes verifies the drafts that it has brought, or its bonus token."""
    scheduler = Hosting(num_pages=40, max_num_seqs=3, budget=32, max_num_prefill_tokens=8)
    schedule = decoding(scheduler, request(0, prompt=3))
    scheduler.waiting.append(request(1, prompt=29, new=2))
    verified(scheduler, schedule)
    verified(scheduler, scheduled(scheduler))
    came = arriving(scheduler, 2, 9, brought)
    scheduler.waiting.append(came)
    schedule = scheduled(scheduler)
    rows = [scheduler.running[i].row for i in (0, 2, 1)]
    assert schedule.rows.tolist() == rows and schedule.num_drafts.tolist() == expected
    assert schedule.num_arrived == (brought > 0) and schedule.num_new.tolist()[:2] == [1, 1]
    (entered,) = scheduler.entered()
    assert (entered.row, entered.computed, entered.num_drafts) == (came.row, 8, brought) and not came.has_pages
    assert not scheduler.entered()
    assert scheduler.table.begin[came.row] == 0, "modules have read what stands before, and go on there"


def test_requests_from_other_engines_are_let_in_while_pages_and_tokens_last() -> None:
    """Each has its page, and needs another one for its bonus token; one is free. Then: tokens for one more row."""
    scheduler = Hosting(num_pages=5, max_num_seqs=3)
    scheduler.waiting.extend(arriving(scheduler, n, 5, 0) for n in range(3))
    assert len(scheduled(scheduler).rows) == 1
    scheduler = Hosting(num_pages=40, max_num_seqs=3, budget=12)
    scheduler.narrow(max_num_seqs=1, max_num_batched_tokens=6)
    scheduler.waiting.extend(arriving(scheduler, n, 6, 3) for n in range(2))
    assert scheduled(scheduler).num_drafts.tolist() == [3]


def test_a_request_from_another_engine_verifies_no_more_than_its_limit_allows() -> None:
    scheduler = Hosting()
    came = arriving(scheduler, 0, 9, 3)
    came.limit = 11
    scheduler.waiting.append(came)
    assert scheduled(scheduler).num_drafts.tolist() == [1]


def test_an_aborted_request_from_another_engine_gives_its_pages_back() -> None:
    scheduler = Hosting()
    came = arriving(scheduler, 0, 9, 3)
    scheduler.waiting.append(came)
    assert scheduler.target_pages.num_used == 2
    scheduler.remove(came)
    assert scheduler.idle and not any(pool.num_used for pool in scheduler.pools())
    for pool in scheduler.pools():
        pool.validate()


def test_a_request_that_leaves_takes_no_surplus_along_and_owes_nothing() -> None:
    """Its pages stay owned until they were read elsewhere; what it read is found by others; its row is free."""
    scheduler = Hosting(num_pages=40, cached=True)
    schedule = decoding(scheduler, request(0, prompt=9))
    verified(scheduler, schedule, new_tokens=4)
    (own,) = scheduler.running
    tokens = scheduler.table.committed(own.row)
    pages = take_out(scheduler, own)
    assert [len(each) for each in pages] == [4, 4]
    assert scheduler.idle and own.row == -1 and scheduler.table.num_free == 2
    assert scheduler.prefixes is not None and scheduler.prefixes.cache.find(tokens, False).num_pages == 3
    assert [pool.num_used for pool in scheduler.pools()] == [4, 4]
    waiting = request(1, prompt=20)
    assert not scheduler.prefixes.worth_waiting(waiting, 20, scheduler.prefixes.find(waiting, 20))


def test_pages_behind_a_window_do_not_travel() -> None:
    scheduler = Hosting(**WINDOWED)
    verified(scheduler, decoding(scheduler, request(0, prompt=10)), new_tokens=4)
    (own,) = scheduler.running
    assert [len(each) for each in take_out(scheduler, own)] == [4, 2, 4], "14 tokens; a query at 14 sees 9 … 14"
