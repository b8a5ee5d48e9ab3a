"""Random workloads over a scheduler with two cache groups: no query of any round misses a key that it sees.

The rounds are launched as the engine launches them: scheduled after a commit, or reserved while one is in flight,
whose result is then random. No model is needed: who owns which page is all on the host.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.cache.pages import BlockTables
from attention.cache.windowed import WindowedTables, most_owned_pages
from attention.spec import Reach
from specdec.config import EngineConfig, WindowedPool
from specdec.engine.admission import Admission
from specdec.engine.scheduler import Scheduler, windowed_tables
from specdec.engine.stats import Counters
from specdec.errors import CacheTooSmallError
from specdec.requests.request import Request, Times
from specdec.requests.sampling import SamplingParams
from specdec.rounds.rows import RowTable, Schedule
from specdec.rounds.verification import RoundTables, WindowedTable, target_arrays

DRAFTS, LONGEST, PAGE, BUDGET, SEQS = 3, 200, 4, 40, 3
WINDOW, CHUNKS = Reach(18), Reach(20, 20)


def first_seen(reach: Reach, position: int) -> int:
    """The first position that a query sees, by the definition of each kind."""
    return max(position - 17, 0) if reach is WINDOW else position - position % 20


class Windowed(Scheduler):
    """A scheduler with a head and one windowed group; K = 3."""

    def __init__(self, num_pages: int, windowed_pages: int, reach: Reach) -> None:
        self.reach = reach
        pool = WindowedPool(reach, windowed_pages)
        config = EngineConfig(DRAFTS, LONGEST, SEQS, BUDGET, PAGE, num_pages, windowed=(pool,))
        self.table = RowTable(SEQS, LONGEST)
        pages, head = (BlockTables(n, SEQS, LONGEST, PAGE) for n in (num_pages, config.num_head_pages))
        windowed = windowed_tables(config, pool)
        self.counted = Counters()
        super().__init__(config, self.table, pages, head, windowed_pages=(windowed,), counters=self.counted)

    @property
    def near(self) -> WindowedTables:
        """The windowed group's tables."""
        return self.windowed_pages[0]


def request(number: int, prompt: int, new: int) -> Request:
    tokens, stream = np.arange(prompt, dtype=np.int32), None
    limit = min(prompt + new, LONGEST)
    return Request(number, SamplingParams(), prompt, limit, DRAFTS, 1, tokens, stream, 0, (), Times(0.0))  # type: ignore[arg-type]


class Rounds:
    """Drives a scheduler: rounds in flight, and what they see."""

    def __init__(self, scheduler: Windowed, seed: int) -> None:
        self.scheduler, self.random = scheduler, np.random.default_rng(seed)
        self.most_used = self.ahead = self.num_rounds = 0

    def check(self, rows: np.ndarray, start: np.ndarray, lens: np.ndarray) -> None:
        """Every key that the queries of a launched round see is on a page of its row."""
        scheduler = self.scheduler
        owned: list[int] = []
        for row, first, length in zip(rows.tolist(), start.tolist(), lens.tolist(), strict=True):
            for tables, seen in ((scheduler.target_pages, 0), (scheduler.near, first_seen(scheduler.reach, first))):
                pages = tables.table[row, seen // PAGE : -(-(first + length) // PAGE)]
                assert pages.all(), f"row {row} at {first} (+{length}) sees a key of a page that is not its own"
            owned += scheduler.near.table[row][scheduler.near.table[row] > 0].tolist()
        assert len(set(owned)) == len(owned)
        for tables in (scheduler.target_pages, scheduler.near):
            tables.validate()
        self.most_used = max(self.most_used, scheduler.near.num_used)
        self.num_rounds += 1

    def commit(self, schedule: Schedule) -> None:
        """Random acceptance; rows at their limit end."""
        table, rows = self.scheduler.table, schedule.rows
        at_end = table.computed[rows] + schedule.num_new == table.length[rows]
        accepted = np.where(at_end, self.random.integers(0, schedule.num_drafts + 1), 0)
        grown = np.where(at_end, np.minimum(accepted + 1, table.limit[rows] - table.length[rows]), 0)
        table.computed[rows] += schedule.num_new + np.where(at_end, accepted, 0)
        table.length[rows] += grown
        ended = set(rows[at_end & (table.length[rows] >= table.limit[rows])].tolist())
        for each in [r for r in self.scheduler.running if r.row in ended]:
            self.scheduler.remove(each)

    def step(self, schedule: Schedule) -> None:
        """Launch a round, perhaps the next one ahead of its commit, and commit it."""
        scheduler, table = self.scheduler, self.scheduler.table
        start = table.computed[schedule.rows].copy()
        self.check(schedule.rows, start, schedule.num_new + schedule.num_drafts)
        near = WindowedTable(scheduler.reach, scheduler.near.table, schedule.rows)
        target = target_arrays(schedule, table, RoundTables(scheduler.target_pages.table, None, PAGE, (near,)))
        target.inputs.batch.validate()
        target.inputs.batch.other_groups[0].validate()
        if self.random.random() < 0.7 and scheduler.reserve_next(schedule):
            self.ahead += 1  # whatever is accepted, the round after it finds its pages
            before = scheduler.near.table.copy()
            for accepted in range(int(schedule.num_drafts.max()) + 1):
                place = start + schedule.num_new + np.minimum(accepted, schedule.num_drafts)
                self.check(schedule.rows, place, np.ones(len(place), np.int64))
            assert np.array_equal(scheduler.near.table, before)
        self.commit(schedule)


def run(
    prompts: list[int], new: list[int], num_pages: int, windowed_pages: int, seed: int, reach: Reach = WINDOW
) -> Rounds:
    scheduler = Windowed(num_pages, windowed_pages, reach)
    rounds = Rounds(scheduler, seed)
    for i, (prompt, more) in enumerate(zip(prompts, new, strict=False)):
        scheduler.waiting.append(request(i, prompt, more))
    for _ in range(4000):
        schedule = scheduler.schedule()
        if schedule is None:
            break
        if rounds.random.random() < 0.03 and scheduler.running:
            scheduler.remove(scheduler.running[int(rounds.random.integers(len(scheduler.running)))])
            continue
        rounds.step(schedule)
    assert scheduler.idle and scheduler.near.num_used == scheduler.target_pages.num_used == 0
    return rounds


LEAST = max(most_owned_pages(reach, BUDGET, PAGE) for reach in (WINDOW, CHUNKS)) + 1
WORKLOAD = {
    "prompts": st.lists(st.integers(1, 120), min_size=1, max_size=7),
    "new": st.lists(st.integers(1, 60), min_size=7, max_size=7),
    "num_pages": st.integers(51, 160),
    "windowed_pages": st.integers(LEAST, 60),
    "seed": st.integers(0, 1000),
}
REACHES = pytest.mark.parametrize("reach", [WINDOW, CHUNKS], ids=str)


@pytest.mark.slow
@REACHES
@settings(max_examples=examples(30), deadline=None)
@given(**WORKLOAD)
@pytest.mark.cases(1)
def test_every_key_that_a_query_sees_is_its_rows_own(
    reach: Reach, prompts: list[int], new: list[int], num_pages: int, windowed_pages: int, seed: int
) -> None:
    run(prompts, new, num_pages, windowed_pages, seed, reach)


def some_rounds(reach: Reach) -> Rounds:
    return run([100, 30, 70, 5, 120], [60, 50, 40, 60, 30], 160, 60, 0, reach)


@REACHES
def test_a_windowed_group_holds_windows_not_rows(reach: Reach) -> None:
    rounds = some_rounds(reach)
    assert rounds.ahead > 10 and rounds.num_rounds > 100
    assert rounds.most_used <= SEQS * most_owned_pages(reach, BUDGET, PAGE) < 60
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WindowedTables, "free_behind", lambda *args: None)
        kept = run([100, 30, 70], [60, 50, 40], 160, 140, 0, reach)
        assert kept.most_used > 70, "three rows of up to 160 tokens"


