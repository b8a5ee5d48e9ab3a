"""Drafts by lookup beside plain rounds, an EAGLE-3 head and transformers' prompt lookup.

    python -m benchmarks.bench_lookup --data gsm8k/test.jsonl [--questions 8] [--out lookup.json]
    python -m benchmarks.bench_lookup --shape llama-3.1-8b [--questions 4] [--new 256] [--out lookup.json]

The first on the built-in pair, with three tasks of GSM8K questions: "quoting", where the answer stands in the prompt
(the question, the target's own answer, the question once more); "few-shot", with three other questions and answers
before it; "plain", the question alone. The second on a GPU, with random weights whose text is known
(`benchmarks.synthetic.follow`): "quoting" has the whole answer in the prompt, "code" every other 12 tokens of it,
"plain" none; its head's drafts are accepted with probability 0.8 each, by lot.

Then what looking up costs where nothing matches (shortest match 16), and where one row in so many has a match.
Configurations take turns; medians of tokens a second, and of the ratios to plain rounds of the same turn. On a GPU also
the device's idle share of rounds without a match. Ends in one JSON line.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import torch

from benchmarks.bench_round import Moments, full_rounds, prompts
from benchmarks.document import publish, usage
from benchmarks.engines import sizes_of
from benchmarks.gaps import replay_gaps
from benchmarks.given import wait_for
from benchmarks.shapes import SHAPES, random_pair
from benchmarks.synthetic import DrawnAcceptance, Tokenizer, decide, follow
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams

K, HEAD_K, NEVER = 8, 5, 16
"""Drafts by lookup, and of a head; and a shortest match that no text here has."""
_PROMPT, _STRETCH, _GAP_ROUNDS = 512, 12, 30
Run = Callable[[list[list[int]]], tuple[int, float]]
"""Prompts -> (rounds or forwards, seconds)."""


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        models: by what drafts, "plain" first; of each task all but "nothing matches", which is for the costs.
        tasks: name -> prompts. many: prompts in which nothing matches, as many as the costs have rows.
    """

    models: dict[str, SpeculativeModel]
    tasks: dict[str, list[list[int]]]
    many: list[list[int]]


def generating(model: SpeculativeModel, new: int) -> Run:
    """All prompts at once, greedy, without an end."""
    params = SamplingParams(new, ignore_eos=True, cache_prefix=False)

    def run(asked: list[list[int]]) -> tuple[int, float]:
        before, start = model.engine_stats.rounds, time.perf_counter()
        found = model.generate(asked, params)
        assert all(len(completion.token_ids) == new for completion in found)
        return model.engine_stats.rounds - before, time.perf_counter() - start

    return run


def prompt_lookup(model: SpeculativeModel, new: int) -> Run:
    """transformers' own, one prompt at a time: it takes no batch."""

    def run(prompts: list[list[int]]) -> tuple[int, float]:
        own: dict[str, Any] = {"prompt_lookup_num_tokens": K, "max_new_tokens": new, "min_new_tokens": new}
        start = time.perf_counter()
        for prompt in prompts:
            ids = torch.tensor([prompt], device=model.device)
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


def builtin(data: Path, questions: int, new: int, rows: int) -> Setting:
    """GSM8K's questions and the built-in pair."""
    texts = [json.loads(line)["question"] for line in data.read_text("utf-8").splitlines()[: max(questions + 3, rows)]]
    load = SpeculativeModel.from_pretrained
    plain = load("gsm-llama", device="cpu")
    target: dict[str, Any] = {"target": plain.hf_model, "tokenizer": plain.tokenizer}
    head = load("gsm-llama", "auto", device="cpu").head
    models = {
        "plain": plain,
        "EAGLE-3": load(draft=head, **target),
        "lookup": load(draft="lookup", num_speculative_tokens=K, **target),
        "EAGLE-3 and lookup": load(draft=[head, "lookup"], num_speculative_tokens=HEAD_K, **target),
        "nothing matches": load(draft="lookup", num_speculative_tokens=K, lookup_min=NEVER, **target),
    }
    asked = [f"Question: {text}\nAnswer:" for text in texts]
    solved = [q + c.text for q, c in zip(asked, plain.generate(asked, SamplingParams(new)), strict=True)]
    tasks = {
        "quoting": [f"{own}\n\n{q}" for own, q in zip(solved, asked, strict=True)],
        "few-shot": ["\n\n".join([*solved[i + 1 : i + 4], asked[i]]) for i in range(questions)],
        "plain": asked,
    }
    ids = {name: [plain.tokenizer(text)["input_ids"] for text in own] for name, own in tasks.items()}
    return Setting(models, {name: own[:questions] for name, own in ids.items()}, ids["plain"][:rows])


