"""Tables for the terminal: statistics, facts of a loaded model, and the head check."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from drafters.checkpoints.config_fields import HeadReport
from specdec.requests.request import Completion
from specdec.requests.stats import AcceptanceStats, pool_requests
from specdec.values import Json, listed, ratio, size

if TYPE_CHECKING:
    from drafters.base import OtherReading
    from specdec.extensions.head_check.check import Agreement, Tried


def percentages(rates: Sequence[float]) -> str:
    """Rates as one line, position 1 first: "71 % 54 % 43 %"."""
    return "  ".join(number(rate, ".0%") for rate in rates) or "–"


def number(value: float, form: str) -> str:
    """A number in this form; "–" for NaN, where nothing was counted."""
    return format(value, form) if value == value else "–"


def tokens_per_second(completions: Sequence[Completion]) -> float:
    """Decode rate of requests that ran one after the other: tokens after the first over decode seconds."""
    return ratio(sum(max(0, c.stats.new_tokens - 1) for c in completions), _total(completions, "decode_s"))


def _total(completions: Sequence[Completion], name: str) -> float:
    """Of a field of their statistics."""
    return sum(getattr(c.stats, name) for c in completions)


def stats_table(completions: Sequence[Completion]) -> Table:
    """Acceptance and times of some completions."""
    pooled = pool_requests([c.stats for c in completions])
    table = Table(show_header=False, title="statistics", title_justify="left")
    for row in (
        ("acceptance length τ", number(pooled.tau, ".2f")),
        ("accepted, given those before", percentages(pooled.conditional)),
        ("accepted, of rounds with that draft", percentages(pooled.unconditional)),
        ("rounds", str(pooled.rounds)),
        ("new tokens", str(_total(completions, "new_tokens"))),
        ("prompt tokens", prompt_tokens(completions)),
        ("prompt seconds", f"{_total(completions, 'prefill_s'):.3f}"),
        ("decode seconds", f"{_total(completions, 'decode_s'):.3f}"),
        ("decode tokens/s", number(tokens_per_second(completions), ".1f")),
    ):
        table.add_row(*row)
    return table


def prompt_tokens(completions: Sequence[Completion]) -> str:
    """Prompt tokens, and what of them the prefix cache had: "512, of these 480 found (94 %), 464 not read again"."""
    read, found, cached = (
        _total(completions, name) for name in ("prompt_tokens", "prefix_hit_tokens", "cached_tokens")
    )
    return (
        f"{read}, of these {found} found ({found / max(read, 1):.0%}), {cached} not read again" if found else str(read)
    )


def route_rows(facts: Json) -> list[tuple[str, str]]:
    """What served the attention, and whether rounds ran from graphs."""
    rows = [(f"attention of the {group}", route) for group, route in facts["attention"].items()]
    if recurrent := facts.get("recurrent"):
        calls = ", ".join(f"{count} of {kind}" for kind, count in recurrent["calls"].items())
        rows.append(("recurrent layers", f"{recurrent['kernel']}: {calls}"))
    graphs = facts["graphs"]
    if "graphs" not in graphs:
        return [*rows, ("CUDA graphs", graphs["state"])]
    made = f"{graphs['graphs']} for {', '.join(map(str, graphs['rows']))} rows"
    made += f", {graphs['sampled_graphs']} more for sampled ones, {graphs['segment_graphs']} by segments"
    captured = ("CUDA graphs", f"{made}, captured in {graphs['seconds']} s, {graphs['GiB']} GiB")
    return [*rows, captured, ("matmul algorithms", graphs["products"])]


def human(name: str, value: Any) -> str:
    """A fact as a person reads it.

    >>> human("num_layers", 12), human("parameters", 6538176), human("weights_bytes", 3 << 29)
    ('12', '6,538,176 (6.54 M)', '1.5 GiB')
    """
    if value is None:
        return "none"
    if name.endswith("_bytes"):
        return size(value)
    if isinstance(value, float):
        return f"{value:.2g}"
    if isinstance(value, int) and not isinstance(value, bool):
        text = str(value) if name == "seed" else f"{value:,}"
        rounded = f"{value / 1e9:.2f} B" if value >= 1e9 else f"{value / 1e6:.2f} M"
        return f"{text} ({rounded})" if name == "parameters" else text
    return ", ".join(map(str, listed(value)))


def fit_lines(facts: Json) -> list[str]:
    """That what was loaded fits: target and head each other, the cache the requested sizes. Else loading had failed."""
    engine = facts["engine"]
    error = human("error", facts["self_test_error"])
    run = facts["self_test"]
    lines = [f"the target passes its self-test (relative error {error}; tests at this start: {run})"]
    if facts["head"] is not None:
        known = facts["draft_vocab_size"]
        whole = facts["vocab_size"]
        rows = facts["draft_rows_bytes"]
        gathered = "" if rows is None else f" ({size(rows)} of lm_head, gathered)"
        lines.append(
            f"target and head fit: {facts['head']} reads {len(facts['aux_layers'])} hidden states of the target and "
            f"drafts {known:,} of its {whole:,} tokens{gathered}, {engine['num_speculative_tokens']} a round"
        )
    tokens = (engine["num_pages"] - 1) * engine["page_size"]
    longest = tokens // engine["max_model_len"]
    lines.append(
        f"it fits in memory: {size(facts['weights_bytes'])} of weights, a KV cache of {tokens:,} tokens = {longest:,} "
        f"requests of the greatest length ({engine['max_model_len']:,} tokens), {engine['max_num_seqs']} at once"
    )
    if recurrent := facts.get("recurrent"):
        lines[-1] += f", each with recurrent states of {size(recurrent['row_bytes'])}"
    return lines


def make_console() -> Console:
    """The console of a long table: as wide as the terminal; in a file or pipe wide enough that nothing is folded.

    Numbers in its lines have no colour of their own.
    """
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=140, highlight=False)


_NOTES = {
    "draft_tokens": "a hash of the target's tokens that the head drafts on",
    "twin": "a small copy of the model with drawn weights, on which a load tests lengths that the real one is too "
    'large for. "exact": its logits are those of its own forward, also past the named thresholds',
    "fold_rule": "when recurrent layers store (fold) accepted tokens into their states; until then their inputs are "
    "kept and replayed",
}
"""Explanations of facts whose names do not explain themselves."""


def fact_notes(facts: Json) -> list[str]:
    """A sentence for each fact that the model has and whose name does not explain itself."""
    shown = facts | facts["engine"]
    return [f"{name}: {text}" for name, text in _NOTES.items() if shown.get(name) is not None]


def facts_table(facts: Json) -> Table:
    """A description, one fact a row; nested mappings are indented. Long values are folded, never cut."""
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _flat(facts):
        table.add_row(name, value)
    return table


def report_table(report: HeadReport) -> Table:
    """A head's checkpoint, one field a row with its value and its source."""
    title = f"head: {report.layout}, {report.num_parameters / 1e6:.2f} M parameters"
    table = Table("field", "value", title=title, title_justify="left", caption=str(report.path))
    table.columns[1].overflow = "fold"
    table.add_column("from", overflow="fold")
    for field in report.fields:
        table.add_row(field.name, human(field.name, field.value), field.source)
    return table


def _flat(facts: Json, indent: str = "") -> list[tuple[str, str]]:
    rows = []
    for name, value in facts.items():
        if isinstance(value, dict):
            rows.append((f"{indent}{name}", ""))
            rows += _flat(value, indent + "  ")
        else:
            shown = name.removesuffix("_bytes")
            rows.append((f"{indent}{shown}", human(name, value)))
    return rows


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
    return number(stats.tau, ".2f"), percentages(stats.unconditional)


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
        lines.append(as_advice(best.reading))
    else:
        lines.append(agreement.cause)
        for first in agreement.tried[:1]:
            if first.gain > first.error:
                lines.append(f"({first.reading.name}: {_gain(first)}, too little to tell apart)")
    return lines


_VERDICTS = {"fine": "fine", "low": "LOW", "misread": "the head is READ WRONGLY"}


def as_advice(reading: OtherReading) -> str:
    """What chooses a reading: options of the command line, or keys of config.json."""
    if reading.in_config:
        return f"in the head's config.json, set {json.dumps(reading.overrides)[1:-1]}"
    given = {key: json.dumps(value, separators=(",", ":")) for key, value in reading.overrides.items()}
    return "give " + " ".join(f"--head-override {key}={value.strip(chr(34))}" for key, value in given.items())
