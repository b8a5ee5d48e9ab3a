"""The command `specdec generate`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specdec.cli.options import added, check_sampling, examples, load_model, load_options_of, model_options
from specdec.errors import InvalidInputError

if TYPE_CHECKING:
    from specdec.model import SpeculativeModel
    from specdec.requests.request import Completion
    from specdec.requests.sampling import SamplingParams

_SAMPLING_OPTIONS = (
    click.option("--max-new-tokens", type=click.IntRange(1), default=256, show_default=True),
    click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="0 is greedy."),
    click.option("--top-k", type=click.IntRange(0), default=0, show_default=True, help="0 is off."),
    click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True),
    click.option("--min-p", type=click.FloatRange(0, 1), default=0.0, show_default=True),
    click.option("--seed", type=int, help="Fixes the random draws."),
    click.option("--stop", multiple=True, help="A string that ends the text; may be given several times."),
)


_GENERATE_EXAMPLES = examples(
    'specdec generate "Tom has 3 boxes of 12 eggs. How many eggs?" --stats',
    'specdec generate "Tom has 3 boxes of 12 eggs. How many eggs?" --model gsm-deepseek --draft mtp -k 3',
    "specdec generate --file questions.jsonl --json --max-new-tokens 100",
    'echo "How many is 3 times 12?" | specdec generate --draft none --temperature 0.7 --seed 1',
)


@click.command(epilog=_GENERATE_EXAMPLES)
@click.argument("prompt", required=False)
@click.option(
    "--file", "file", type=click.Path(path_type=Path), help="Prompts: .jsonl (one a line, one batch), or one text."
)
@click.option("--raw", is_flag=True, help="Give the prompt as it is, without the chat template.")
@click.option("--stats", is_flag=True, help="Print acceptance length, acceptance per position and times.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a prompt instead of streamed text.")
@added(_SAMPLING_OPTIONS)
@model_options(without=["seed"])
def generate(
    prompt: str | None, file: Path | None, raw: bool, stats: bool, as_json: bool, stop: tuple[str, ...], **options: Any
) -> None:
    """Generate text from PROMPT, from --file, or from standard input; tokens appear as they are accepted."""
    from specdec.loading.tokenizers import as_chats
    from specdec.requests.sampling import SamplingParams

    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
    if stats and as_json:
        raise click.UsageError("--json has the statistics of each prompt in it; leave --stats out")
    check_sampling(options)
    params = SamplingParams(stop=stop, **{name: options[name] for name in names})
    prompts = _read_prompts(prompt, file)
    seed = {} if params.seed is None else {"seed": params.seed}
    options.pop("seed")
    model = load_model(options["model"], options["draft"], load_options_of(options, **seed))
    if not raw:
        prompts = as_chats(model.tokenizer, prompts)
    if as_json:
        _print_json(model, prompts, params)
        return
    done = _print_batch(model, prompts, params) if len(prompts) > 1 else _print_one(model, prompts[0], params)
    if stats:
        _print_stats(model, done)


def _read_prompts(prompt: str | None, file: Path | None) -> list[Any]:
    if prompt is not None and file is not None:
        raise InvalidInputError("both a prompt and --file were given; give one of them")
    if file is not None:
        return read_prompt_file(file)
    if prompt is None and sys.stdin.isatty():
        raise InvalidInputError("no prompt: give it as an argument, through --file, or on standard input")
    text = prompt if prompt is not None else sys.stdin.read().rstrip("\n")
    if not text:
        raise InvalidInputError("the prompt is empty; at least one token is needed")
    return [text]


def read_prompt_file(path: Path) -> list[Any]:
    """Prompts of a .jsonl file, one a line, or one text.

    Raises:
        InvalidInputError: it cannot be read, is empty, or a line is no prompt.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"cannot read prompts from {path}: {error}") from error
    if path.suffix != ".jsonl":
        if not text.strip():
            raise InvalidInputError(f"{path} is empty; at least one token is needed")
        return [text.rstrip("\n")]
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise InvalidInputError(
            f"{path} has no prompts; give one JSON object a line, with prompt, question or messages"
        )
    return [_prompt_of(path, number, line) for number, line in lines]


def _prompt_of(path: Path, number: int, line: str) -> Any:
    keys = ("messages", "prompt", "question")
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidInputError(f"{path}, line {number}: not JSON ({error})") from error
    found = [record[key] for key in keys if isinstance(record, dict) and key in record]
    if not found:
        raise InvalidInputError(f"{path}, line {number}: no field of {', '.join(keys)}")
    return found[0]


def _print_json(model: SpeculativeModel, prompts: list[Any], params: SamplingParams) -> None:
    for completion in model.generate(prompts, params):
        pooled = completion.pooled
        record = {
            "text": completion.text,
            "token_ids": completion.token_ids,
            "prompt_token_ids": completion.prompt_token_ids,
            "finish_reason": completion.finish_reason,
            "tau": pooled.tau if pooled.rounds else None,
            "stats": asdict(completion.stats),
        }
        click.echo(json.dumps(record, ensure_ascii=False))


def _print_one(model: SpeculativeModel, prompt: Any, params: SamplingParams) -> list[Completion]:
    """Tokens as they are accepted."""
    done = []
    for update in model.stream([prompt], params):
        click.echo(update.text, nl=False)
        sys.stdout.flush()
        if update.completion is not None:
            done.append(update.completion)
    click.echo()
    return done


def _print_batch(model: SpeculativeModel, prompts: list[Any], params: SamplingParams) -> list[Completion]:
    """All prompts in one batch; each text as soon as it and those before it have ended."""
    waiting: dict[int, Completion] = {}
    done: list[Completion] = []
    for index, completion in model.generate_iter(prompts, params):
        waiting[index] = completion
        while len(done) in waiting:
            done.append(waiting.pop(len(done)))
            click.secho(f"[{len(done)}/{len(prompts)}]", bold=True)
            click.echo(done[-1].text)
    return done


def _print_stats(model: SpeculativeModel, completions: list[Completion]) -> None:
    from rich.console import Console

    from specdec.cli.tables import route_rows, stats_table

    table = stats_table(completions)
    for name, value in route_rows(model.describe()):
        table.add_row(name, value)
    Console(stderr=True).print(table)
