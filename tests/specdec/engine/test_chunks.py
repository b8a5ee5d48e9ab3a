"""Prompts beside rows that decode: how much of them a round reads, and that neither side waits for the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from fakes import engine_of, examples, hf_greedy, random_prompts, table_head, tiny_llama, wrap
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.cache.pages import BlockTables
from specdec.config import EngineConfig
from specdec.engine.scheduler import Scheduler
from specdec.requests.request import Request, Times
from specdec.requests.sampling import SamplingParams
from specdec.rounds.rows import RowTable, Schedule

PAGE, LONGEST, K = 4, 64, 3


@dataclass(frozen=True)
class Asked:
    """A request: tokens of its prompt, new ones, drafts a round, the round before which it arrives, and its call, -1:
    one of its own."""

    prompt: int
    new: int
    drafts: int = K
    arrives: int = 0
    call: int = -1


class Rounds:
    """A scheduler, and what its rounds do to its table: some of the drafts are accepted."""

    def __init__(self, budget: int = 64, most_prefill: int = 8, rows: int = 4, num_pages: int = 80) -> None:
        config = EngineConfig(K, LONGEST, rows, budget, PAGE, num_pages, max_num_prefill_tokens=most_prefill)
        self.table = RowTable(rows, LONGEST)
        pages, head_pages = (BlockTables(n, rows, LONGEST, PAGE) for n in (num_pages, config.num_head_pages))
        self.scheduler = Scheduler(config, self.table, pages, head_pages)
        self.admitted: list[int] = []
        self._rng = np.random.default_rng(0)

    def submit(self, number: int, asked: Asked) -> None:
        stream: Any = None
        tokens = np.arange(asked.prompt, dtype=np.int32)
        sizes = (asked.prompt, asked.prompt + asked.new, asked.drafts)
        request = Request(number, SamplingParams(), *sizes, 1, tokens, stream, 0, (), Times(0.0), batch=asked.call)
        self.scheduler.waiting.append(request)

    def decoding(self) -> set[int]:
        """The requests that decode in the next round, if they keep their pages."""
        running = self.scheduler.running
        prefilling = self.table.prefilling(np.array([r.row for r in running], np.int64))
        return {r.id for r, reads in zip(running, prefilling, strict=True) if not reads}

    def schedule(self) -> tuple[Schedule, dict[int, int], int]:
        """The next round, what it reads of which prompt (by request), and the tokens of rows that decode."""
        schedule = self.scheduler.schedule()
        assert schedule is not None
        owner = {r.row: r.id for r in self.scheduler.running}
        self.admitted += [r.id for r in self.scheduler.running if r.id not in self.admitted]
        prefilling = self.table.prefilling(schedule.rows)
        read = zip(schedule.rows[prefilling].tolist(), schedule.num_new[prefilling].tolist(), strict=True)
        decoded = (schedule.num_new + schedule.num_drafts)[~prefilling]
        return schedule, {owner[row]: tokens for row, tokens in read}, int(decoded.sum())

    def commit(self, schedule: Schedule) -> None:
        """Decide and commit; rows at their limit leave."""
        table, rows = self.table, schedule.rows
        decided = table.computed[rows] + schedule.num_new == table.length[rows]
        accepted = np.where(decided, self._rng.integers(0, schedule.num_drafts + 1), 0)
        table.computed[rows] += schedule.num_new + accepted
        table.length[rows] += np.where(decided, accepted + 1, 0)
        for request in [r for r in self.scheduler.running if table.length[r.row] >= r.limit]:
            self.scheduler.remove(request)


def test_a_row_that_decodes_verifies_in_every_round_beside_a_prompt() -> None:
    rounds = Rounds(most_prefill=8)
    rounds.submit(0, Asked(prompt=5, new=50))
    rounds.commit(rounds.schedule()[0])
    rounds.submit(1, Asked(prompt=30, new=4))
    chunks = []
    while 1 not in rounds.decoding():
        schedule, read, decoded = rounds.schedule()
        assert decoded == 1 + K and schedule.num_drafts.tolist() == [K, 0]
        chunks.append(read[1])
        rounds.commit(schedule)
    assert chunks == [8, 8, 8, 6]


def test_where_no_row_decodes_a_round_reads_all_it_can() -> None:
    rounds = Rounds(budget=40, most_prefill=8)
    for number, prompt in enumerate((30, 30)):
        rounds.submit(number, Asked(prompt, new=20))
    schedule, read, _ = rounds.schedule()
    assert read == {0: 30, 1: 10}
    rounds.commit(schedule)
    assert rounds.schedule()[1] == {1: 8}


def test_a_round_without_rows_that_decode_goes_on_with_new_prompts() -> None:
    rounds, read = Rounds(budget=16, most_prefill=8), []
    for number, prompt in enumerate((20, 14)):
        rounds.submit(number, Asked(prompt, new=20))
    for _ in range(2):
        schedule, chunks, _ = rounds.schedule()
        read.append(chunks)
        rounds.commit(schedule)
    assert read == [{0: 16}, {0: 4, 1: 12}]


def test_prompts_share_the_limit_in_the_order_of_their_arrival() -> None:
    rounds = Rounds(most_prefill=8)
    rounds.submit(0, Asked(prompt=5, new=50))
    rounds.commit(rounds.schedule()[0])
    for number, prompt in ((1, 10), (2, 3), (3, 9)):
        rounds.submit(number, Asked(prompt, new=30))
    read = []
    for _ in range(3):
        schedule, chunks, _ = rounds.schedule()
        read.append(chunks)
        rounds.commit(schedule)
    assert read == [{1: 8}, {1: 2, 2: 3, 3: 3}, {3: 6}]


def test_prompts_wait_for_no_rows_of_their_own_call() -> None:
    """Nor do they let a prompt of another call through that would keep these rows waiting."""
    rounds = Rounds(budget=24, most_prefill=8)
    for number, prompt in enumerate((20, 20, 30)):
        rounds.submit(number, Asked(prompt, new=40, call=50))
    rounds.submit(3, Asked(prompt=30, new=20))
    read = []
    for _ in range(6):
        schedule, chunks, _ = rounds.schedule()
        read.append(chunks)
        rounds.commit(schedule)
    assert read[:3] == [{0: 20, 1: 4}, {1: 16, 2: 4}, {2: 16}]
    assert read[3:5] == [{2: 10}, {3: 8}]


CALLS = st.sampled_from([-1, 50, 51])
REQUESTS = st.lists(
    st.builds(Asked, st.integers(1, 45), st.integers(1, 18), st.integers(0, K), st.integers(0, 30), CALLS),
    min_size=1,
    max_size=9,
)


def read_beside_others(running: list[Request], read: dict[int, int], decoding: set[int]) -> int:
    """Prompt tokens up to the last prompt that makes rows of another call wait; 0 where none does."""
    calls = {r.batch for r in running if r.id in decoding}
    chunks = [(read[r.id], bool(calls - {r.batch})) for r in running if r.id in read]
    last = max((i for i, (_, others) in enumerate(chunks) if others), default=-1)
    return sum(tokens for tokens, _ in chunks[: last + 1])


@settings(max_examples=examples(60))
@given(REQUESTS, st.integers(16, 40), st.integers(1, 50), st.integers(17, 60))
@pytest.mark.thorough
def test_neither_prompts_nor_rows_that_decode_wait_for_the_other(
    asked: list[Asked], budget: int, most_prefill: int, num_pages: int
) -> None:
    """Also with so few pages that rows lose them: every request comes to its end, in order of arrival."""
    rounds = Rounds(budget, most_prefill, num_pages=num_pages)
    scheduler, count = rounds.scheduler, 0
    arrivals = sorted(enumerate(asked), key=lambda pair: pair[1].arrives)
    order = [number for number, _ in arrivals]
    # The oldest request moves on in every round, and reads tokens at most twice: again after it lost its pages.
    most_rounds = sum(2 * (a.prompt + a.new) for a in asked) + max(a.arrives for a in asked)
    while arrivals or not scheduler.idle:
        while arrivals and (arrivals[0][1].arrives <= count or scheduler.idle):
            rounds.submit(*arrivals.pop(0))
        decoding, oldest = rounds.decoding(), list(scheduler.running)[:1]
        schedule, read, decoded = rounds.schedule()
        kept = {r.id for r in scheduler.running}
        in_batch = {r.id for r in scheduler.running if r.row in schedule.rows}
        assert decoding & kept <= in_batch
        assert sum(read.values()) + decoded == schedule.num_tokens <= budget
        assert not decoded or read_beside_others(scheduler.running, read, decoding) <= most_prefill
        assert {r.id for r in oldest} <= in_batch and (schedule.num_new > 0).all()
        assert rounds.table.num_free == 4 - len(kept)
        rounds.commit(schedule)
        begun = np.array([r.row for r in scheduler.running], np.int64)
        assert np.count_nonzero(rounds.table.prefilling(begun)) <= 1, "one prompt after the other"
        count += 1
        assert count <= most_rounds
    assert rounds.admitted == order


PROMPTS = random_prompts((5, 33, 1, 17, 60, 9))


@pytest.mark.slow
@pytest.mark.parametrize("most_prefill", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (7, 512))])
@pytest.mark.thorough
def test_no_token_depends_on_it(most_prefill: int) -> None:
    """In float32: greedy, and sampled with a seed, tokens and drafts of every round."""
    model = tiny_llama()
    params = [SamplingParams(max_new_tokens=20, return_drafts=True)] * 3
    params += [replace(params[0], temperature=0.9, top_p=0.95, seed=7 + i) for i in range(3)]
    wrapped = wrap(model, table_head(model), num_speculative_tokens=3, max_num_prefill_tokens=most_prefill)
    alone = wrap(model, table_head(model), num_speculative_tokens=3, max_num_seqs=1, max_num_batched_tokens=64)
    completions = wrapped.generate(PROMPTS, params)
    expected = [alone.generate(p, s)[0] for p, s in zip(PROMPTS, params, strict=True)]
    assert [(c.token_ids, c.drafts) for c in completions] == [(c.token_ids, c.drafts) for c in expected]
    assert [c.token_ids for c in completions[:3]] == [hf_greedy(p, 20) for p in PROMPTS[:3]]


def test_a_running_row_gets_tokens_in_every_round_beside_a_prompt() -> None:
    model = tiny_llama()
    options = {"num_speculative_tokens": 3, "max_num_batched_tokens": 64, "max_num_prefill_tokens": 5}
    engine = engine_of(wrap(model, table_head(model), **options))
    running = engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=60))
    for _ in range(3):
        engine.step()
    long = engine.submit(PROMPTS[4], SamplingParams(max_new_tokens=2))
    rounds, first = 0, False
    while not first:
        updates = {update.request_id: update for update in engine.step()}
        assert updates[running].token_ids
        rounds, first = rounds + 1, long in updates
    assert rounds - 2 <= -(-len(PROMPTS[4]) // 5) <= rounds


def test_the_prompts_of_one_call_are_read_at_once() -> None:
    """In as many rounds as without a limit for rows that wait; those of several calls take more."""
    model, params = tiny_llama(), SamplingParams(max_new_tokens=12)

    def rounds(most_prefill: int, together: bool) -> float:
        options = {"num_speculative_tokens": 3, "max_num_batched_tokens": 32, "max_num_prefill_tokens": most_prefill}
        wrapped = wrap(model, table_head(model), enable_prefix_caching=False, **options)
        prompts = random_prompts((24, 24, 24))
        if together:
            wrapped.generate(prompts, params)
        else:
            first, *others = (wrapped.stream(prompt, params) for prompt in prompts)
            next(first)
            for stream in (*others, first):
                stream.completions()
        return wrapped.metrics()["rounds_total"]

    assert rounds(5, together=True) == rounds(32, together=True)
    assert rounds(5, together=False) > rounds(32, together=False)
