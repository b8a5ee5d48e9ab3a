"""Random work finds nothing wrong with the engine as it is, and planted defects at once."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from fakes import LetterTokenizer, table_head, tiny_llama

import specdec.rounds.randomness
from attention.cache.pages import BlockTables
from attention.checking import check_mode
from benchmarks.soak import CACHE_TOKENS, PAGE_SIZE, Soak, Subject, growth
from specdec import SpeculativeModel
from specdec.engine.scheduler import Scheduler


@pytest.fixture
def subject() -> Subject:
    def load(**sizes: Any) -> SpeculativeModel:
        target: Any = tiny_llama()
        options = {"num_speculative_tokens": 5, "tokenizer": LetterTokenizer()}
        return SpeculativeModel.from_pretrained(target, table_head(target), **options, **sizes)

    return Subject(load, chats=False)


@pytest.mark.long
def test_nothing_is_wrong(subject: Subject) -> None:
    work = Soak(subject, seed=3)
    for _ in range(2):
        work.run(actions=70)
    assert not work.faults
    counts = work.counts
    assert counts["finished"] + counts["cancelled"] == counts["requests"] > 40
    assert min(counts["preempted"], counts["cancelled"], counts["refused"]) > 0
    assert min(counts["seeded"], counts["greedy"], counts["unseeded"]) > 0
    assert len(work.memory) == 2


@pytest.mark.slow
def test_uniforms_that_depend_on_the_batch_are_found(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = specdec.rounds.randomness.uniforms

    def planted(keys: np.ndarray, positions: np.ndarray, role: Any) -> np.ndarray:
        return plain(keys, positions + (len(keys) > 2), role)

    monkeypatch.setattr(specdec.rounds.randomness, "uniforms", planted)
    work = Soak(subject, seed=3)
    work.run(actions=20)
    assert work.counts["mismatches"] > 0


@pytest.mark.long
def test_a_resumed_request_that_reads_its_bonus_token_is_found(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scheduler, "_entry", lambda self, request: (len(request.committed), 0))
    work = Soak(subject, seed=3)
    work.run(actions=60)
    assert work.counts["mismatches"] > 0


@pytest.mark.slow
def test_a_lost_page_is_found(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what it costs to fill the cache; the validators of check mode would see it at once."""
    plain, calls = BlockTables.release, itertools.count()

    def leaking(self: BlockTables, row: int) -> None:
        plain(self, row)
        target = self.allocator.num_pages == CACHE_TOKENS // PAGE_SIZE + 1
        if target and next(calls) == 10:
            self.allocator.allocate(1)

    work = Soak(subject, seed=3)
    monkeypatch.setattr(BlockTables, "release", leaking)
    with check_mode(False):
        work.run(actions=20)
    assert any("filling the cache" in fault for fault in work.faults)


def test_growth_is_of_the_last_third_over_the_middle_one() -> None:
    assert growth([9, 9, 2, 4, 3, 3]) == 0
    assert growth([1, 1, 2, 2, 3, 3]) == 0.5
    assert growth([1, 1, 2, 2, 3]) is None
