"""Who is in the next verification, and with what: admission, chunks, drafts, limits, preemption, lookahead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attention.cache.pages import BlockTables
from specdec.config import EngineConfig
from specdec.engine.scheduler import Scheduler
from specdec.requests.request import Request, Times
from specdec.requests.sampling import SamplingParams
from specdec.rounds.rows import RowTable
from specdec.rounds.schedule import Schedule

PAGE = 4


class Made(Scheduler):
    """A scheduler of small sizes, with a head; K = 3."""

    def __init__(self, num_pages: int = 20, max_num_seqs: int = 2, budget: int = 16) -> None:
        config = EngineConfig(3, 32, max_num_seqs, budget, PAGE, num_pages)
        self.table = RowTable(max_num_seqs, 32)
        pages, head_pages = (BlockTables(n, max_num_seqs, 32, PAGE) for n in (num_pages, config.num_head_pages))
        super().__init__(config, self.table, pages, head_pages)


def request(number: int, prompt: int, new: int = 20, num_drafts: int = 3, **options: Any) -> Request:
    tokens, params = np.arange(prompt, dtype=np.int32), SamplingParams()
    stream: Any = None
    times = Times(0.0)
    return Request(number, params, prompt, prompt + new, num_drafts, 1, tokens, stream, 0, (), times, **options)


def verified(scheduler: Made, schedule: Schedule, new_tokens: int = 1) -> None:
    """What a commit does to the table: each row read its tokens, and a row at its end got new ones."""
    table, rows = scheduler.table, schedule.rows
    table.computed[rows] += schedule.num_new + new_tokens - 1
    at_end = rows[table.computed[rows] >= table.length[rows]]
    table.length[at_end] = table.computed[at_end] + 1


def decoding(scheduler: Made, *requests: Request) -> Schedule:
    """The schedule of the first round in which all of them verify drafts."""
    scheduler.waiting.extend(requests)
    for _ in range(9):
        schedule = scheduler.schedule()
        assert schedule is not None
        if len(schedule.rows) == len(requests) and schedule.num_drafts.all():
            return schedule
        verified(scheduler, schedule)
    raise AssertionError("the rows never decode together")


def test_nothing_to_run_is_no_schedule() -> None:
    scheduler = Made()
    assert scheduler.schedule() is None and scheduler.idle


def test_a_prompt_is_read_in_chunks_of_what_the_budget_leaves() -> None:
    scheduler = Made(budget=8)
    scheduler.waiting.append(request(0, prompt=19))
    chunks = []
    for _ in range(4):
        schedule = scheduler.schedule()
        assert schedule is not None
        chunks.append((schedule.num_new.tolist(), schedule.num_drafts.tolist()))
        verified(scheduler, schedule)
    assert chunks == [([8], [0]), ([8], [0]), ([3], [0]), ([1], [3])]


def test_requests_join_in_order_while_rows_last() -> None:
    scheduler = Made()
    scheduler.waiting.extend(request(n, prompt=4) for n in range(3))
    schedule = scheduler.schedule()
    assert schedule is not None and schedule.num_new.tolist() == [4, 4]
    assert [r.id for r in scheduler.running] == [0, 1] and [r.id for r in scheduler.waiting] == [2]
    scheduler.remove(scheduler.running[0])
    joined = scheduler.schedule()
    assert joined is not None and [r.id for r in scheduler.running] == [1, 2]


def test_rows_with_drafts_come_first() -> None:
    scheduler = Made()
    scheduler.waiting.append(request(0, prompt=4, num_drafts=0))
    schedule = scheduler.schedule()
    assert schedule is not None
    verified(scheduler, schedule)
    scheduler.waiting.append(request(1, prompt=2))
    for expected in ([0, 0], [3, 0]):
        schedule = scheduler.schedule()
        assert schedule is not None and schedule.num_drafts.tolist() == expected
        verified(scheduler, schedule)
    assert schedule.rows.tolist() == [scheduler.running[1].row, scheduler.running[0].row]


def test_prompts_that_are_read_on_come_last() -> None:
    scheduler = Made(max_num_seqs=3, budget=12)
    decoding(scheduler, request(0, prompt=5))
    verified(scheduler, scheduler.schedule() or Schedule(*(np.zeros(0, np.int64) for _ in range(3))))
    scheduler.waiting.extend([request(1, prompt=20), request(2, prompt=3)])
    schedule = scheduler.schedule()
    assert schedule is not None and schedule.num_drafts.tolist() == [3, 0] and schedule.num_new.tolist() == [1, 8]
    verified(scheduler, schedule)
    scheduler.running[0].num_drafts = scheduler.table.drafts[scheduler.running[0].row] = 0  # decides without drafts
    scheduler.table.limit[scheduler.running[0].row] = 31
    schedule = scheduler.schedule()
    assert schedule is not None and schedule.num_new.tolist() == [1, 11]
    row = scheduler.running[0].row
    assert schedule.rows[0] == row and schedule.num_drafts.tolist() == [0, 0]


@pytest.mark.parametrize(("new", "drafts"), [(2, 0), (3, 1), (4, 2), (9, 3)])
def test_a_limit_leaves_fewer_drafts(new: int, drafts: int) -> None:
    """After the first token, a row may get its accepted drafts and one more."""
    scheduler = Made()
    scheduler.waiting.append(request(0, prompt=4, new=new))
    first = scheduler.schedule()
    assert first is not None
    verified(scheduler, first)
    schedule = scheduler.schedule()
    assert schedule is not None and schedule.num_drafts.tolist() == [drafts]


def test_the_youngest_loses_its_pages_and_waits_in_front_with_all_its_tokens() -> None:
    scheduler = Made(num_pages=7)  # 24 cache places for two requests of up to 28 tokens
    rounds = 0
    schedule = decoding(scheduler, request(0, prompt=8), request(1, prompt=8))
    while not scheduler.num_preemptions:
        verified(scheduler, schedule, new_tokens=2)
        following = scheduler.schedule()
        assert following is not None
        schedule, rounds = following, rounds + 1
        assert rounds < 9
    (waiting,) = scheduler.waiting
    assert waiting.id == 1 and waiting.preemptions == 1 and waiting.row == -1
    assert len(waiting.committed) > 8 and [r.id for r in scheduler.running] == [0]


def test_a_preempted_request_prefills_all_but_its_bonus_token() -> None:
    scheduler = Made()
    back = request(0, prompt=4)
    back.committed = np.arange(9, dtype=np.int32)
    scheduler.waiting.append(back)
    schedule = scheduler.schedule()
    assert schedule is not None and schedule.num_new.tolist() == [8]
    verified(scheduler, schedule)
    again = scheduler.schedule()
    assert again is not None and (again.num_new.tolist(), again.num_drafts.tolist()) == ([1], [3])


def test_removing_is_idempotent_and_frees_everything() -> None:
    scheduler = Made()
    schedule = decoding(scheduler, request(0, prompt=5))
    (running,) = scheduler.running
    for _ in range(2):
        scheduler.remove(running)
    assert scheduler.idle and scheduler.table.num_free == 2 and len(schedule.rows) == 1
    assert scheduler.target_pages.allocator.num_free == scheduler.target_pages.allocator.num_pages - 1


def test_the_next_round_is_reserved_when_the_same_rows_go_on() -> None:
    scheduler = Made()
    schedule = decoding(scheduler, request(0, prompt=5), request(1, prompt=6))
    assert scheduler.reserve_next(schedule)
    longest = scheduler.table.computed[schedule.rows] + 2 * (1 + 3)  # everything accepted, and drafts again
    assert ((scheduler.target_pages.table[schedule.rows] > 0).sum(1) * PAGE >= longest).all()


def test_nothing_is_reserved_when_somebody_could_join_or_a_row_may_end() -> None:
    scheduler = Made()
    schedule = decoding(scheduler, request(0, prompt=5))
    scheduler.waiting.append(request(1, prompt=2))
    assert not scheduler.reserve_next(schedule)
    scheduler.waiting.clear()
    scheduler.table.limit[schedule.rows] = scheduler.table.length[schedule.rows] + 4  # 3 drafts and one more
    assert not scheduler.reserve_next(schedule)


def test_nothing_is_reserved_for_a_batch_that_lost_a_row() -> None:
    scheduler = Made()
    schedule = decoding(scheduler, request(0, prompt=5), request(1, prompt=6))
    scheduler.remove(scheduler.running[0])
    assert not scheduler.reserve_next(schedule)


def test_a_row_that_cannot_be_opened_is_refused_alone() -> None:
    scheduler = Made()
    bad = request(0, prompt=4)
    bad.key = -(2**70)
    scheduler.waiting.extend([bad, request(1, prompt=4)])
    schedule = scheduler.schedule()
    assert schedule is not None and [r.id for r in scheduler.running] == [1]
    ((refused, error),) = scheduler.refused
    assert refused is bad and isinstance(error, OverflowError)
