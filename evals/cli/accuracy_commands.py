"""`specdec eval gsm8k | humaneval | lm-eval`: accuracy through lm-eval, with and without speculation."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evals.cli import eval_options as shared
from evals.cli.eval_options import Options
from evals.errors import require
from evals.runs.verdict import Verdict
from specdec.cli.options import COUNT, PATH, added, examples, flag, option

if TYPE_CHECKING:
    from rich.console import Console

    from evals.acceptance.summary import Json
    from evals.accuracy.accuracy import Prepared


_shared_options = added(
    (
        shared.model_options,
        shared.draft_option,
        option("--data", "Local data: see below; default $SPECDEC_DATA.", PATH),
        option("-k --num-speculative-tokens --k k", f"Drafts a round; {shared.K_HELP}.", COUNT),
        option("--limit", "First N questions of each task.", COUNT),
        shared.max_new_tokens_option(256),
        shared.batch_size_option(32),
        shared.seed_option,
        shared.output_option,
        shared.run_dir_option,
    )
)


@click.command(
    short_help="GSM8K accuracy with and without speculation (lm-eval).",
    epilog=examples(
        "specdec eval gsm8k --tasks specdec_arithmetic --limit 50",
        "specdec eval gsm8k --data DIR --tasks gsm8k,gsm8k_cot --limit 200 --output gsm8k.json",
    ),
)
@option("--tasks", "gsm8k, gsm8k_cot, specdec_arithmetic, or any of lm-eval's.", default="gsm8k")
@option("--num-fewshot", "Examples in the prompt; default the task's.", click.IntRange(0))
@option("--chat-template/--no-chat-template", "Default: with it where the tokenizer has one.")
@_shared_options
def gsm8k(tasks: str, num_fewshot: int | None, chat_template: bool | None, **options: Any) -> None:
    """Accuracy with and without speculation on the same prompts, through lm-eval's own tasks.

    --data is a folder with train.jsonl and test.jsonl, or test.jsonl itself (train.jsonl must lie beside it), or a
    data folder as $SPECDEC_DATA. Without any of them lm-eval loads its data from the hub.
    """
    _run(_prepared(options, tuple(tasks.split(",")), num_fewshot=num_fewshot, chat_template=chat_template), options)


@click.command(
    short_help="HumanEval pass@1; runs code the model wrote.",
    epilog=examples("specdec eval humaneval --confirm-run-unsafe-code --data DIR --limit 20"),
)
@flag("--confirm-run-unsafe-code", "Needed: code that the model wrote is run on this machine.")
@_shared_options
def humaneval(confirm_run_unsafe_code: bool, **options: Any) -> None:
    """HumanEval pass@1 with and without speculation; --data is a data folder as $SPECDEC_DATA.

    The code that the model wrote runs in a child process with limits, which is no security boundary: do this in a
    container without network and secrets.
    """
    if not confirm_run_unsafe_code:
        raise click.UsageError("HumanEval runs code that the model wrote; pass --confirm-run-unsafe-code to allow it")
    _run(_prepared(options, ("specdec_humaneval",), unsafe_code=True), options)


_LM_EVAL_EXAMPLES = examples(
    "specdec eval lm-eval --model specdec --model_args pretrained=gsm-llama,draft=auto --tasks specdec_arithmetic "
    "--limit 20 --apply_chat_template"
)


@click.command(
    "lm-eval",
    short_help="lm-eval's own command line with the specdec model.",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def lm_eval(arguments: tuple[str, ...]) -> None:
    """lm-eval's own command line, with --model specdec and the offline tasks known to it."""
    require("lm_eval", "eval")
    if arguments in ((), ("--help",), ("-h",)):
        click.echo(_LM_EVAL_EXAMPLES.removeprefix("\b\n") + "\n")
    from lm_eval.__main__ import cli_evaluate

    from evals.accuracy.lm_eval_model import register

    register()
    # Add our folder of tasks where a command takes one and none was given.
    from evals.accuracy.accuracy import TASKS

    flags = [argument.split("=")[0] for argument in arguments]
    asks = any(flag in ("--tasks", "--config", "-C") or flag.startswith("-t") for flag in flags)
    given = "--include_path" in flags or any(map(_names_a_folder, arguments))
    sys.argv = ["lm_eval", *(arguments if given or not asks else (*arguments, "--include_path", str(TASKS)))]
    cli_evaluate()


