"""A check that had nothing to look at has not passed, and one failure fails the whole."""

from __future__ import annotations

from itertools import product

import pytest

from evals.runs.verdict import Verdict, together


def test_exit_codes_are_told_apart_from_bad_input() -> None:
    assert {verdict: verdict.exit_code for verdict in Verdict} == {
        Verdict.PASS: 0,
        Verdict.FAIL: 1,
        Verdict.NOT_TESTED: 3,
    }


@pytest.mark.parametrize("parts", list(product(Verdict, repeat=3)), ids=lambda parts: ", ".join(parts))
def test_together(parts: tuple[Verdict, ...]) -> None:
    whole = together(parts)
    assert (whole is Verdict.FAIL) == (Verdict.FAIL in parts)
    assert (whole is Verdict.PASS) == all(part is Verdict.PASS for part in parts)


def test_nothing_together_is_not_tested() -> None:
    assert together([]) is Verdict.NOT_TESTED
