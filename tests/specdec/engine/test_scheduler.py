"""Who is in the next verification, and with what: admission, chunks, drafts, limits, preemption, lookahead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes import check_mode, idle_pages

from attention.cache.pages import BlockTables
from attention.cache.prefix import PrefixCache
from attention.spec import Reach
from specdec.config import EngineConfig, WindowedPool
from specdec.engine.prefixes import Prefixes
from specdec.engine.scheduler import Scheduler, windowed_tables
from specdec.engine.stats import Counters
from specdec.extras.long_factors import LongFactors
from specdec.requests.request import Request, Times
from specdec.requests.sampling import SamplingParams
from specdec.rounds.rows import RowTable, Schedule
from specdec.wrapped.long_rope import LongRopeRule

PAGE = 4


class Made(Scheduler):
    """A scheduler of small sizes, with a head; K = 3."""

    def __init__(
        self,
        num_pages: int = 20,
        max_num_seqs: int = 2,
        budget: int = 16,
        num_modules: int = 1,
        cached: bool = False,
        **options: Any,
    ) -> None:
        config = EngineConfig(3, 32, max_num_seqs, budget, PAGE, num_pages, **options)
        self.table = RowTable(max_num_seqs, 32)
        cache = PrefixCache(PAGE, num_pages, config.num_head_pages) if cached else None
        allocators = (None, None) if cache is None else (cache.pages, cache.head_pages)
        sizes = zip((num_pages, config.num_head_pages), allocators, strict=True)
        pages, head_pages = (BlockTables(n, max_num_seqs, 32, PAGE, own) for n, own in sizes)
        prefixes = None if cache is None else Prefixes(cache, self.table, pages, head_pages)
        windowed = [windowed_tables(config, pool) for pool in config.windowed]
        self.counted = Counters()
        own: dict[str, Any] = {"prefixes": prefixes, "counters": self.counted}
        super().__init__(config, self.table, pages, head_pages, num_modules, windowed, **own)

    def narrow(self, **sizes: int) -> None:
        """From now on with these sizes."""
        self._config = replace(self._config, **sizes)

    def preempt(self, request: Request) -> None:
        self._preempt(request)


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


@pytest.mark.parametrize(("lengths", "longest"), [((), 32), ((8,), 8), ((8, 20), 8), ((20, 8), 8), ((40,), 32)])
def test_rounds_of_a_row_reach_as_far_as_every_extra_lets_them(lengths: tuple[int, ...], longest: int) -> None:
    extras = tuple(LongFactors(LongRopeRule(length, rereads=True)) for length in lengths)
    scheduler = Made(extras=(*extras, LongFactors(LongRopeRule(16))))
    scheduler.waiting.append(came := request(0, prompt=5))
    scheduler.schedule()
    assert scheduler.table.longest[came.row] == longest


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
    while not scheduler.counted.preemptions:
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


def scheduled(scheduler: Made) -> Schedule:
    schedule = scheduler.schedule()
    assert schedule is not None
    return schedule


def test_requests_are_not_let_in_on_the_same_pages() -> None:
    """Five pages; each needs three for its prompt and one more token, though this round writes two."""
    scheduler = Made(num_pages=6)
    scheduler.waiting.extend(request(n, prompt=8) for n in range(2))
    scheduled(scheduler)
    assert [r.id for r in scheduler.running] == [0] and [r.id for r in scheduler.waiting] == [1]
    scheduler = Made(num_pages=7)
    scheduler.waiting.extend(request(n, prompt=8) for n in range(2))
    scheduled(scheduler)
    assert [r.id for r in scheduler.running] == [0, 1]


def test_a_request_that_was_refused_a_row_leaves_its_pages_to_the_next() -> None:
    scheduler = Made(num_pages=4)
    bad = request(0, prompt=8)
    bad.key = -(2**70)
    scheduler.waiting.extend([bad, request(1, prompt=8)])
    scheduled(scheduler)
    assert [r.id for r in scheduler.running] == [1]


def test_a_preempted_request_comes_before_those_that_wait() -> None:
    scheduler = Made(num_pages=7)
    schedule = decoding(scheduler, request(0, prompt=8), request(1, prompt=8))
    scheduler.waiting.append(request(2, prompt=2))
    assert not scheduler.idle
    while not scheduler.counted.preemptions:
        verified(scheduler, schedule, new_tokens=2)
        schedule = scheduled(scheduler)
    assert [r.id for r in scheduler.waiting] == [1, 2] and [r.id for r in scheduler.running] == [0]


def test_a_preempted_request_without_drafts_reads_all_its_tokens_at_once() -> None:
    scheduler = Made()
    back = request(0, prompt=4, num_drafts=0)
    back.committed = np.arange(9, dtype=np.int32)
    scheduler.waiting.append(back)
    assert scheduled(scheduler).num_new.tolist() == [9]


def test_an_engine_with_requests_that_wait_is_not_idle() -> None:
    scheduler = Made()
    scheduler.waiting.append(request(0, prompt=4))
    assert not scheduler.idle


def test_surplus_pages_go_back_before_anybody_is_preempted() -> None:
    """Row 0 has pages of rejected drafts; row 1 needs one."""
    scheduler = Made(num_pages=9)
    schedule = decoding(scheduler, request(0, prompt=5), request(1, prompt=6))
    verified(scheduler, schedule, new_tokens=2)
    scheduler.target_pages.extend([schedule.rows[0]], [4 * (scheduler.target_pages.allocator.num_free + 2)])
    while scheduler.target_pages.allocator.num_free:
        scheduler.target_pages.allocator.allocate(1)
    scheduler.table.computed[schedule.rows[1]] += 2
    scheduler.table.length[schedule.rows[1]] += 2
    with check_mode(False):  # pages were taken out of the pool above
        scheduled(scheduler)
    assert not scheduler.counted.preemptions


def test_the_heads_pages_reach_to_the_drafts_after_this_round() -> None:
    """Drafting may begin before the commit: K tokens beyond what the target writes, but never beyond the table."""
    scheduler = Made(num_pages=30)
    schedule = decoding(scheduler, request(0, prompt=4))
    (row,) = schedule.rows
    assert scheduler.head_pages is not None
    pools = (scheduler.target_pages, scheduler.head_pages)
    assert [len(pool.pages_of(row)) for pool in pools] == [2, 3], "4 + 1 + 3 tokens, and 3 more"
    verified(scheduler, schedule, new_tokens=2)
    scheduled(scheduler)
    assert [len(pool.pages_of(row)) for pool in pools] == [3, 4]
    last = decoding(Made(num_pages=30), request(0, prompt=27))
    assert last.num_drafts.tolist() == [3], "27 + 1 + 3 + 3 tokens would be a page more than a row may have"


def test_a_request_without_drafts_has_no_pages_of_the_head() -> None:
    scheduler = Made()
    scheduler.waiting.append(request(0, prompt=9, num_drafts=0))
    verified(scheduler, scheduled(scheduler))
    scheduled(scheduler)
    assert scheduler.head_pages is not None and not scheduler.head_pages.num_used


def test_prompts_of_running_and_of_new_requests_share_one_budget() -> None:
    """Two rows decode; row 2 has 5 tokens of its prompt left, and 8 prompt tokens are allowed beside them."""
    scheduler = Made(num_pages=40, max_num_seqs=4, budget=32, max_num_prefill_tokens=8)
    schedule = decoding(scheduler, request(0, prompt=3), request(1, prompt=3))
    scheduler.waiting.append(request(2, prompt=13))
    read = []
    for _ in range(3):
        verified(scheduler, schedule)
        schedule = scheduled(scheduler)
        if len(scheduler.running) == 3:
            scheduler.waiting.append(request(3, prompt=13))
        read.append(schedule.num_new[schedule.num_drafts == 0].tolist())
    assert read == [[8], [5, 3], [10]] or read == [[8], [5, 3], [8]]


def test_new_requests_share_one_budget() -> None:
    scheduler = Made(num_pages=40, max_num_seqs=3, budget=16)
    scheduler.waiting.extend(request(n, prompt=10) for n in range(3))
    assert scheduled(scheduler).num_new.tolist() == [10, 6]


def test_running_prompts_share_one_budget() -> None:
    scheduler = Made(num_pages=40, max_num_seqs=2, budget=16)
    scheduler.waiting.extend(request(n, prompt=8) for n in range(2))
    schedule = scheduled(scheduler)
    verified(scheduler, schedule)
    scheduler.table.computed[schedule.rows] = 0  # as if both had to be read again
    scheduler.table.length[schedule.rows] = scheduler.table.prefill[schedule.rows] = 12
    assert scheduled(scheduler).num_new.tolist() == [12, 4]


def test_a_prompt_that_finds_no_budget_is_not_in_the_round() -> None:
    """Two verifications of four tokens each are all that fits."""
    scheduler = Made(num_pages=40, max_num_seqs=3, budget=12)
    schedule = decoding(scheduler, request(0, prompt=3), request(1, prompt=3))
    scheduler.waiting.append(request(2, prompt=20))
    verified(scheduler, schedule)
    schedule = scheduled(scheduler)
    assert schedule.num_new.tolist() == [1, 1, 4]
    scheduler.narrow(max_num_seqs=2, max_num_batched_tokens=8)
    verified(scheduler, schedule)
    assert scheduled(scheduler).rows.tolist() == schedule.rows[:2].tolist()


def test_a_short_request_drafts_no_more_than_its_modules_have_rows_for() -> None:
    scheduler = Made(num_modules=3)
    schedule = decoding(scheduler, request(0, prompt=1))
    assert schedule.num_drafts.tolist() == [2]
    verified(scheduler, schedule)
    assert scheduled(scheduler).num_drafts.tolist() == [3]


@pytest.mark.parametrize(("computed", "reserved"), [(1, False), (2, True)])
def test_no_round_is_reserved_while_a_row_is_too_short_for_modules(computed: int, reserved: bool) -> None:
    """At position 2 of 3 modules all drafts are allowed: what is reserved is what would be scheduled."""
    scheduler = Made(num_modules=3)
    schedule = decoding(scheduler, request(0, prompt=computed))
    assert scheduler.table.computed[schedule.rows].tolist() == [computed]
    assert scheduler.reserve_next(schedule) is reserved


def test_nothing_is_reserved_while_a_prompt_is_read() -> None:
    scheduler = Made(num_pages=40, budget=8)
    scheduler.waiting.append(request(0, prompt=12))
    assert not scheduler.reserve_next(scheduled(scheduler))


WINDOWED = {"windowed": (WindowedPool(Reach(6), 12),), "num_pages": 40}


def test_pages_behind_windows_are_freed_when_the_next_round_is_reserved() -> None:
    """Rounds launched ahead never come to `schedule`."""
    scheduler = Made(**WINDOWED)
    schedule = decoding(scheduler, request(0, prompt=10))
    (pages,) = scheduler.windowed_pages
    assert (pages.table[schedule.rows[0], :3] > 0).tolist() == [False, True, True]
    verified(scheduler, schedule, new_tokens=4)
    assert scheduler.reserve_next(schedule)
    assert (pages.table[schedule.rows[0], :3] > 0).tolist() == [False, False, True]


def test_a_request_is_let_in_when_its_verifications_will_have_windowed_pages_too() -> None:
    """A chunk of two tokens needs three pages of a window of 7, a verification of four tokens four."""
    for free, let_in in ((3, [0]), (4, [0, 1])):
        scheduler = Made(num_pages=40, max_num_prefill_tokens=2, windowed=(WindowedPool(Reach(7), 30),))
        schedule = decoding(scheduler, request(0, prompt=4))
        verified(scheduler, schedule)
        (pages,) = scheduler.windowed_pages
        with check_mode(False):  # pages are taken out of the pool
            pages.extend(schedule.rows, [9])
            pages.allocator.allocate(pages.allocator.num_free - free)
            scheduler.waiting.append(request(1, prompt=20))
            scheduled(scheduler)
        assert [r.id for r in scheduler.running] == let_in


def test_a_request_takes_no_pages_for_what_it_finds() -> None:
    """Row 0 holds the first two pages of both; row 1 needs one of its own, and one is left."""
    for num_pages, let_in in ((5, [0, 1]), (4, [0])):
        scheduler = Made(num_pages=num_pages, cached=True)
        first = request(0, prompt=10, new=2, num_drafts=0)
        scheduler.waiting.append(first)
        verified(scheduler, scheduled(scheduler))
        scheduler.waiting.append(request(1, prompt=10, new=2, num_drafts=0))
        scheduled(scheduler)
        assert [r.id for r in scheduler.running] == let_in


def test_pages_that_a_request_finds_are_not_free_for_it() -> None:
    """Two idle pages are found, one page is free, and it needs two more than it finds."""
    for num_pages, let_in in ((4, []), (5, [1])):
        scheduler = Made(num_pages=num_pages, cached=True)
        first = request(0, prompt=9, new=1, num_drafts=0)
        scheduler.waiting.append(first)
        verified(scheduler, scheduled(scheduler))
        scheduler.remove(first)
        assert scheduler.prefixes is not None and len(idle_pages(scheduler.prefixes.cache.pages)) == 2
        scheduler.waiting.append(request(1, prompt=12, new=2, num_drafts=0))
        scheduler.schedule()
        assert [r.id for r in scheduler.running] == let_in


def test_requests_that_wait_for_pages_keep_their_order() -> None:
    scheduler = Made(num_pages=40, max_num_seqs=4, budget=16, cached=True)
    scheduler.waiting.append(request(0, prompt=12))
    scheduled(scheduler)
    scheduler.waiting.extend([request(1, prompt=12), request(2, prompt=12)])
    scheduled(scheduler)
    assert [r.id for r in scheduler.waiting] == [1, 2] and [r.id for r in scheduler.running] == [0]


def test_what_a_request_found_is_what_it_found_at_first() -> None:
    """After a preemption it finds its own pages; those were not a hit."""
    scheduler = Made(num_pages=40, cached=True)
    schedule = decoding(scheduler, request(0, prompt=9))
    (running,) = scheduler.running
    admitted = running.times.admitted
    verified(scheduler, schedule)
    scheduler.preempt(running)
    scheduled(scheduler)
    assert running.row >= 0 and (running.prefix_hit_tokens, running.cached_tokens) == (0, 0)
    assert running.times.admitted == admitted and scheduler.counted.stats.prefix_query_tokens == 9


def test_pages_of_generated_tokens_are_found() -> None:
    scheduler = Made(num_pages=40, cached=True)
    schedule = decoding(scheduler, request(0, prompt=5, num_drafts=3))
    verified(scheduler, schedule, new_tokens=4)
    (running,) = scheduler.running
    tokens = scheduler.table.committed(running.row)
    scheduler.remove(running)
    assert scheduler.prefixes is not None
    assert scheduler.prefixes.cache.find(tokens, False).num_pages == 2


def test_the_hit_rate_is_of_what_was_found() -> None:
    """With drafts the last page found is read again: a hit, though not cached."""
    scheduler = Made(num_pages=40, cached=True)
    for number in range(2):
        schedule = decoding(scheduler, request(number, prompt=8))
        verified(scheduler, schedule, new_tokens=2)
        scheduler.remove(scheduler.running[0])
    stats = scheduler.counted.stats
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens, stats.cached_tokens) == (16, 8, 4)
    assert stats.prefix_hit_rate == 0.5
