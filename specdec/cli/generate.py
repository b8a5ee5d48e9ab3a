"""The command `specdec generate`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from specdec.cli.options import (
    FILE,
    PATH,
    SAMPLING_OPTIONS,
    added,
    check_sampling,
    examples,
    flag,
    load_for_sampling,
    model_options,
    option,
)
from specdec.errors import InvalidInputError
from specdec.values import Json

if TYPE_CHECKING:
    from specdec.model import SpeculativeModel
    from specdec.requests.request import Completion
    from specdec.requests.sampling import SamplingParams

_GENERATE_EXAMPLES = examples(
    'specdec generate "Tom has 3 boxes of 12 eggs. How many eggs?" --stats',
    'specdec generate "Tom has 3 boxes of 12 eggs. How many eggs?" --model gsm-deepseek --draft mtp -k 3',
    "specdec generate --file questions.jsonl --output answers.jsonl --max-new-tokens 100",
    'echo "How many is 3 times 12?" | specdec generate --draft none --temperature 0.7 --seed 1',
)


@click.command(epilog=_GENERATE_EXAMPLES)
@click.argument("prompt", required=False)
@option("--file", "Prompts: .jsonl (one a line, one batch), or one text.", FILE)
@flag("--raw", "Give the prompt as it is, without the chat template.")
@flag("--stats", "Print acceptance length, acceptance per position and times.")
@flag("--json as_json", "One JSON object a prompt, as each ends, instead of text.")
@option("--output", "A new file for these JSON objects, one a line.", PATH)
@added(SAMPLING_OPTIONS)
@model_options(["seed"])
def generate(
    prompt: str | None, file: Path | None, raw: bool, stats: bool, as_json: bool, output: Path | None, **options: Any
) -> None:
    """Generate text from PROMPT, from --file, or from standard input; tokens appear as they are accepted.

    The lines of a .jsonl file are one batch. Objects of --json and --output come as their prompts end, with the "index"
    of the line (from 0) and its "id" if it has one.
    """
    if stats and as_json:
        raise click.UsageError("--json has the statistics of each prompt in it; leave --stats out")
    check_sampling(options)
    asked = _read_prompts(prompt, file)
    if output is not None:
        if os.path.lexists(output):
            raise InvalidInputError(f"--output {output} exists; give another name, or remove it")
        if not output.absolute().parent.is_dir():
            raise InvalidInputError(f"--output {output}: there is no folder {output.absolute().parent}")
    model, params = load_for_sampling(options)
    from specdec.loading.tokenizers import as_chats

    prompts = [each.prompt for each in asked]
    prompts = prompts if raw else as_chats(model.tokenizer, prompts)
    if as_json or output is not None:
        done = _write_json(model, prompts, params, [each.id for each in asked], output)
    else:
        done = _print_batch(model, prompts, params) if len(prompts) > 1 else _print_one(model, prompts[0], params)
    if stats:
        from rich.console import Console

        from specdec.cli.tables import route_rows, stats_table

        table = stats_table(done)
        for name, value in route_rows(model.describe()):
            table.add_row(name, value)
        Console(stderr=True).print(table)


class PromptLine(NamedTuple):
    """A prompt, and the id that its line gives it; None where it gives none."""

    prompt: Any
    id: Any = None


def _read_prompts(prompt: str | None, file: Path | None) -> list[PromptLine]:
    if prompt is not None and file is not None:
        raise InvalidInputError("both a prompt and --file were given; give one of them")
    if file is not None:
        return read_prompt_file(file)
    if prompt is None and sys.stdin.isatty():
        raise InvalidInputError("no prompt: give it as an argument, through --file, or on standard input")
    text = prompt if prompt is not None else sys.stdin.read().rstrip("\n")
    if not text:
        raise InvalidInputError("the prompt is empty; give it as an argument, through --file, or on standard input")
    return [PromptLine(text)]


def read_prompt_file(path: Path) -> list[PromptLine]:
    """Prompts of a .jsonl file, one a line, or one text.

    Raises:
        InvalidInputError: it cannot be read, is empty, or a line is no prompt.
    """
    from drafters.training.data import question_lines, read_text

    if path.suffix == ".jsonl":
        return [PromptLine(content, row.get("id")) for _, row, content in question_lines(path)]
    text = read_text(path, "prompts")
    if not text.strip():
        raise InvalidInputError(f"{path} is empty; at least one token is needed")
    return [PromptLine(text.rstrip("\n"))]


def _write_json(
    model: SpeculativeModel, prompts: list[Any], params: SamplingParams, ids: list[Any], output: Path | None
) -> list[Completion]:
    """An object for each prompt as it ends, beside a bar where that disturbs nothing. Returns them in that order."""
    from specdec.requests.shown import with_bar

    done = []
    hidden = not sys.stderr.isatty() or (output is None and sys.stdout.isatty())
    with contextlib.nullcontext(sys.stdout) if output is None else output.open("x", encoding="utf-8") as file:
        for index, completion in with_bar(model.stream(prompts, params), hidden=hidden):
            done.append(completion)
            named = {} if ids[index] is None else {"id": ids[index]}
            click.echo(json.dumps(named | {"index": index} | _record(completion), ensure_ascii=False), file=file)
    return done


def _record(completion: Completion) -> Json:
    pooled = completion.pooled
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "prompt_token_ids": completion.prompt_token_ids,
        "finish_reason": completion.finish_reason,
        "truncated_by": completion.truncated_by,
        "tau": pooled.tau if pooled.rounds else None,
        "stats": asdict(completion.stats),
    }


def _print_one(model: SpeculativeModel, prompt: Any, params: SamplingParams) -> list[Completion]:
    """Tokens as they are accepted."""
    done = []
    for update in model.stream([prompt], params):
        click.echo(update.text, nl=False)
        if update.completion is not None:
            done.append(update.completion)
    click.echo()
    return done


def _print_batch(model: SpeculativeModel, prompts: list[Any], params: SamplingParams) -> list[Completion]:
    """All prompts in one batch; each text as soon as it and those before it have ended."""
    waiting = {}
    done: list[Completion] = []
    for index, completion in model.generate_iter(prompts, params):
        waiting[index] = completion
        while len(done) in waiting:
            done.append(waiting.pop(len(done)))
            click.secho(f"[{len(done)}/{len(prompts)}]", bold=True)
            click.echo(done[-1].text)
    return done
