"""A model on a CPU: transformers' own greedy generate, plain rounds and drafts by lookup, plain and packed weights.

    python -m benchmarks.bench_cpu --model FOLDER --data spec_bench/question.jsonl [--dtype bfloat16] [--threads 1]

Batch 1, one prompt after the other, the first of each category, read by the chat template; prefixes are not cached.
Configurations take turns; medians of the turns' wall and CPU seconds for all prompts, and of their ratios to
transformers and to plain rounds on packed weights in the same turn. Ends in one JSON line.
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
from transformers import AutoModelForCausalLM

from benchmarks.document import publish, usage
from specdec.model import SpeculativeModel

K, _PAGE_TOKENS = 8, 16384
Run = Callable[[list[int]], list[int]]
"""A prompt -> the tokens of its answer."""
_OWN, _PACKED = "transformers", "packed, K = 0"


def prompts(data: Path, categories: list[str], count: int, tokenizer: Any) -> dict[str, list[list[int]]]:
    """The first turns of the first questions of these categories."""
    found: dict[str, list[list[int]]] = {category: [] for category in categories}
    for line in data.read_text("utf-8").splitlines():
        question = json.loads(line)
        if len(found.get(question["category"], [None] * count)) < count:
            chat = [{"role": "user", "content": question["turns"][0]}]
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
            found[question["category"]].append(list(ids["input_ids"]))
    return found


def loaded(folder: str, dtype: str) -> dict[str, SpeculativeModel]:
    """By name: two with plain weights and two with packed ones."""
    found = {}
    for layout in ("plain", "packed"):
        for name, draft in (("K = 0", None), ("lookup", "lookup")):
            found[f"{layout}, {name}"] = SpeculativeModel.from_pretrained(
                *(folder, draft),
                dtype=dtype,
                device="cpu",
                cpu_linears=layout,
                num_speculative_tokens=K if draft else 0,
                max_num_seqs=1,
                kv_cache_tokens=_PAGE_TOKENS,
                enable_prefix_caching=False,
                generation_config="ignore",
            )
    return found


def transformers_run(folder: str, dtype: str, new: int) -> Run:
    """transformers' generate with its dynamic cache."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))

    def run(ids: list[int]) -> list[int]:
        prompt = torch.tensor([ids])
        lengths: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new}
        done = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **lengths)
        return done[0, len(ids) :].tolist()

    return run


def specdec_run(model: SpeculativeModel, new: int) -> Run:
    """Its generate."""

    def run(ids: list[int]) -> list[int]:
        return list(model.generate([ids], max_new_tokens=new, min_new_tokens=new, temperature=0)[0].token_ids)

    return run


def timed(run: Run, asked: list[list[int]]) -> tuple[float, float, list[list[int]]]:
    """Wall and CPU seconds, and the answers."""
    wall, cpu = time.perf_counter(), time.process_time()
    answers = [run(ids) for ids in asked]
    return time.perf_counter() - wall, time.process_time() - cpu, answers


def ratio(own: list[float], base: list[float]) -> float:
    """The median of the turns' ratios."""
    return round(median(a / b for a, b in zip(own, base, strict=True)), 3)


@click.command(help=usage(__doc__))
@click.option("--model", "folder", required=True, help="A model's folder.")
@click.option(
    "--data", type=click.Path(path_type=Path, exists=True), required=True, help="Spec-Bench's question.jsonl."
)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="bfloat16", show_default=True)
@click.option("--categories", default="math_reasoning,qa,summarization,writing", show_default=True)
@click.option("--questions", default=1, show_default=True, help="Of each category.")
@click.option("--new", default=64, show_default=True, help="Tokens of an answer.")
@click.option("--turns", default=5, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Append the JSON line there.")
def main(
    folder: str,
    data: Path,
    dtype: str,
    categories: str,
    questions: int,
    new: int,
    turns: int,
    threads: int,
    out: Path | None,
) -> None:
    """Measure all configurations."""
    torch.set_num_threads(threads)
    models = loaded(folder, dtype)
    tokenizer = next(iter(models.values())).tokenizer
    asked = prompts(data, categories.split(","), questions, tokenizer)
    runs = {_OWN: transformers_run(folder, dtype, new)}
    runs |= {name: specdec_run(model, new) for name, model in models.items()}
    for run in runs.values():
        run(next(iter(asked.values()))[0])
    spent: dict[tuple[str, str], list[tuple[float, float]]] = {}
    answers: dict[str, list[list[int]]] = {name: [] for name in runs}
    for turn in range(turns):
        for category, ids in asked.items():
            for name, run in runs.items():
                wall, cpu, found = timed(run, ids)
                spent.setdefault((name, category), []).append((wall, cpu))
                answers[name] += [] if turn else found
    results = []
    for category in ["all", *asked]:
        chosen = list(asked) if category == "all" else [category]
        walls, cpus = (
            {name: [sum(spent[name, c][t][i] for c in chosen) for t in range(turns)] for name in runs} for i in (0, 1)
        )
        for name in runs:
            line = {"category": category, "arm": name, "wall_s": round(median(walls[name]), 3)}
            line |= {"cpu_s": round(median(cpus[name]), 3)}
            line |= {
                "to_transformers": ratio(walls[name], walls[_OWN]),
                "cpu_to_transformers": ratio(cpus[name], cpus[_OWN]),
            }
            line |= {
                "to_packed_K0": ratio(walls[name], walls[_PACKED]),
                "cpu_to_packed_K0": ratio(cpus[name], cpus[_PACKED]),
            }
            results.append(line)
            click.echo(line)
    pairs = {name: sum(a == b for a, b in zip(own, answers[_OWN], strict=True)) for name, own in answers.items()}
    document = {"benchmark": "cpu", "model": Path(folder).name, "dtype": dtype, "threads": threads, "new_tokens": new}
    document |= {"turns": turns, "prompts": {c: [len(ids) for ids in own] for c, own in asked.items()}, "K": K}
    document |= {"starts": {name: model.describe()["start"] for name, model in models.items()}}
    publish(document | {"same_tokens_as_transformers": pairs, "results": results}, out, append=True)


if __name__ == "__main__":
    main()
