"""Drafts by lookup beside plain rounds, an EAGLE-3 head and transformers' prompt lookup, on the built-in pair.

    python -m benchmarks.bench_lookup --data gsm8k/test.jsonl [--questions 8] [--out lookup.json]

Three tasks of GSM8K questions: "quoting", where the answer stands in the prompt (the question, the target's own answer,
the question once more); "few-shot", with three other questions and answers before it; "plain", the question alone. Then
what looking up costs where nothing matches (shortest match 16), and where one row in so many has a match.
Configurations take turns; medians of tokens a second, and of the ratios to plain rounds of the same turn. Ends in one
JSON line.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

from benchmarks.document import publish, usage
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams

K = 8
Run = Callable[[list[list[int]]], tuple[int, float]]
"""Prompts -> (rounds or forwards, seconds)."""


def generating(model: SpeculativeModel, new: int) -> Run:
    """All prompts at once, greedy, without an end."""
    params = SamplingParams(new, ignore_eos=True, cache_prefix=False)

    def run(prompts: list[list[int]]) -> tuple[int, float]:
        before, start = model.engine_stats.rounds, time.perf_counter()
        found = model.generate(prompts, params)
        assert all(len(completion.token_ids) == new for completion in found)
        return model.engine_stats.rounds - before, time.perf_counter() - start

    return run


def prompt_lookup(model: SpeculativeModel, new: int) -> Run:
    """transformers' own, one prompt at a time: it takes no batch."""

    def run(prompts: list[list[int]]) -> tuple[int, float]:
        own: dict[str, Any] = {"prompt_lookup_num_tokens": K, "max_new_tokens": new, "min_new_tokens": new}
        start = time.perf_counter()
        for prompt in prompts:
            ids = torch.tensor([prompt])
            model.hf_model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **own)
        return 0, time.perf_counter() - start

    return run


def compared(
    runs: dict[str, Run], prompts: list[list[int]], new: int, turns: int
) -> dict[str, dict[str, float | None]]:
    """Tokens a second of each, tokens a round, and the ratio of its speed to "plain" in the same turn: medians."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    rounds = {name: run(prompts)[0] for name, run in runs.items()}  # also warms up
    for _ in range(turns):
        for name, run in runs.items():
            seconds[name].append(run(prompts)[1])
    tokens = len(prompts) * new
    return {
        name: {
            "tokens_per_s": round(tokens / median(own), 1),
            "speedup": round(median(p / s for p, s in zip(seconds["plain"], own, strict=True)), 3),
            "tokens_per_round": round(tokens / rounds[name], 2) if rounds[name] else None,
        }
        for name, own in seconds.items()
    }


def tasks_of(model: SpeculativeModel, questions: list[str], count: int, new: int) -> dict[str, list[list[int]]]:
    """The prompts of each task."""
    asked = [f"Question: {text}\nAnswer:" for text in questions]
    params = SamplingParams(new)
    solved = [q + c.text for q, c in zip(asked, model.generate(asked, params), strict=True)]
    texts = {
        "quoting": [f"{own}\n\n{q}" for own, q in zip(solved, asked, strict=True)],
        "few-shot": ["\n\n".join([*solved[i + 1 : i + 4], asked[i]]) for i in range(count)],
        "plain": asked,
    }
    return {name: [model.tokenizer(text)["input_ids"] for text in own[:count]] for name, own in texts.items()}


@click.command(help=usage(__doc__))
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True, help="GSM8K's test.jsonl.")
@click.option("--questions", default=8, show_default=True)
@click.option("--new", default=64, show_default=True, help="Tokens of an answer.")
@click.option("--turns", default=5, show_default=True)
@click.option("--rows", default=32, show_default=True, help="Of the costs in a batch.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write the JSON there.")
def main(data: Path, questions: int, new: int, turns: int, rows: int, out: Path | None) -> None:
    """Measure all tasks and costs."""
    texts = [json.loads(line)["question"] for line in data.read_text("utf-8").splitlines()[: max(questions + 3, rows)]]
    load = SpeculativeModel.from_pretrained
    plain = load("gsm-llama", device="cpu")
    target: dict[str, Any] = {"target": plain.hf_model, "tokenizer": plain.tokenizer}
    models = {
        "plain": plain,
        "EAGLE-3": load(draft=load("gsm-llama", "auto", device="cpu").head, **target),
        "lookup": load(draft="lookup", num_speculative_tokens=K, **target),
    }
    models["EAGLE-3 and lookup"] = load(draft=[models["EAGLE-3"].head, "lookup"], num_speculative_tokens=5, **target)
    runs = {name: generating(model, new) for name, model in models.items()}
    tasks = tasks_of(plain, texts, questions, new)
    found: dict[str, Any] = {}
    for name, prompts in tasks.items():
        alone = {**runs, "transformers' prompt lookup": prompt_lookup(plain, new)}
        found[f"{name}, 1 row"] = compared({n: one_by_one(run) for n, run in alone.items()}, prompts, new, turns)
        found[f"{name}, {questions} rows"] = compared(runs, prompts, new, turns)
    nothing = generating(load(draft="lookup", num_speculative_tokens=K, lookup_min=16, **target), new)
    many = [plain.tokenizer(f"Question: {text}\nAnswer:")["input_ids"] for text in texts[:rows]]
    for count in (1, rows):
        own = {"plain": runs["plain"], "nothing matches": nothing}
        found[f"cost, {count} rows"] = compared(own, many[:count], new, turns)
    one = [*many[: rows - 1], tasks["quoting"][0]]
    found[f"one of {rows} rows matches"] = compared(
        {"plain": runs["plain"], "nothing matches": nothing, "lookup": runs["lookup"]}, one, new, turns
    )
    rows_of = [{"task": task, "drafts": name, **own} for task, each in found.items() for name, own in each.items()]
    publish({"benchmark": "lookup", "K": K, "new_tokens": new, "turns": turns, "results": rows_of}, out)


def one_by_one(run: Run) -> Run:
    """The prompts one after the other."""

    def each(prompts: list[list[int]]) -> tuple[int, float]:
        done = [run([prompt]) for prompt in prompts]
        return sum(rounds for rounds, _ in done), sum(seconds for _, seconds in done)

    return each


if __name__ == "__main__":
    main()
