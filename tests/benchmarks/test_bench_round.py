"""The synthetic acceptance of the round benchmark; all else of it needs a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.bench_round import SyntheticRead, geometric


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
    read = SyntheticRead(0.8, 50, np.random.default_rng(0), alters_tokens=True)
    num_drafts = np.array([5, 2, 0, 5])
    packed = np.zeros((4, 12), np.int64)
    outcomes = [read(packed, num_drafts) for _ in range(200)]
    accepted = np.array([o.num_accepted for o in outcomes])
    assert (accepted <= num_drafts).all() and (accepted[:, 2] == 0).all()
    assert (accepted[:, 0] != accepted[:, 3]).any() and (accepted[1:, 0] != accepted[:-1, 0]).any()
    assert len(read.moments) == 200
