"""The command `specdec inspect`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from specdec.cli.options import FILE, examples, flag, load_model, load_options_of, model_options, option
from specdec.errors import InvalidInputError
from specdec.loading.names import draft_name, model_name

if TYPE_CHECKING:
    from drafters.checkpoints.config_fields import HeadReport
    from specdec.extensions.head_check.check import Agreement
    from specdec.model import SpeculativeModel


@click.command(
    epilog=examples(
        "specdec inspect",
        "specdec inspect --model gsm-deepseek --draft mtp",
        "specdec inspect --model gsm-llama --draft none --json",
        "specdec inspect run/head --target gsm-llama",
        "specdec inspect run/head --target gsm-llama --head-override aux_layers=[1,3,4]",
    )
)
@click.argument("head", required=False, type=draft_name)
@option("--target", "Of HEAD: built-in name, folder or hub name. Default: the one that HEAD names.", model_name)
@option("--file", "Prompts of the agreement check: .jsonl, or one text.", FILE)
@flag("--json as_json", "The facts as one JSON object, numbers as they are.")
@model_options()
@click.pass_context
def inspect(
    context: click.Context, head: str | None, target: str | None, file: Path | None, as_json: bool, **options: Any
) -> None:
    """Load a target and a head, run the self-test, and print every resolved fact; of a head, where it came from.

    With HEAD (a folder or hub name), also whether the two agree: the target answers a few prompts, and if it accepts
    few drafts, other readings of the head's files are tried on the answers and the likely cause is named. Where neither
    --target nor HEAD's own files name a target, or it is not on this machine, HEAD alone is shown.
    """
    load = load_options_of(options)
    if head is None:
        if target is not None or file is not None:
            raise InvalidInputError("--target and --file go with a HEAD: give one, or name the target by --model")
        _print(load_model(options["model"], options["draft"], load), None, as_json)
        return
    given = {name for name in ("model", "draft") if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    if "draft" in given or (target is not None and "model" in given):
        raise InvalidInputError("HEAD and --draft, or --target and --model, say the same: give one of them")
    if head == "none":
        raise InvalidInputError("HEAD 'none' is no head; leave it out, with --draft none, to inspect a target alone")
    if load.num_speculative_tokens == 0:
        raise InvalidInputError("-k 0: whether HEAD and its target agree is measured by its drafts; give 1 or more")
    found, remark = _target_of(head, target or (options["model"] if "model" in given else None))
    if found is None:
        from drafters.families import family_of
        from specdec.loading.heads import reading_options
        from specdec.loading.names import resolve

        path = resolve(head)
        report = family_of(path).code().describe_head(path, reading_options(load))
        _print_head(report, remark + _depends(report), as_json)
        return
    from specdec.cli.generate import read_prompt_file
    from specdec.extensions.head_check.check import check_agreement
    from specdec.loading.tokenizers import as_chats

    prompts = None if file is None else [line.prompt for line in read_prompt_file(file)]
    model = load_model(found, "mtp" if head == found else head, load)
    _print(model, check_agreement(model, None if prompts is None else as_chats(model.tokenizer, prompts)), as_json)


def _target_of(head: str, given: str | None) -> tuple[str | None, str]:
    """The target to inspect a head with, or None and why there is none."""
    from specdec.loading.heads import IN_TARGET
    from specdec.loading.names import BUILTIN_HEADS, is_available, resolve, target_of_head

    if given is not None:
        return given, ""
    if head in (*BUILTIN_HEADS, *IN_TARGET):
        raise InvalidInputError(f"HEAD {head!r} belongs to a target: give --target")
    named = target_of_head(resolve(head))
    if named is None:
        return None, "its files name no target; give --target to check whether the two agree"
    if not is_available(named):
        return None, f"its files name the target {named}, which is not on this machine; give --target"
    return named, ""


def _depends(report: HeadReport) -> str:
    """A note on aux layers that depend on the target."""
    ids = any(field.name == "aux_layers" and "(read as ids" in field.source for field in report.fields)
    return (
        "; the aux layers shown are those for most targets: of DeepSeek's, and where the largest id is the target's "
        "number of layers, the ids are aux layers themselves"
        if ids
        else ""
    )


def _print(model: SpeculativeModel, agreement: Agreement | None, as_json: bool) -> None:
    from drafters.checkpoints.config_fields import Reported
    from specdec.cli.tables import (
        agreement_lines,
        fact_notes,
        facts_table,
        fit_lines,
        make_console,
        readings_table,
        report_table,
    )

    facts = model.describe()
    if as_json:
        if agreement is not None:
            facts["agreement"] = agreement.as_json()
        click.echo(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    console = make_console()
    for line in fit_lines(facts):
        console.print(line, style="green")
    if agreement is not None:
        if agreement.chains is not None:
            console.print(readings_table(agreement))
        style = "green" if agreement.verdict == "fine" else "red"
        for line in agreement_lines(agreement):
            console.print(line, style=style, markup=False)
    console.print(facts_table(facts))
    for line in fact_notes(facts):
        console.print(line, style="dim", markup=False)
    if isinstance(model.head, Reported) and model.head.checkpoint_report is not None:
        console.print(report_table(model.head.checkpoint_report))


def _print_head(report: HeadReport, remark: str, as_json: bool) -> None:
    from specdec.cli.tables import make_console, report_table

    if as_json:
        fields = {f.name: {"value": f.value, "from": f.source} for f in report.fields}
        found = {"head": str(report.path), "layout": report.layout, "parameters": report.num_parameters}
        click.echo(json.dumps(found | {"fields": fields, "remark": remark}, indent=2, ensure_ascii=False, default=str))
        return
    console = make_console()
    console.print(remark, markup=False)
    console.print(report_table(report))
