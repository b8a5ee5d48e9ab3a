"""The command `specdec batch`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specdec.cli.options import (
    COUNT,
    FILE,
    PATH,
    SAMPLING,
    SAMPLING_OPTIONS,
    added,
    examples,
    load_options_of,
    model_options,
    option,
    sampling_of,
)
from specdec.values import Options, without

if TYPE_CHECKING:
    from specdec.extensions.batches.run_batch import Records
    from specdec.extensions.batches.tasks import TaskDefaults
    from specdec.options import LoadOptions

_SIZES = (
    *("max_num_seqs", "max_num_batched_tokens", "max_num_prefill_tokens", "gpu_memory_utilization", "kv_cache_tokens"),
    *("device", "seed"),
)
"""Load options that a run may go on with other values of."""
_FAILED = 1
"""The exit status where rows ended with an error."""


@click.command(
    epilog=examples(
        "specdec batch questions.jsonl answers.jsonl --max-new-tokens 100",
        "specdec batch questions.jsonl answers.jsonl --model gsm-deepseek --draft mtp --temperature 0.7 --seed 1",
        "specdec batch questions.jsonl answers.jsonl --ray 8",
    )
)
@click.argument("source", metavar="IN.jsonl", type=FILE)
@click.argument("target", metavar="OUT.jsonl", type=PATH)
@option("--ray workers", "N workers of a Ray cluster (RAY_ADDRESS, or here).", COUNT, metavar="N")
@added(SAMPLING_OPTIONS)
@model_options(["seed"])
@click.pass_context
def batch(context: click.Context, source: Path, target: Path, workers: int | None, **options: Any) -> None:
    """Answer every row of IN.jsonl into OUT.jsonl, in bounded memory. A killed run goes on by the same command.

    A row has a prompt (text), messages or token_ids, perhaps a key (custom_id, id or key), and options of its own, such
    as "temperature"; rows of OpenAI's batches are read and answered in their form. Answers come as rows end. Exit
    status: 0, or 1 where rows ended with an error.
    """
    from specdec.extensions.batches.run_batch import run_batch

    asking = _asking(options)
    load = load_options_of(without(options, ("seed",)), seed=asking.seed)
    start = partial(_records, options, load, asking, workers)
    summary = run_batch(source, target, _settings(options, load, asking), start)
    click.echo(summary.words, err=True)
    if summary.failed:
        context.exit(_FAILED)


def _asking(options: Options) -> TaskDefaults:
    from specdec.extensions.batches.tasks import TaskDefaults

    return TaskDefaults(sampling_of(options), options["seed"] or 0, options["model"])


def _settings(options: Options, load: LoadOptions, asking: TaskDefaults) -> Options:
    """What answers depend on."""
    loaded = without(load.as_arguments(), _SIZES)
    named = {name: options[name] for name in ("model", "draft", *SAMPLING)}
    return {**named, "seed": asking.seed, "load": {name: _plain(value) for name, value in loaded.items()}}


def _plain(value: Any) -> Any:
    """As JSON has it."""
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)


def _records(options: Options, load: LoadOptions, asking: TaskDefaults, workers: int | None) -> Records:
    """What answers lines: a model in this process, or workers."""
    from specdec.cli.options import draft_of, load_model

    model = options["model"]
    draft = options["draft"]
    if workers is not None:
        from specdec.extensions.batches.ray import spread

        head = draft_of(model, draft, load)
        return partial(spread, count=workers, model=model, draft=head, asking=asking, options=load)
    from specdec.extensions.batches.records import records

    return partial(records, load_model(model, draft, load), asking=asking)