def _names_a_folder(argument: str) -> bool:
    """Whether this is a file of lm-eval's --config with an include_path, which a flag would replace."""
    path = Path(argument.removeprefix("--config=").removeprefix("-C"))
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return False
    return any(line.startswith("include_path:") for line in path.read_text("utf-8").splitlines())


def _prepared(options: Options, tasks: tuple[str, ...], **more: Any) -> Prepared:
    """Tasks and data, found before a model is loaded. more: options of `AccuracyPlan`."""
    for package in ("lm_eval", "datasets", "scipy"):
        require(package, "eval")
    from evals.accuracy.accuracy import AccuracyPlan, prepare
    from evals.cli.commands import check_outputs

    plan = AccuracyPlan(
        tasks=tasks,
        k=options["k"] or shared.OWN_K,
        data_dir=_data_dir(options["data"]),
        limit=options["limit"],
        max_gen_toks=options["max_new_tokens"],
        seed=options["seed"],
        **more,
    )
    check_outputs(options)
    return prepare(plan)


def _data_dir(data: Path | None) -> Path | None:
    """The folder of local data; of a file, its folder.

    Raises:
        DataError: it does not exist, or the file is not test.jsonl.
    """
    from evals.data.datasets import data_folder
    from evals.errors import DataError

    if data is not None and data.suffix == ".jsonl":
        if data.name != "test.jsonl" or not data.is_file():
            raise DataError(f"--data {data}: give an existing test.jsonl, or the folder it lies in")
        return data.parent
    return data_folder(data)


def _run(prepared: Prepared, options: Options) -> None:
    from evals.accuracy import accuracy
    from evals.cli.commands import end
    from evals.runs.conversations import Worker
    from specdec.cli.tables import make_console

    worker = Worker({"main": shared.make_spec(options, options["draft"], prepared.plan.k)})
    facts = worker.facts()["main"]
    k = facts["engine"]["num_speculative_tokens"]  # the one asked for, or the draft's own
    prepared = replace(prepared, plan=replace(prepared.plan, k=k))
    fixed = accuracy.settings(prepared.plan, facts)
    with shared.recorded(options["run_dir"], fixed, prepared.questions, 2) as (store, progress):
        document = accuracy.run(worker.models["main"], facts, prepared, store, progress)
    console = make_console()
    _print(console, document)
    end(console, options, document, store)
    if _untested(document):
        sys.exit(Verdict.NOT_TESTED.exit_code)


def _print(console: Console, document: Json) -> None:
    from rich.table import Table

    from evals.report.terminal import print_text, show

    alone, fast = (arm["name"] for arm in document["arms"])
    table = Table("task", "metric", alone, fast, "difference", f"only {alone}", f"only {fast}", "McNemar p")
    for row in document["scores"]:
        names = (row["task"], f"{row['metric']}, {row['filter']}")
        table.add_row(*names, _right(row, "right_a"), _right(row, "right_b"), *_compared(row))
    console.print(table)
    speedup = {"low": None, **document["arms"][1]["timing"]["speedup"]}
    shown = ("tau", "speedup", "mcnemar", "accuracy_interval", "interval")
    definitions = {key: document["definitions"][key] for key in shown}
    values = {"show": show, "speedup": speedup, "untested": _untested(document), "definitions": definitions}
    print_text(console, "accuracy", document=document, **values)


def _right(row: Json, side: str) -> str:
    return f"{row[side] / row['total']:.4f} ({row[side]}/{row['total']})"


def _compared(row: Json) -> tuple[str, str, str, str]:
    """Difference with its interval, questions right on one side only, and p-value of a row of scores."""
    p_value = "none differs" if row["p_value"] is None else f"{row['p_value']:.3g}"
    shown = f"{row['difference']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]"
    return shown, str(row["only_a"]), str(row["only_b"]), p_value


def _untested(document: Json) -> bool:
    """Whether no draft was verified, so that there is no acceptance rate."""
    return document["arms"][1]["metrics"]["acceptance_rate"]["estimate"] is None
