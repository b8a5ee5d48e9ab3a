"""The synthetic acceptance of the round benchmark; all else of it needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import random_prompts, table_head, tiny_llama, wrap

from benchmarks.bench_round import SyntheticAcceptance, draw_on_device, full_rounds, geometric
from specdec.acceptance.packed import Outcome
from specdec.requests.sampling import SamplingParams


def test_acceptance_has_its_distribution_in_every_run() -> None:
    drawn = geometric(0.8, 1 << 14, np.random.default_rng(0))
    for place in range(5):  # conditional: of those that reach a place, 0.8 go on
        assert (drawn > place).sum() / (drawn >= place).sum() == pytest.approx(0.8, abs=0.01)
    expected = sum(0.8**k for k in range(6))
    runs = [1 + np.minimum(drawn[start : start + 300], 5).mean() for start in range(0, 16_000, 300)]
    assert np.allclose(runs, expected, rtol=0.02) and np.mean(runs) == pytest.approx(expected, rel=0.003)


def test_order_says_nothing_about_the_next_value() -> None:
    drawn = np.minimum(geometric(0.8, 1 << 15, np.random.default_rng(1)), 5)
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.05


def test_certain_acceptance_accepts_everything() -> None:
    assert (geometric(1.0, 10, np.random.default_rng(0)) >= 10).all()


def test_rows_have_draws_of_their_own_and_short_rounds_accept_no_more_than_they_have() -> None:
    read = SyntheticAcceptance(0.8, 50, np.random.default_rng(0))
    num_drafts = np.array([5, 2, 0, 5])
    real = Outcome(np.zeros(4, np.int64), np.zeros((4, 6), np.int64), np.zeros((4, 5), np.int64))
    outcomes = [read.accept(real, num_drafts) for _ in range(200)]
    accepted = np.array([o.num_accepted for o in outcomes])
    assert (accepted <= num_drafts).all() and (accepted[:, 2] == 0).all()
    assert (accepted[:, 0] != accepted[:, 3]).any() and (accepted[1:, 0] != accepted[:-1, 0]).any()
    assert len(read.moments) == 200


class Rows:
    """A model whose rows take one and four tokens a round, with K = 3."""

    config = SimpleNamespace(num_speculative_tokens=3)

    def __init__(self, read: SyntheticAcceptance) -> None:
        self.read = read

    def stream(self, ids: list[list[int]], params: Any) -> Iterator[Any]:
        left = np.full(len(ids), params.max_new_tokens)
        while left.any():
            rows = np.flatnonzero(left)
            self.read.moments.append((0.0, len(rows), 0))
            for row in rows:
                took = min(4 if row else 1, left[row])
                left[row] -= took
                yield SimpleNamespace(index=row, token_ids=[0] * took)


@pytest.mark.parametrize(("new_tokens", "rounds"), [(256, 30), (128, 26), (60, 9)])
def test_rounds_end_before_a_row_comes_to_its_last_token(new_tokens: int, rounds: int) -> None:
    read = SyntheticAcceptance(0.8, 50, np.random.default_rng(0))
    with full_rounds(Rows(read), read, [[1], [1]], new_tokens) as go_on:  # type: ignore[arg-type]
        assert go_on(30) == rounds
    assert all(rows == 2 for _, rows, _ in read.moments) and len(read.moments) * 4 <= new_tokens


def test_too_few_tokens_for_full_rounds_are_refused() -> None:
    read = SyntheticAcceptance(0.8, 50, np.random.default_rng(0))
    made = full_rounds(Rows(read), read, [[1], [1]], 40)  # type: ignore[arg-type]
    with made as go_on, pytest.raises(ValueError, match="40 new tokens leave 4 rounds of 2 decoding rows"):
        go_on(30)


ENDLESS = SamplingParams(max_new_tokens=12, ignore_eos=True)


def test_tokens_drawn_on_the_device_are_what_rounds_without_drafts_commit() -> None:
    """Through the executor's public seam: the token is replaced before anybody reads it."""
    wrapped = wrap(tiny_llama(), None)
    draw_on_device(wrapped, 60, np.random.default_rng(5))
    drawn = np.random.default_rng(5).integers(0, 60, (512, 256))
    (completion,) = wrapped.generate(random_prompts((5,)), ENDLESS)
    assert completion.token_ids == drawn[:12, 0].tolist()


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_model_takes_its_acceptance_from_the_draws(num_drafts: int) -> None:
    model = tiny_llama()
    wrapped = wrap(model, table_head(model) if num_drafts else None, num_speculative_tokens=num_drafts)
    certain = SyntheticAcceptance(1.0, 50, np.random.default_rng(0))
    certain.decide(wrapped)
    (completion,) = wrapped.generate(random_prompts((5,)), ENDLESS)
    assert len(completion.token_ids) == 12
    assert all(r.accepted == r.drafted for r in completion.stats.rounds)
    assert [tokens for _, _, tokens in certain.moments] == [1] + [r.drafted + 1 for r in completion.stats.rounds]
