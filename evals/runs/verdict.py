"""Verdict of a check: passed, failed, or not tested (there was nothing to look at), each with its exit status."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Verdict(StrEnum):
    """PASS: tested and as it must be. FAIL: a difference was found. NOT TESTED: there was nothing to compare."""

    PASS = "PASS"
    FAIL = "FAIL"
    NOT_TESTED = "NOT TESTED"

    @property
    def exit_code(self) -> int:
        """0, 1 or 3 (2 is bad input)."""
        return {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.NOT_TESTED: 3}[self]


def together(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict on several parts: one failure fails, one part that was not tested leaves the whole untested.

    >>> together([Verdict.PASS, Verdict.NOT_TESTED]).value, together([]).value
    ('NOT TESTED', 'NOT TESTED')
    """
    found = set(verdicts)
    if Verdict.FAIL in found:
        return Verdict.FAIL
    return Verdict.PASS if found == {Verdict.PASS} else Verdict.NOT_TESTED
