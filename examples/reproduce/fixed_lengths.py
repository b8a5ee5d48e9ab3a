"""Tokens per second at exact lengths: prompts of P tokens and N new ones each, without drafts and with them.

    python examples/reproduce/fixed_lengths.py --model MODEL --draft HEAD --num-speculative-tokens 3 --data gsm8k \
        --prompt-tokens 256 --new-tokens 128 --rows 1,8,32,128 --output lengths.json

Prompts are cut from the running text of a data set, every row's from another place; ends of text are ignored, so that
all rows have the same number of tokens. A time is that of one call with all rows, prompts included; the best of the
repeats counts, after one that does not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click

from evals.cli.eval_options import FILE, NUMBERS
from evals.data.datasets import DataSet, load
from evals.errors import DataError
from evals.runs.store import data_facts, versions
from specdec import Completion, SamplingParams, SpeculativeModel
from specdec.cli.lazy import BadInput
from specdec.cli.options import load_model, load_options_of, model_options
from specdec.errors import SpecdecError
from specdec.requests.stats import pool_requests


@dataclass(frozen=True)
class Measured:
    """One number of rows, with K drafts a round: seconds of a call, new tokens of all rows a second, τ."""

    rows: int
    k: int
    seconds: float
    tokens_per_s: float
    tau: float
    identical: int
    """Rows whose tokens are those without drafts (bf16 may round near ties the other way: see `eval lossless`)."""


@click.command()
@model_options(without=["max_num_seqs"])
@click.option("--data", required=True, help="Data set whose text the prompts are cut from, as in `specdec eval`.")
@click.option("--prompt-tokens", type=click.IntRange(1), required=True)
@click.option("--new-tokens", type=click.IntRange(2), required=True)
@click.option("--rows", type=NUMBERS, default="1", show_default=True, help="Requests at a time, e.g. 1,8,32.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@click.option("--output", type=FILE, default=None, help="Write the JSON document here.")
def main(**options: Any) -> None:
    """Measure tokens per second at exact lengths, without drafts and with them."""
    try:
        _measure(options)
    except SpecdecError as error:
        raise BadInput(" ".join(str(error).split())) from error


def _measure(options: dict[str, Any]) -> None:
    data = load(options["data"])
    chosen = load_options_of(options, max_num_seqs=max(options["rows"]))
    with load_model(options["model"], options["draft"], chosen) as model:
        prompts = cut(data, model.tokenizer, options["prompt_tokens"], max(options["rows"]))
        found = [
            each
            for rows in options["rows"]
            for each in both(model, prompts[:rows], options["new_tokens"], options["repeats"])
        ]
        facts = {key: model.describe()[key] for key in ("device", "dtype", "backend")}
    for each in found:
        click.echo(
            f"{each.rows:4} rows, K = {each.k}: {each.tokens_per_s:9.1f} tokens/s, {each.seconds:8.3f} s, "
            f"τ {each.tau:.2f}, {each.identical} of {each.rows} rows identical to K = 0"
        )
    if options["output"] is not None:
        lengths = {name: options[name] for name in ("model", "draft", "prompt_tokens", "new_tokens", "repeats")}
        document = {**lengths, "measured": [asdict(each) for each in found], **facts}
        document |= {"data": data_facts(data), "versions": versions()}
        options["output"].write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def cut(data: DataSet, tokenizer: Any, length: int, rows: int) -> list[list[int]]:
    """`rows` prompts of `length` tokens out of the text of all questions, at equal distances; the end meets the start.

    Raises:
        DataError: the whole text is shorter than one prompt.
    """
    text = "\n\n".join(turn for question in data.questions for turn in question.turns)
    ids = list(tokenizer(text)["input_ids"])
    if len(ids) < length:
        raise DataError(f"the text of {data.name} has {len(ids)} tokens, a prompt needs {length}; give a longer set")
    twice = ids + ids
    return [twice[start : start + length] for start in (row * len(ids) // rows for row in range(rows))]


def both(model: SpeculativeModel, prompts: list[list[int]], new: int, repeats: int) -> list[Measured]:
    """Without drafts and, where there is a head, with them."""
    alone, seconds = best(model, prompts, new, repeats, 0)
    found = [_measured(alone, alone, seconds, 0)]
    if model.head is not None:
        fast, seconds = best(model, prompts, new, repeats, model.num_speculative_tokens)
        found.append(_measured(fast, alone, seconds, model.num_speculative_tokens))
    return found


def best(
    model: SpeculativeModel, prompts: list[list[int]], new: int, repeats: int, k: int
) -> tuple[list[Completion], float]:
    """Completions and the shortest time of a call, in seconds."""
    params = SamplingParams(max_new_tokens=new, ignore_eos=True, num_speculative_tokens=k, cache_prefix=False)
    times = []
    for _ in range(repeats + 1):  # the first builds what this batch size needs
        started = time.perf_counter()
        completions = model.generate(prompts, params)
        times.append(time.perf_counter() - started)
    return completions, min(times[1:])


def _measured(completions: Sequence[Completion], alone: Sequence[Completion], seconds: float, k: int) -> Measured:
    tokens = sum(len(each.token_ids) for each in completions)
    same = sum(a.token_ids == b.token_ids for a, b in zip(completions, alone, strict=True))
    tau = pool_requests([each.stats for each in completions]).tau
    return Measured(len(completions), k, seconds, tokens / seconds, tau, same)


if __name__ == "__main__":
    main()
