"""The predicted speed-up by hand, and where the prediction goes beyond what was measured."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.acceptance.acceptance import best, expected_tokens, predict, round_seconds


def test_by_hand() -> None:
    # Acceptance 0.8 then 0.5: E(1) = 1.8, E(2) = 2.2. A round costs 1 without drafts, 1.2 with one, 1.4 with two.
    table = predict([0.8, 0.5], {1: {0: 1.0, 1: 1.2, 2: 1.4}}, (1, 2, 3))
    assert [cell["speedup"] for cell in table] == pytest.approx([1.8 / 1.2, 2.2 / 1.4, 2.4 / 1.6])
    assert [cell["extrapolated"] for cell in table] == [False, False, True]
    assert best(table)["1"]["k"] == 2


def test_what_was_not_measured_is_never_the_best() -> None:
    """All of it accepted, each draft for nothing: the prediction grows with K for ever."""
    table = predict([1.0, 1.0], {1: {0: 1.0, 2: 1.0}}, (1, 2, 3, 8))
    assert table[-1]["speedup"] > table[1]["speedup"] and best(table)["1"]["k"] == 2


def test_drafts_that_cost_more_than_they_bring_have_no_best_k() -> None:
    assert best(predict([0.1], {4: {0: 1.0, 1: 2.0}}, (1, 2, 3))) == {}


def test_one_measured_k_is_drawn_through_the_target_alone() -> None:
    assert round_seconds({0: 1.0, 4: 2.0}, 2) == pytest.approx(1.5)
    assert round_seconds({0: 1.0, 2: 1.6, 4: 2.0}, 2) == 1.6
    assert math.isnan(round_seconds({0: 1.0}, 2))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.integers(0, 12))
def test_expected_tokens_lie_between_one_and_k_plus_one(rates: list[float], k: int) -> None:
    assert 1.0 <= expected_tokens(rates, k) <= k + 1 + 1e-9
    assert expected_tokens(rates, k) <= expected_tokens(rates, k + 1) + 1e-12


def test_positions_that_were_never_reached_take_the_last_known_rate() -> None:
    assert expected_tokens([0.5, float("nan")], 2) == 1.75
    assert expected_tokens([float("nan")], 3) == 1.0


def test_the_line_through_two_measured_k_leaves_out_the_round_without_drafts() -> None:
    """A round without drafts has no head to run: it may lie anywhere."""
    assert round_seconds({0: 0.1, 2: 1.4, 4: 1.8}, 3) == pytest.approx(1.6)
    assert round_seconds({0: 0.1, 2: 1.4, 4: 1.8}, 8) == pytest.approx(2.6)


def test_a_cell_is_extrapolated_beyond_either_measurement() -> None:
    times = {1: {0: 1.0, 1: 1.2, 2: 1.4}}
    assert [cell["extrapolated"] for cell in predict([0.8], times, (1, 2))] == [False, True], (
        "acceptance of one position"
    )
    assert [cell["extrapolated"] for cell in predict([0.8, 0.7, 0.6], times, (2, 3))] == [False, True], "times of two"


@given(st.lists(st.floats(1e-6, 10), min_size=2, max_size=4))
def test_times_that_fall_with_k_are_a_level_line(times: list[float]) -> None:
    """More drafts do not make a round shorter: such times are noise, and a line down to zero predicts no speed-up."""
    assert round_seconds({0: 1.0, 1: 0.5}, 8) == pytest.approx(0.75)
    assert round_seconds({0: 1.0, 1: 0.5, 2: 0.3}, 8) == pytest.approx(0.4)
    measured = dict(enumerate(times))
    assert all(0 < cell["speedup"] < math.inf for cell in predict([0.5], {1: measured}, range(12)))
