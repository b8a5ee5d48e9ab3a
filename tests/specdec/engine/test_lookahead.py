"""Which round is launched before a commit, and with what; the pages that its tables must show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from drafters.loops.base import Draft
from specdec.acceptance.packed import Outcome
from specdec.config import EngineConfig
from specdec.engine.launcher import Launcher
from specdec.execution.base import ChainedVerification, DraftedVerification, Verification
from specdec.requests.sampling import SamplingParams
from specdec.rounds.rows import RowTable, Schedule
from specdec.rounds.verification import RoundTables, target_arrays

K, EOS, MOST = 2, 9, 40
PAGES = np.arange(1, 31, dtype=np.int32).reshape(3, 10)
DRAFT = Draft(torch.zeros(2, K, dtype=torch.long), None)


class Engine(Launcher):
    """Two rows of 6 and 8 committed tokens that verify K drafts; what a lookahead has sent and reserved."""

    def __init__(self, limit: int = MOST) -> None:
        self.table = RowTable(3, MOST)
        for length in (6, 8):
            row = self.table.open(np.arange(length), limit, K, 1, SamplingParams(), (3, EOS))
            self.table.computed[row] = length - 1
            self.table.prefill[row] = length - 1
        self.schedule = Schedule(np.array([1, 0]), np.ones(2, np.int64), np.full(2, K))
        self.target = target_arrays(self.schedule, self.table, RoundTables(PAGES, PAGES + 50, 4))
        self.sent: list[Any] = []
        self.asked: list[int] = []
        self.verified: list[Any] = []
        self.reserves = True
        scheduler: Any = SimpleNamespace(reserve_next=lambda schedule: self.reserves, head_pages=())
        counters: Any = None
        executor: Any = SimpleNamespace(send=lambda loop, target, sampling: self.sent.append(target))
        config = EngineConfig(K, MOST, 3, 64, 4, 31)
        super().__init__(executor, scheduler, self.table, config, counters, False)

    def tables(self, schedule: Schedule, more_tokens: int) -> RoundTables:
        self.asked.append(more_tokens)
        return RoundTables(PAGES, PAGES + 50, 4)

    def launched(self, schedule: Schedule, target: Any, device: Any, draft: Any, verification: Any = None) -> Any:
        self.verified.append(verification)
        return SimpleNamespace(schedule=schedule, target=target, device=device, draft=draft)

    def current(self, kind: type[Verification], *rest: Any) -> Any:
        packed: Any = None
        verification = kind(packed, torch.zeros(0), *rest)
        return SimpleNamespace(schedule=self.schedule, target=self.target, verification=verification)

    def ahead(self, accepted: list[int], tokens: list[list[int]], draft: Draft | None = DRAFT) -> Any:
        current = self.current(DraftedVerification, lambda accepted: DRAFT)
        assert self.before_read(current) is None
        outcome = Outcome(np.array(accepted), np.array(tokens), np.array(tokens)[:, :K])
        return self.before_commit(current, outcome, draft)


TOKENS = [[1, 2, 4], [5, 6, 7]]


def test_the_round_ahead_begins_at_each_rows_next_bonus_token() -> None:
    engine = Engine()
    found = engine.ahead([2, 1], TOKENS)
    assert found.target.tokens[:, 0].tolist() == [4, 6] and found.target.start.tolist() == [7 + 3, 5 + 2]
    assert found.target.pages.target.tolist() == PAGES[[1, 0]].tolist()
    assert found.schedule.num_drafts.tolist() == [K, K] and found.draft is DRAFT and engine.sent == [found.target]


def test_its_tables_have_the_pages_of_all_that_it_may_write() -> None:
    """A round accepts up to K drafts and a bonus token, and K drafts stand after that; then those are read again."""
    engine = Engine()
    engine.ahead([2, 2], TOKENS)
    (more,) = engine.asked
    longest = engine.table.length[engine.schedule.rows] + engine.schedule.num_drafts  # what `Launcher.tables` adds to
    last_written = engine.target.start + 1 + K + 1 + K  # with all drafts accepted, and as many after them
    assert (longest + more > last_written).all()
    assert more == 1 + 2 * K, "of the head, whose draft loop writes K more"


def test_no_round_is_launched_ahead_when_a_row_meets_an_eos_id() -> None:
    """Among its accepted drafts, or as its bonus token; not behind that, nor another row's."""
    assert Engine().ahead([2, 1], [[1, EOS, 4], [5, 6, 7]]) is None
    assert Engine().ahead([2, 1], [[1, 2, 4], [5, EOS, 7]]) is None
    assert Engine().ahead([2, 1], [[1, 2, 4], [5, 6, EOS]]) is not None


def test_no_round_is_launched_ahead_when_a_row_has_no_drafts_any_more() -> None:
    """Row 1 stands at 8 + 3 tokens of 12 after this round, where one more ends it."""
    assert Engine(limit=12).ahead([2, 1], TOKENS) is None
    assert Engine(limit=14).ahead([2, 1], TOKENS) is not None


def test_no_round_is_launched_ahead_without_drafts_or_pages() -> None:
    assert Engine().ahead([2, 1], TOKENS, draft=None) is None
    engine = Engine()
    engine.reserves = False
    assert engine.ahead([2, 1], TOKENS) is None and not engine.sent


def test_pages_reserved_for_one_round_are_not_those_of_another() -> None:
    """After a round with room for the next one, a round without: nothing is launched with the pages of the first."""
    engine = Engine()
    assert engine.ahead([2, 1], TOKENS) is not None
    engine.reserves = False
    assert engine.ahead([2, 1], TOKENS) is None and len(engine.sent) == 1


def test_a_chained_round_is_launched_before_the_read() -> None:
    """Its rows read one token more each; which, the device knows."""
    engine = Engine()
    engine.schedule = Schedule(engine.schedule.rows, np.ones(2, np.int64), np.zeros(2, np.int64))
    engine.target = target_arrays(engine.schedule, engine.table, RoundTables(PAGES, None, 4))
    launched: list[Any] = []
    current = engine.current(ChainedVerification, lambda target, sampling: (launched.append(target), (1, 2))[1])
    found = engine.before_read(current)
    assert found is not None and found.target.start.tolist() == [8, 6] and launched == [found.target]
    assert engine.verified == [2] and not engine.sent and not found.target.drafts.any()