@REACHES
def test_freeing_by_what_is_launched_shows(reach: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round in flight may be rejected: then the next query stands before the drafts that it verified."""
    plain = WindowedTables.free_behind
    monkeypatch.setattr(
        WindowedTables, "free_behind", lambda self, rows, computed: plain(self, rows, computed + DRAFTS + 1)
    )
    with pytest.raises(AssertionError, match="sees a key of a page that is not its own"):
        some_rounds(reach)


@REACHES
def test_freeing_a_token_too_early_shows(reach: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = WindowedTables.free_behind
    monkeypatch.setattr(WindowedTables, "free_behind", lambda self, rows, computed: plain(self, rows, computed + 1))
    with pytest.raises(AssertionError, match="sees a key of a page that is not its own"):
        some_rounds(reach)


@REACHES
def test_freeing_a_page_too_early_shows(reach: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the page that holds the first key which the next query sees is freed with those before it."""
    plain = Reach.first_seen
    monkeypatch.setattr(Reach, "first_seen", lambda self, at: np.minimum(plain(self, at) + PAGE, at))
    with pytest.raises(AssertionError, match="sees a key of a page that is not its own"):
        some_rounds(reach)


@REACHES
def test_rows_are_preempted_when_the_windowed_pool_is_full(reach: Reach) -> None:
    scheduler = run([8, 8, 8], [90, 90, 90], 200, LEAST, 3, reach).scheduler
    assert scheduler.counted.preemptions > 0 and scheduler.target_pages.allocator.num_free == 199


@REACHES
def test_a_request_that_the_windowed_pool_could_never_hold_is_refused(reach: Reach) -> None:
    target: Any = type("Target", (), {"num_embeddings": 1000, "vocab_size": 1000, "placeholders": {}})()
    tokenizer: Any = None
    config = EngineConfig(DRAFTS, LONGEST, SEQS, BUDGET, PAGE, 60)
    needed = most_owned_pages(reach, BUDGET, PAGE)
    tables = WindowedTables(needed, SEQS, LONGEST, PAGE, reach)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.engine.admission.Vocabulary", lambda tokenizer: SimpleNamespace(tokenizer=tokenizer))
        admission = Admission(target, tokenizer, config, (), 200, (tables,))
        assert admission.check([1] * 10, SamplingParams(max_new_tokens=20)) == 30
        message = rf"200 tokens, read up to 40 at a time, need {needed} pages of 4 tokens .* with {reach}; the KV cache"
        with pytest.raises(CacheTooSmallError, match=message):
            admission.check([1] * 150, SamplingParams(max_new_tokens=90))
