"""Rounds of mixtures of experts, forms of the experts' matmuls side by side, with the routes held.

    python -m benchmarks.bench_mixtures --shape qwen3-30b-a3b --layers 16 --drafts 0,3 --rows 1,8,32,128 --out mix.jsonl

One process, one model, an engine for each form, turn by turn: `grouped`, as engines are, and `paired`, as it was
before: each (token, expert) pair multiplied by itself, from 1,024 pairs on transformers' grouped matmul, and torch's
top-k. MXFP4 has no such form. Experts by token slot are drawn uniformly once and replace the routers' choice in both
(`benchmarks.routing.HeldRoutes`). The floor reads each chosen expert once, as it is stored. Acceptance is synthetic,
0.8 a position, as in bench_round. With --sampled rows have temperature 0.8 and top-p 0.95.

With --requests the workload of bench_serving is run in place of batches: so many requests, prompts of 64 to 1,024
tokens, outputs of 32 to 384, at most the largest of --rows at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import click
import numpy as np
import torch

from attention.hf.weights import model_bytes
from benchmarks.bench_round import Moments, floor, in_turn, prompts
from benchmarks.bench_serving import seconds_of
from benchmarks.document import publish, usage
from benchmarks.engines import sizes_of, wrapped
from benchmarks.given import Listed, ResultFile, wait_for
from benchmarks.serving import served
from benchmarks.shapes import SHAPES, random_pair
from benchmarks.synthetic import DrawnAcceptance, decide
from benchmarks.workload import Load
from specdec.compiler import passes
from specdec.ops.mixtures import choice
from specdec.requests.sampling import SamplingParams

PROMPT, FORMS = 512, ("grouped", "paired")


@contextmanager
def _as_before() -> Iterator[None]:
    """Engines that are made inside run mixtures as the commit before did; the compiler's cache knows them apart."""
    with (
        patch.object(choice, "gating_of", lambda _: None),
        patch.object(passes, "choose_at_once", lambda _: None),
        patch.object(passes.Rewriting, "uuid", lambda _: "benchmark-as-before"),
    ):
        yield


def _served(models: dict[str, Any], load: Load, vocab: int, at_once: int, repeats: int) -> dict[str, Any]:
    """Output tokens a second of the workload with each form, turn by turn, after a run that does not count."""
    found: dict[str, list[float]] = {form: [] for form in models}
    for turn in range(repeats + 1):
        for form, (model, _) in models.items():
            lines = served(model, load.arrivals(vocab, turn))
            if turn:
                found[form].append(sum(sum(line.counts) for line in lines) / seconds_of(lines))
    line: dict[str, Any] = {"requests": load.requests, "rows": at_once}
    line |= {f"{form}_tokens_per_s": each for form, each in found.items()}
    if len(found) == 2:
        line["times_paired"] = float(np.median(np.divide(found["grouped"], found["paired"])))
    click.echo(json.dumps(line))
    return line


@click.command(help=usage(__doc__))
@click.option("--shape", type=click.Choice(sorted(SHAPES)), default="qwen3-30b-a3b", show_default=True)
@click.option("--layers", type=click.IntRange(1), help="Fewer than the shape has.")
@click.option("--drafts", type=Listed(click.IntRange(0)), default="0,3", show_default=True)
@click.option("--rows", type=Listed(click.IntRange(1)), default="1,8,32", show_default=True)
@click.option("--weights", type=click.Choice(["model", "fp8", "mxfp4"]), default="model", show_default=True)
@click.option("--forms", type=Listed(click.Choice(FORMS)), default=",".join(FORMS), show_default=True)
@click.option("--sampled", is_flag=True, help="Temperature 0.8 and top-p 0.95.")
@click.option("--requests", type=click.IntRange(0), default=0, help="Of a workload; default: batches of --rows.")
@click.option("--new-tokens", type=click.IntRange(32), default=96, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--hold", type=click.Path(path_type=Path), help="Measure once this file exists; FILE.ready says so.")
@click.option("--out", type=ResultFile(), required=True, help="JSON lines are appended.")
def main(
    shape: str,
    layers: int | None,
    drafts: list[int],
    rows: list[int],
    weights: str,
    forms: list[str],
    sampled: bool,
    requests: int,
    new_tokens: int,
    repeats: int,
    device: str,
    hold: Path | None,
    out: Path,
) -> None:
    """Measure every K and batch with each form."""
    pair = random_pair(shape, torch.bfloat16, torch.device(device), weights, layers, held_tokens=1 << 16)
    allocated = torch.cuda.memory_allocated() / 2**30 if device == "cuda" else 0.0  # before an engine is made
    forms = ["grouped"] if weights == "mxfp4" else forms
    chosen = {"temperature": 0.8, "top_p": 0.95, "seed": 0} if sampled else {}
    vocab = pair.target.config.get_text_config().vocab_size
    for k in drafts:
        with ExitStack() as stack:
            models: dict[str, Any] = {}
            starts: dict[str, float] = {}
            for form in forms:
                torch.compiler.reset()  # so that a second start finds what is on the disk, and no more
                began = perf_counter()
                with _as_before() if form == "paired" else nullcontext():
                    sizes = sizes_of(k, rows, PROMPT, new_tokens, None)
                    if requests:
                        sizes = {"max_model_len": 1424, "max_num_seqs": max(rows), "kv_cache_tokens": 1424 * max(rows)}
                    graphs: Any = True if device == "cuda" else "auto"
                    model = stack.enter_context(wrapped(pair, k, cuda_graphs=graphs, **sizes))
                starts[f"{form}_start_s"] = perf_counter() - began
                read = Moments()
                decide(model, DrawnAcceptance(0.8, vocab, np.random.default_rng(0), model.device))
                model.engine.executor.reads.after_read = read.note
                models[form] = model, read
            if hold is not None and k == drafts[0]:
                wait_for(hold)
            facts: dict[str, Any] = {"benchmark": "mixtures", "shape": shape, "layers": layers, "drafts": k}
            facts |= {"weights": weights, "sampled": sampled, "weights_gib": model_bytes(pair.target) / 2**30}
            facts |= {"head_gib": model_bytes(pair.head) / 2**30, "allocated_gib": allocated}
            facts |= starts
            facts["kv_cache"] = [
                each for _, (model, _) in models.items() for each in model.describe()["kv_cache"].values()
            ]
            if requests:
                load = Load(requests, (64, 1024), (32, 384), float(sampled), 0.0, 0, 0)
                publish(facts | _served(models, load, vocab, max(rows), repeats), out, append=True)
                continue
            for count in rows:
                ids, params = (
                    prompts(count, (PROMPT, PROMPT), vocab),
                    [SamplingParams(new_tokens, ignore_eos=True, **chosen)] * count,
                )
                found, sequences = in_turn(models, ids, params, repeats)
                steps = {form: np.array([each["step_ms_median"] for each in own]) for form, own in found.items()}
                accepted = found[forms[0]][0]["tokens_a_round"] / count - 1
                line = floor(pair, sequences, k, new_tokens, accepted)
                line |= {f"{form}_ms": float(np.median(own)) for form, own in steps.items()}
                line["over_floor"] = line[f"{forms[0]}_ms"] / line["floor_ms"]
                if len(steps) == 2:
                    line["ratios"] = (steps["grouped"] / steps["paired"]).tolist()
                    line["over_paired"] = float(np.median(line["ratios"]))
                publish(facts | {"rows": count, "prompt": PROMPT} | line, out, append=True)
                click.echo(json.dumps(facts | {"rows": count} | line))


if __name__ == "__main__":
    main()
