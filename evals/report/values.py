"""The values of the pictures as tables: what is drawn, to be read and copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evals.acceptance.summary import Json
from evals.report.terminal import POSITIONS, show


@dataclass(frozen=True)
class Values:
    """A table: the names of its columns, and its rows."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def of_positions(arms: Sequence[Json]) -> Values:
    """Acceptance at each draft position; vLLM's is in the table alone."""
    width = max(arm["k"] for arm in arms)
    rows = (
        (f"{arm['name']} {_NAMES[kind]}", *(show(arm[kind][j]) if j < arm["k"] else "" for j in range(width)))
        for arm in arms
        for kind in POSITIONS
    )
    return Values(("draft position", *(str(j + 1) for j in range(width))), tuple(rows))


_NAMES = {"conditional": "conditional", "unconditional": "unconditional", "per_position_vllm": "as vLLM"}


def of_histogram(arms: Sequence[Json]) -> Values:
    """Rounds by accepted drafts, with their share."""
    rows = []
    for j in range(max(len(arm["histogram"]) for arm in arms)):
        cells = []
        for arm in arms:
            counts = arm["histogram"]
            share = counts[j] / (sum(counts) or 1) if j < len(counts) else 0.0
            cells.append(f"{counts[j]:,} ({share:.1%})" if j < len(counts) else "")
        rows.append((str(j), *cells))
    return Values(("accepted drafts", *(f"{arm['name']}: rounds (share)" for arm in arms)), tuple(rows))


def of_groups(arms: Sequence[Json], group: str, section: str, metric: str) -> Values:
    """One metric by category or task."""
    rows = (
        (name, str(arms[0][group][name]["questions"]), *(show(arm[group][name][section][metric]) for arm in arms))
        for name in arms[0][group]
    )
    return Values(("group", "questions", *(arm["name"] for arm in arms)), tuple(rows))


def of_speedup(arms: Sequence[Json], prediction: Json) -> Values:
    """Measured and predicted speed-up, decode only, by K."""
    measured = {arm["k"]: show(arm["timing"]["speedup_decode"]) for arm in arms}
    cells = {(str(cell["batch_size"]), cell["k"]): cell for cell in prediction["table"]}
    sizes = list(prediction["round_seconds"])
    rows = (
        (str(k), measured.get(k, "-"), *(_predicted(cells.get((size, k))) for size in sizes))
        for k in sorted({*measured, *(k for _, k in cells)})
    )
    return Values(("K", "measured", *(f"predicted, batch {size}" for size in sizes)), tuple(rows))


def _predicted(cell: Json | None) -> str:
    return "-" if cell is None else f"{cell['speedup']:.2f}{'*' if cell['extrapolated'] else ''}"
