"""Whether a change altered a benchmark: two result files, case by case.

    python -m benchmarks.compare OLD.jsonl NEW.jsonl --metric step_ms --limit 0.01

A case is a set of lines with the same benchmark, shape, K, rows and so on; its samples are the runs of the metric
(`<metric>_runs`), or one value per line (`<metric>_median`, else the metric itself). The command fails where the ratio
of the means lies beyond 1 + limit, where its standard error is too large to tell, and where a case is in one file only.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.document import usage

_CASE = (
    *("benchmark", "shape", "target", "drafts", "k", "prompt", "new_tokens", "acceptance", "backend", "plan_from"),
    *("sampled", "dtype", "cuda_graphs", "kind", "route", "query", "context", "cache", "rows"),
    *(
        "greedy_share",
        "entropy",
        "requests",
        "output",
        "at_once",
        "rate",
        "sampled_share",
        "arriving",
        "batched_tokens",
        "prefill_tokens",
    ),
    *("weights", "long", "prefix", "own"),
)
"""What tells cases apart; everything else of a line (versions, commit, times) is not part of the name."""


@dataclass(frozen=True)
class Sample:
    """Repeated measurements of one case: mean and standard error (NaN for a single one)."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Arithmetic mean."""
        return statistics.fmean(self.values)

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return statistics.stdev(self.values) / math.sqrt(len(self.values)) if len(self.values) > 1 else math.nan

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.error:.3f} ({len(self.values)})"


@dataclass(frozen=True)
class Comparison:
    """One case in both files, or in one (the other None)."""

    case: str
    old: Sample | None
    new: Sample | None

    @property
    def ratio(self) -> float:
        """new / old, NaN where one is missing."""
        return self.new.mean / self.old.mean if self.old and self.new else math.nan

    @property
    def ratio_error(self) -> float:
        """Standard error of the ratio, to first order: relative errors add in quadrature."""
        if not self.old or not self.new:
            return math.nan
        return self.ratio * math.hypot(self.old.error / self.old.mean, self.new.error / self.new.mean)

    def verdict(self, limit: float) -> str:
        """ "ok", "slower", "not measured well enough" or "in one file only".

        The standard error must be at most half the limit: a check that could not have seen a change of that size is
        none.
        """
        if self.old is None or self.new is None:
            return "in one file only"
        if not self.ratio_error <= limit / 2:
            return "not measured well enough"
        return "slower" if self.ratio > 1 + limit else "ok"


def read_cases(lines: Iterable[str], metric: str) -> dict[str, Sample]:
    """Samples of every case of a JSON-lines file.

    Raises:
        click.ClickException: no line has the metric.
    """
    found: dict[str, list[float]] = {}
    for line in lines:
        document = json.loads(line)
        values = _values(document, metric)
        if values:
            case = " ".join(f"{key}={document[key]}" for key in _CASE if document.get(key) is not None)
            found.setdefault(case, []).extend(values)
    if not found:
        raise click.ClickException(f"no line has {metric}_runs, {metric}_median or {metric}")
    return {case: Sample(tuple(values)) for case, values in found.items()}


def _values(document: dict[str, Any], metric: str) -> list[float]:
    if f"{metric}_runs" in document:
        return list(document[f"{metric}_runs"])
    value = document.get(f"{metric}_median", document.get(metric))
    return [] if value is None else [float(value)]


def compare(old: dict[str, Sample], new: dict[str, Sample]) -> list[Comparison]:
    """Every case of either file."""
    return [Comparison(case, old.get(case), new.get(case)) for case in sorted(old | new)]


@click.command(help=usage(__doc__))
@click.argument("old", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("new", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--metric", default="step_ms", show_default=True)
@click.option("--limit", type=click.FloatRange(min=0, min_open=True), default=0.01, show_default=True)
def main(old: Path, new: Path, metric: str, limit: float) -> None:
    """Print every case; exit 1 unless all are ok."""
    pairs = [read_cases(path.read_text("utf-8").splitlines(), metric) for path in (old, new)]
    verdicts = []
    for row in compare(*pairs):
        verdicts.append(row.verdict(limit))
        click.echo(
            f"{row.case}\n    {row.old} -> {row.new}  ratio {row.ratio:.4f} ± {row.ratio_error:.4f}: {verdicts[-1]}"
        )
    sys.exit(any(verdict != "ok" for verdict in verdicts))


if __name__ == "__main__":
    main()