def circling(shape: str, device: str, questions: int, new: int, rows: int) -> Setting:
    """Prompts of 512 tokens for a target of that shape whose text is known."""
    pair = random_pair(shape, torch.bfloat16, torch.device(device))
    circle = follow(pair.target)
    sizes: dict[str, Any] = sizes_of(K, [rows], _PROMPT, new + K, None)
    device_options = sizes | ({"cuda_graphs": True} if pair.target.device.type == "cuda" else {})

    def load(draft: Any, drafts: int, **options: Any) -> SpeculativeModel:
        return SpeculativeModel.from_pretrained(
            pair.target,
            draft,
            num_speculative_tokens=drafts,
            tokenizer=Tokenizer(),
            enable_prefix_caching=False,
            **device_options,
            **options,
        )

    models = {
        "plain": load(None, 0),
        "EAGLE-3": load(pair.head, HEAD_K),
        "lookup": load("lookup", K),
        "nothing matches": load("lookup", K, lookup_min=NEVER),
    }
    head = models["EAGLE-3"]
    decide(head, DrawnAcceptance(0.8, len(circle), np.random.default_rng(0), head.device))
    tasks: dict[str, list[list[int]]] = {"quoting": [], "code": [], "plain": []}
    for number, noise in enumerate(prompts(rows, (_PROMPT, _PROMPT), len(circle))):
        start = 2 * new * number
        answer = circle[start : start + new + K]
        pieces = [i // _STRETCH % 2 == 0 for i in range(len(answer))]
        for name, seen in (("quoting", [True] * len(answer)), ("code", pieces), ("plain", [False] * len(answer))):
            text = [own if here else other for own, other, here in zip(answer, noise, seen, strict=False)]
            tasks[name].append((text + noise[len(text) :])[: _PROMPT - 2] + answer[:2])
    return Setting(models, {name: own[:questions] for name, own in tasks.items()}, tasks["plain"])


def idle_shares(setting: Setting, counts: tuple[int, ...], new: int) -> list[dict[str, Any]]:
    """Of rounds from graphs with so many rows, plain and without a match: how long, and how much of it without work."""
    found = []
    for name, count in [(name, count) for count in counts for name in ("plain", "nothing matches")]:
        model, read = setting.models[name], Moments()
        model.engine.executor.reads.after_read = read.note
        params = [SamplingParams(new, ignore_eos=True, cache_prefix=False)] * count
        with full_rounds(model, read, setting.many[:count], params) as go_on:
            gaps = replay_gaps(lambda go_on=go_on: go_on(_GAP_ROUNDS))
        found.append({"drafts": name, "rows": count} | gaps)
    return found


def one_by_one(run: Run) -> Run:
    """The prompts one after the other."""

    def each(prompts: list[list[int]]) -> tuple[int, float]:
        done = [run([prompt]) for prompt in prompts]
        return sum(rounds for rounds, _ in done), sum(seconds for _, seconds in done)

    return each


def measured(setting: Setting, new: int, turns: int, rows: int) -> list[dict[str, Any]]:
    """A line for every task and what drafted."""
    runs = {name: generating(model, new) for name, model in setting.models.items()}
    nothing = {"plain": runs["plain"], "nothing matches": runs.pop("nothing matches")}
    own = prompt_lookup(setting.models["plain"], new)
    one = [*setting.many[: rows - 1], setting.tasks["quoting"][-1]]
    each: dict[str, tuple[dict[str, Run], list[list[int]]]] = {}
    for count in (1, rows):
        each[f"cost, {count} rows"] = nothing, setting.many[:count]
    each[f"one of {rows} rows matches"] = nothing | {"lookup": runs["lookup"]}, one
    for name, ids in setting.tasks.items():
        each[f"{name}, 1 row"] = (
            {n: one_by_one(r) for n, r in (runs | {"transformers' prompt lookup": own}).items()},
            ids,
        )
        each[f"{name}, {len(ids)} rows"] = runs, ids
    lines = []
    for task, (measured_runs, ids) in each.items():
        found = compared(measured_runs, ids, new, turns)
        lines += [{"task": task, "drafts": name, **numbers} for name, numbers in found.items()]
        click.echo(lines[-len(found) :])
    return lines


@click.command(help=usage(__doc__))
@click.option("--data", type=click.Path(path_type=Path, exists=True), help="GSM8K's test.jsonl.")
@click.option("--shape", type=click.Choice(sorted(SHAPES)), help="In place of --data, on a GPU.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True, help="With --shape.")
@click.option("--questions", default=8, show_default=True)
@click.option("--new", default=64, show_default=True, help="Tokens of an answer.")
@click.option("--turns", default=5, show_default=True)
@click.option("--rows", default=32, show_default=True, help="Of the costs in a batch.")
@click.option("--hold", type=click.Path(path_type=Path), help="Measure once this file exists; FILE.ready says so.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write the JSON there.")
def main(
    data: Path | None,
    shape: str | None,
    device: str,
    questions: int,
    new: int,
    turns: int,
    rows: int,
    hold: Path | None,
    out: Path | None,
) -> None:
    """Measure all tasks and costs."""
    if (data is None) == (shape is None):
        raise click.UsageError("give --data for the built-in pair on the CPU, or --shape for a GPU")
    setting = builtin(data, questions, new, rows) if data else circling(shape, device, questions, new, rows)  # type: ignore[arg-type]
    if hold is not None:
        wait_for(hold)
    found = {"benchmark": "lookup", "shape": shape or "gsm-llama", "K": K, "new_tokens": new, "turns": turns}
    found["results"] = measured(setting, new, turns, rows)
    if shape and device == "cuda":
        found["idle"] = idle_shares(setting, (1, rows), max(new, 64))
    publish(found, out)


if __name__ == "__main__":
    main()
