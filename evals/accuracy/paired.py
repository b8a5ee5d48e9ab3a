"""Right and wrong answers of two configurations to the same questions: the exact test, the difference's interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from evals.errors import require
from specdec.errors import InvalidInputError

MCNEMAR = (
    "McNemar's exact test: two-sided binomial test (p = 1/2) of the questions that exactly one configuration has right."
)
INTERVAL = "95% interval of the paired difference of proportions, Agresti and Min (Statistics in Medicine 24, 2005)."
_Z = 1.959963984540054


@dataclass(frozen=True)
class PairedAccuracy:
    """Two accuracies on the same questions.

    Attributes:
        total, right_a, right_b: questions, and how many each configuration has right.
        only_a, only_b: questions that only one configuration has right.
        difference, low, high: accuracy of b less that of a, and its interval; p_value: McNemar's exact test, None where
            no question is right in one configuration only: then there is nothing to test.
    """

    total: int
    right_a: int
    right_b: int
    only_a: int
    only_b: int
    difference: float
    low: float
    high: float
    p_value: float | None


def paired_accuracy(a: Sequence[bool], b: Sequence[bool]) -> PairedAccuracy:
    """Compare two configurations. a, b: whether each question is right, in the same order.

    >>> paired_accuracy([True, True, False, True], [True, False, False, False]).only_a
    2

    Raises:
        InvalidInputError: no questions, or different numbers of them.
    """
    if not a or len(a) != len(b):
        raise InvalidInputError(f"paired accuracy needs two equally long non-empty lists, not {len(a)} and {len(b)}")
    require("scipy", "eval")
    from scipy.stats import binomtest

    n = len(a)
    only_a = sum(x and not y for x, y in zip(a, b, strict=True))
    only_b = sum(y and not x for x, y in zip(a, b, strict=True))
    p_value = float(binomtest(only_b, only_a + only_b, 0.5).pvalue) if only_a + only_b else None
    centre = (only_b - only_a) / (n + 2)
    spread = only_a + only_b + 1 - (only_b - only_a) ** 2 / (n + 2)
    half = _Z * math.sqrt(spread) / (n + 2)
    difference = (only_b - only_a) / n
    return PairedAccuracy(
        n, sum(a), sum(b), only_a, only_b, difference, max(centre - half, -1.0), min(centre + half, 1.0), p_value
    )
