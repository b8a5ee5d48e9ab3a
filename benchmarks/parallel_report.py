"""Measured lines of `benchmarks.bench_parallel` set against each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

_WANTED = {1: 1.7, 32: 1.75}
"""At 70B width with K=0, by rows: so many times as fast shall a layer of two ranks be as one of one."""


def report(lines: Sequence[dict[str, Any]]) -> str:
    """One line of text for each comparison that the lines allow; of a configuration measured twice the last counts.

    >>> def line(size, layers, step, **more):
    ...     own = {"benchmark": "parallel", "shape": "llama-70b", "layers": layers, "drafts": 0, "rows": 1}
    ...     return own | {"collectives": "auto", "tensor_parallel_size": size, "step_ms_median": step} | more
    >>> print(report([line(1, 8, 4.0), line(1, 24, 12.0), line(2, 8, 3.0), line(2, 24, 7.0)]))
    llama-70b-8 K=0 rows=1: TP=1 4.000 ms, TP=2 3.000 ms: 1.333 times
    llama-70b-24 K=0 rows=1: TP=1 12.000 ms, TP=2 7.000 ms: 1.714 times
    llama-70b (24-8) K=0 rows=1: a layer TP=1 0.5000 ms, TP=2 0.2500 ms: 2.000 times (wanted 1.7: reached)
    >>> print(report([line(2, 8, 3.0), line(2, 8, 3.6, collectives="nccl")]))
    llama-70b-8 K=0 rows=1 TP=2: NCCL 3.600 ms, symmetric memory 3.000 ms
    """
    lines = [line for line in lines if line["benchmark"] == "parallel"]
    steps = {
        (*_kind(line), line["tensor_parallel_size"], line["collectives"]): line["step_ms_median"] for line in lines
    }
    kinds = sorted({_kind(line) for line in lines})
    found = []
    for kind in kinds:
        one, two, nccl = (steps.get((*kind, size, how)) for size, how in ((1, "auto"), (2, "auto"), (2, "nccl")))
        name = "{}-{} K={} rows={}".format(*kind)
        if one and two:
            found.append(f"{name}: TP=1 {one:.3f} ms, TP=2 {two:.3f} ms: {one / two:.3f} times")
        if two and nccl:
            found.append(f"{name} TP=2: NCCL {nccl:.3f} ms, symmetric memory {two:.3f} ms")
    for shape, drafts, rows in sorted({(kind[0], *kind[2:]) for kind in kinds}):
        depths = sorted({kind[1] for kind in kinds if (kind[0], *kind[2:]) == (shape, drafts, rows)})
        for few, many in pairwise(depths):
            found += _a_layer(steps, shape, drafts, rows, few, many)
    return "\n".join(found)


def _kind(line: dict[str, Any]) -> tuple[str, int, int, int]:
    return line["shape"], line["layers"], line["drafts"], line["rows"]


def _a_layer(steps: dict[Any, float], shape: str, drafts: int, rows: int, few: int, many: int) -> list[str]:
    own = []
    for size in (1, 2):
        ends = [steps.get((shape, layers, drafts, rows, size, "auto")) for layers in (few, many)]
        if ends[0] is None or ends[1] is None:
            return []
        own.append((ends[1] - ends[0]) / (many - few))
    ratio, wanted = own[0] / own[1], _WANTED.get(rows) if (shape, drafts) == ("llama-70b", 0) else None
    text = f"{shape} ({many}-{few}) K={drafts} rows={rows}: a layer TP=1 {own[0]:.4f} ms, TP=2 {own[1]:.4f} ms: "
    judged = "" if wanted is None else f" (wanted {wanted}: {'reached' if ratio >= wanted else 'NOT reached'})"
    return [f"{text}{ratio:.3f} times{judged}"]
