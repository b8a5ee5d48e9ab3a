"""What speed-up to expect for other K and batch sizes, from measured acceptance and measured step times.

A round of B rows with K drafts emits E(K) tokens a row on average and takes T(B, K) seconds; the target alone emits
one a row in T(B, 0). So speed-up(B, K) = E(K) · T(B, 0) / T(B, K).
Source: Leviathan et al. 2023, section 3.3, with measured times in place of a constant cost ratio.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

DEFINITION = (
    "Predicted speed-up = E(K) x T(B, 0) / T(B, K), decode only. E(K) = 1 + sum over j <= K of the product of the "
    "conditional acceptances 1..j (beyond the measured positions the last one is repeated, marked *); T(B, K) is the "
    "measured time of a round of B rows, on a straight line in K between and beyond the measured K (marked *; level "
    "where the measured times fall with K)."
)


@dataclass(frozen=True)
class Prediction:
    """One cell of the table; `extrapolated` when K lies beyond what was measured."""

    batch_size: int
    k: int
    tokens_per_round: float
    round_s: float
    speedup: float
    extrapolated: bool


def expected_tokens(conditional: Sequence[float], k: int) -> float:
    """E(K): tokens a round emits on average.

    >>> expected_tokens([0.5, 0.5], 2), expected_tokens([0.5], 2)
    (1.75, 1.75)
    """
    known = [rate for rate in conditional if not math.isnan(rate)]
    if not known:
        return 1.0
    rates = (known + [known[-1]] * k)[:k]
    return float(1.0 + np.cumprod(rates).sum())


def round_seconds(measured: Mapping[int, float], k: int) -> float:
    """T(B, K) from the measured {K: seconds} of one batch size: exact where measured, else a straight line.

    The line is fitted to the K > 0; with one of them it runs through K = 0 as well. A line that falls says only that
    the times scatter: then it is level at their mean.
    """
    if k in measured:
        return measured[k]
    points = {q: s for q, s in measured.items() if q > 0}
    if len(points) < 2:
        points = dict(measured)
    if len(points) < 2:
        return float("nan")
    slope, start = np.polyfit(list(points), list(points.values()), 1)
    return float(start + slope * k) if slope >= 0 else float(np.mean(list(points.values())))


def predict(
    conditional: Sequence[float], step_times: Mapping[int, Mapping[int, float]], ks: Sequence[int]
) -> list[Prediction]:
    """The table. step_times: {batch size: {K: seconds a round}}, with K = 0 in every row."""
    table = []
    for batch_size, measured in sorted(step_times.items()):
        for k in ks:
            tokens, seconds = expected_tokens(conditional, k), round_seconds(measured, k)
            speedup = tokens * measured[0] / seconds if seconds > 0 else float("nan")
            beyond = k > len(conditional) or k > max(measured)
            table.append(Prediction(batch_size, k, tokens, seconds, speedup, beyond))
    return table


def best(table: Sequence[Prediction]) -> dict[int, Prediction]:
    """The fastest cell of each batch size within what was measured; none when no K there is faster than K = 0."""
    fastest: dict[int, Prediction] = {}
    for cell in table:
        if cell.extrapolated:
            continue
        rival = fastest.get(cell.batch_size)
        if cell.speedup > (rival.speedup if rival else 1.0):
            fastest[cell.batch_size] = cell
    return fastest
