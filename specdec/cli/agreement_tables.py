"""The agreement check for the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from specdec.agreement.check import Agreement, Tried
from specdec.cli.tables import percentages
from specdec.requests.stats import AcceptanceStats

_MOST_ROWS = 10


def readings_table(agreement: Agreement) -> Table:
    """How the head was read and what else was tried, from every position of the answers."""
    title = f"drafts from each of {agreement.chains.rounds if agreement.chains else 0} positions of the answers"
    table = Table("read", "τ", "accepted, of all drafts 1, 2, …", "drafts more", title=title, title_justify="left")
    if agreement.chains is not None:
        table.add_row("as the files say", *_cells(agreement.chains), "")
    for tried in agreement.tried[:_MOST_ROWS]:
        table.add_row(tried.reading.name, *_cells(tried.stats), _gain(tried))
    if len(agreement.tried) > _MOST_ROWS:
        table.caption = f"{len(agreement.tried) - _MOST_ROWS} more were worse"
    return table


def _cells(stats: AcceptanceStats) -> tuple[str, str]:
    return f"{stats.tau:.2f}", percentages(stats.unconditional)


def _gain(tried: Tried) -> str:
    return f"{tried.gain:+.2f} ± {tried.error:.2f}"


def agreement_lines(agreement: Agreement) -> list[str]:
    """The verdict in words: the acceptance in rounds, the likely cause, what to do."""
    rounds = agreement.rounds
    lines = [
        f"agreement: {_VERDICTS[agreement.verdict]}: τ = {rounds.tau:.2f} in {rounds.rounds} rounds over "
        f"{agreement.num_tokens} tokens of {agreement.num_answers} answers; accepted, of rounds with that draft: "
        f"{percentages(rounds.unconditional)}"
    ]
    if agreement.best is not None:
        best = agreement.best
        lines.append(
            f"read otherwise ({best.reading.name}), {best.gain:.2f} ± {best.error:.2f} more drafts are accepted from "
            f"each position: τ = {best.stats.tau:.2f}"
        )
        lines.append(f"likely cause: {agreement.cause}")
        lines.append(f"give {as_options(best.reading.overrides)}")
    else:
        lines.append(agreement.cause)
        if agreement.tried and agreement.tried[0].gain > agreement.tried[0].error:
            lines.append(f"({agreement.tried[0].reading.name}: {_gain(agreement.tried[0])}, too little to tell apart)")
    return lines


_VERDICTS = {"fine": "fine", "low": "LOW", "misread": "the head is READ WRONGLY"}


def as_options(overrides: Mapping[str, Any]) -> str:
    """Head overrides as options of the command line."""
    given = {key: json.dumps(value, separators=(",", ":")) for key, value in overrides.items()}
    return " ".join(f"--head-override {key}={value.strip(chr(34))}" for key, value in given.items())
