"""The cost rule of cascade attention against what was measured."""

from __future__ import annotations

import doctest

import pytest

import attention.backends.cascade_cost
from attention.backends.cascade_cost import CascadeCost, PrefixWork

MEASURED = (
    # rows, shared keys, own keys, tokens of a row, flat µs, cascade µs, parts of the shared keys
    (8, 512, 64, 1, 10.65, 23.55, 8),
    (8, 512, 64, 4, 11.03, 24.54, 8),
    (8, 512, 64, 6, 13.21, 26.17, 8),
    (8, 512, 256, 1, 10.78, 25.51, 8),
    (8, 512, 256, 4, 11.33, 26.53, 8),
    (8, 512, 256, 6, 13.46, 28.72, 8),
    (8, 2048, 64, 1, 20.64, 23.7, 8),
    (8, 2048, 64, 4, 22.06, 25.56, 8),
    (8, 2048, 64, 6, 25.77, 27.95, 8),
    (8, 2048, 256, 1, 21.04, 26.14, 8),
    (8, 2048, 256, 4, 22.55, 29.04, 8),
    (8, 2048, 256, 6, 26.28, 32.1, 8),
    (8, 8192, 64, 1, 61.54, 41.67, 8),
    (8, 8192, 64, 4, 66.22, 45.0, 8),
    (8, 8192, 64, 6, 76.92, 48.04, 8),
    (8, 8192, 256, 1, 61.68, 44.48, 8),
    (8, 8192, 256, 4, 66.55, 48.05, 8),
    (8, 8192, 256, 6, 77.04, 52.02, 8),
    (32, 512, 64, 1, 20.25, 28.33, 8),
    (32, 512, 64, 4, 20.98, 26.08, 4),
    (32, 512, 64, 6, 21.76, 26.81, 2),
    (32, 512, 256, 1, 25.21, 33.15, 8),
    (32, 512, 256, 4, 25.99, 33.53, 4),
    (32, 512, 256, 6, 28.04, 34.89, 2),
    (32, 2048, 64, 1, 56.83, 28.49, 8),
    (32, 2048, 64, 4, 59.32, 30.66, 4),
    (32, 2048, 64, 6, 68.14, 43.2, 2),
    (32, 2048, 256, 1, 61.2, 34.94, 8),
    (32, 2048, 256, 4, 64.66, 38.39, 4),
    (32, 2048, 256, 6, 73.72, 52.51, 2),
    (32, 8192, 64, 1, 203.14, 46.8, 8),
    (32, 8192, 64, 4, 212.74, 74.4, 4),
    (32, 8192, 64, 6, 244.64, 126.06, 2),
    (32, 8192, 256, 1, 202.43, 53.53, 8),
    (32, 8192, 256, 4, 215.76, 82.3, 4),
    (32, 8192, 256, 6, 251.39, 138.36, 2),
    (128, 512, 64, 1, 58.54, 36.75, 4),
    (128, 512, 64, 4, 59.18, 42.15, 1),
    (128, 512, 64, 6, 71.74, 65.8, 1),
    (128, 512, 256, 1, 81.85, 62.8, 4),
    (128, 512, 256, 4, 82.76, 68.84, 1),
    (128, 512, 256, 6, 95.81, 94.32, 1),
    (128, 2048, 64, 1, 190.02, 40.46, 4),
    (128, 2048, 64, 4, 188.59, 85.06, 1),
    (128, 2048, 64, 6, 231.6, 148.72, 1),
    (128, 2048, 256, 1, 206.1, 67.63, 4),
    (128, 2048, 256, 4, 204.74, 111.26, 1),
    (128, 2048, 256, 6, 255.07, 176.69, 1),
    (128, 8192, 64, 1, 714.32, 82.29, 4),
    (128, 8192, 64, 4, 706.15, 256.43, 1),
    (128, 8192, 64, 6, 871.95, 485.82, 1),
    (128, 8192, 256, 1, 732.38, 109.14, 4),
    (128, 8192, 256, 4, 720.97, 283.07, 1),
    (128, 8192, 256, 6, 893.4, 511.82, 1),
)
"""`python -m benchmarks.bench_cascade` on an H200 with 132 multiprocessors, 2026-11-22, branch commit 02ff5d8: medians
of one layer, 32 query heads over 8, head dim 128, bfloat16, pages of 16; tiles of 64 queries and 64 keys, 4 warps,
3 stages, parts of at least 512 keys."""


def cost_with(parts: int) -> CascadeCost:
    """Of the measured kernels."""
    return CascadeCost(32, 8, 128, 2, PrefixWork(64, parts, 512, 264, 28.6))


def test_the_examples_in_the_docstrings() -> None:
    outcome = doctest.testmod(attention.backends.cascade_cost)
    assert outcome.failed == 0 and outcome.attempted == 3


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: "-".join(map(str, case[:4])))
def test_the_rule_is_right_where_it_was_measured(case: tuple[int, int, int, int, float, float, int]) -> None:
    """No wherever two levels gain less than 5 %, yes wherever they gain more than 20 %; no exceptions."""
    rows, prefix, own, query, flat_us, cascade_us, parts = case
    cost = cost_with(parts)
    assert cost.flat_us(rows, prefix, own) == pytest.approx(flat_us, rel=0.25)
    assert cost.cascade_us(rows, query, prefix, own) == pytest.approx(cascade_us, rel=0.13)
    gain, pays = flat_us / cascade_us, cost.pays(rows, query, prefix, own)
    assert not (pays and gain < 1.05) and not (gain > 1.2 and not pays), (gain, cost.gain(rows, query, prefix, own))


def test_both_answers_are_measured() -> None:
    gains = [flat / cascade for *_, flat, cascade, _ in MEASURED]
    assert len(gains) == 54 and sum(g < 1.05 for g in gains) >= 15 and sum(g > 1.2 for g in gains) >= 30


def test_beyond_what_was_measured() -> None:
    """A single row, a page, and a prefix that is next to nothing of what is read never pay."""
    cost = cost_with(2)
    assert not any(cost.pays(1, q, keys, 64) for q in (1, 6) for keys in (512, 8192))
    assert not cost.pays(32, 1, 16, 256) and not cost.pays(2, 1, 512, 64)
    assert not cost.pays(32, 1, 512, 65536)
    assert cost.pays(256, 6, 8192, 256)
