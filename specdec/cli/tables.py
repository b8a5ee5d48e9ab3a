"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from drafters.checkpoints.config_fields import HeadReport
from specdec.requests.request import Completion
from specdec.requests.stats import AcceptanceStats, pool_requests


def percentages(rates: Sequence[float]) -> str:
    """Rates as one line, position 1 first: "71 % 54 % 43 %"."""
    return "  ".join(f"{rate:.0%}" for rate in rates) or "–"


def tokens_per_second(completions: Sequence[Completion]) -> float:
    """Decode rate of requests that ran one after the other: tokens after the first over decode seconds."""
    tokens = sum(max(0, c.stats.new_tokens - 1) for c in completions)
    seconds = sum(c.stats.decode_s for c in completions)
    return tokens / seconds if seconds else float("nan")


def stats_table(completions: Sequence[Completion]) -> Table:
    """Acceptance and times of some completions."""
    pooled = pool_requests([c.stats for c in completions])
    table = Table(show_header=False, title="statistics", title_justify="left")
    for name, value in _rows(pooled):
        table.add_row(name, value)
    table.add_row("new tokens", str(sum(c.stats.new_tokens for c in completions)))
    table.add_row("prompt seconds", f"{sum(c.stats.prefill_s for c in completions):.3f}")
    table.add_row("decode seconds", f"{sum(c.stats.decode_s for c in completions):.3f}")
    table.add_row("decode tokens/s", f"{tokens_per_second(completions):.1f}")
    return table


def _rows(pooled: AcceptanceStats) -> list[tuple[str, str]]:
    return [
        ("acceptance length τ", f"{pooled.tau:.2f}"),
        ("accepted, given those before", percentages(pooled.conditional)),
        ("accepted, of all rounds", percentages(pooled.unconditional)),
        ("rounds", str(pooled.rounds)),
    ]


def route_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """What served the attention, and whether rounds ran from graphs."""
    rows = [(f"attention of the {group}", route) for group, route in facts["attention"].items()]
    graphs = facts["graphs"]
    if graphs is None:
        return [*rows, ("CUDA graphs", "none")]
    made = f"{graphs['graphs']} for {', '.join(map(str, graphs['rows']))} rows"
    return [*rows, ("CUDA graphs", f"{made}, captured in {graphs['seconds']} s, {graphs['GiB']} GiB")]


def facts_table(facts: dict[str, Any]) -> Table:
    """A description, one fact a row; nested mappings are indented."""
    table = Table(show_header=False)
    for name, value in _flat(facts):
        table.add_row(name, value)
    return table


def report_table(report: HeadReport) -> Table:
    """A head's checkpoint, one field a row with its value and its source."""
    title = f"head: {report.layout}, {report.num_parameters / 1e6:.2f} M parameters"
    table = Table("field", "value", title=title, title_justify="left", caption=str(report.path))
    table.add_column("from", overflow="fold")
    for field in report.fields:
        table.add_row(field.name, str(field.value), field.source)
    return table


def _flat(facts: dict[str, Any], indent: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in facts.items():
        if isinstance(value, dict):
            rows.append((f"{indent}{name}", ""))
            rows += _flat(value, indent + "  ")
        else:
            rows.append((f"{indent}{name}", str(value)))
    return rows
