"""`specdec eval gsm8k --backends`: accuracy over attention backends, models and drafts in one paired table."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attention.backends.kinds import KINDS
from evals.cli import options as shared
from evals.runs.verdict import Verdict

if TYPE_CHECKING:
    from rich.console import Console

    from evals.acceptance.summary import Json
    from evals.accuracy.accuracy import AccuracyPlan, Prepared
    from evals.accuracy.grid import Measured

BUILT_IN = (("gsm-llama", "auto"), ("gsm-deepseek", "mtp"))
"""The built-in models with their heads."""


def backends_of(text: str, options: dict[str, Any]) -> tuple[str, ...]:
    """The names in --backends.

    Raises:
        click.UsageError: an unknown name, or --backend besides.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    allowed = [name for name in KINDS if name != "auto"]
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise click.UsageError(f"--backends {text}: {unknown[0]!r} is none of {', '.join(allowed)}")
    if options["backend"] != "auto":
        raise click.UsageError(f"--backends and --backend {options['backend']} exclude each other")
    return names


def run_grid(
    plan: AccuracyPlan, chat_template: bool | None, backends: tuple[str, ...], options: dict[str, Any]
) -> None:
    """Every backend over every pair, K=0 and K, as one table."""
    from evals.accuracy import accuracy, grid
    from evals.cli.commands import check_outputs, write_document
    from evals.report.terminal import make_console

    check_outputs(options)
    prepared = accuracy.prepare(plan)
    pairs = BUILT_IN if options["model"] is None else ((options["model"], options["draft"]),)
    measured = []
    for model, draft in pairs:
        for backend in backends:
            given = {**options, "model": model, "draft": draft, "backend": backend}
            measured.append(_measured(prepared, chat_template, given))
    document = grid.document(measured)
    _print_grid(make_console(), document)
    if options["output"] is not None:
        write_document(options["output"], document)
    if all(m.refused for m in measured) or any(not row.get("tested", True) for row in document["rows"]):
        sys.exit(Verdict.NOT_TESTED.exit_code)


def _measured(prepared: Prepared, chat_template: bool | None, options: dict[str, Any]) -> Measured:
    """One model on one backend; what the backend refuses is kept as that."""
    from rich.console import Console

    from evals.accuracy import accuracy
    from evals.accuracy.grid import Measured
    from evals.data.datasets import digest
    from evals.report.terminal import RunProgress
    from evals.runs.store import RunStore
    from evals.runs.worker import Worker
    from specdec.errors import InvalidInputError, UnsupportedAttentionError
    from specdec.requests.stats import pool

    model, backend = options["model"], options["backend"]
    try:
        worker = Worker({"main": shared.make_spec(options, options["draft"], options["k"])})
    except (InvalidInputError, UnsupportedAttentionError) as refusal:
        return Measured(model, backend, refused=str(refusal))
    with worker.models["main"] as loaded:
        facts = worker.facts()["main"]
        has_template = facts["chat_template_sha256"] is not None
        plan = replace(prepared.plan, chat_template=has_template if chat_template is None else chat_template)
        fixed = accuracy.settings(plan, facts)
        folder = None if options["run_dir"] is None else options["run_dir"] / f"{Path(model).name}-{backend}"
        with (
            RunStore(shared.run_folder(folder, digest(fixed)), fixed) as store,
            RunProgress(Console(stderr=True), prepared.questions, 2) as progress,
        ):
            results = accuracy.evaluate(loaded, replace(prepared, plan=plan), store, progress)
            drafted = {arm.name: [a for (_, name), a in store.answers.items() if name == arm.name] for arm in plan.arms}
    tested = {arm.name: not arm.k or any(pool(a.rounds).drafted for a in drafted[arm.name]) for arm in plan.arms}
    found = tuple((arm.name, result, tested[arm.name]) for arm, result in zip(plan.arms, results, strict=True))
    return Measured(model, backend, fixed, found)


def _print_grid(console: Console, document: Json) -> None:
    from rich.table import Table

    table = Table(
        "model", "backend", "K", "task", "metric", "right", "difference", "only first", "only here", "McNemar p"
    )
    for row in document["rows"]:
        if "refused" in row:
            continue
        names = (row["model"], row["backend"], row["arm"], row["task"], f"{row['metric']}, {row['filter']}")
        right = f"{row['right_b'] / row['total']:.4f} ({row['right_b']}/{row['total']})"
        if row["reference"]:
            table.add_row(*names, right, "the first of its model")
            continue
        shown = f"{row['difference']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]"
        p_value = "none differs" if row["p_value"] is None else f"{row['p_value']:.3g}"
        tested = "" if row["tested"] else " NOT TESTED: no draft was verified"
        table.add_row(*names, right, shown, str(row["only_a"]), str(row["only_b"]), p_value + tested)
    console.print(table)
    for row in document["rows"]:
        if "refused" in row:
            console.print(
                f"{row['model']} on {row['backend']}: refused: {row['refused']}", highlight=False, markup=False
            )
    for key in ("mcnemar", "accuracy_interval"):
        console.print(f"[bold]{key}[/bold]: {document['definitions'][key]}", style="dim", highlight=False)
