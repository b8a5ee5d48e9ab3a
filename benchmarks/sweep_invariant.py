"""Tiny models of many types with `backend="batch_invariant"`: the same bits in any batch, with drafts and without.

    python -m benchmarks.sweep_invariant --dtype bfloat16 --device cuda --jobs 8 --out benchmarks/results/FILE.jsonl
    python -m benchmarks.sweep_invariant --types qwen3_next,mamba2 --dtype float32

Of every type of `benchmarks.sweep_configs` (wrappers left out) four prompts in three engines: one row without drafts;
three rows with five drafts by lookup; eight rows with prompts read in pieces of at most 48 tokens. Tokens and
log-probabilities are compared bit by bit. One process a model, with a time limit. Of a type one line: "same",
"DIFFERS", "refused" with the reason, "not built", "ERROR" or "TIMEOUT".
"""

from __future__ import annotations

import multiprocessing
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.document import publish
from benchmarks.sweep_configs import all_cases
from benchmarks.sweep_models import NotBuilt, NumberTokenizer, build
from specdec import SamplingParams, SpeculativeModel
from specdec.errors import SpecdecError

ENGINES = ((1, 0, 256), (3, 5, 256), (8, 5, 48))
"""Rows, drafts, and tokens of a round."""


def bits(model: Any, rows: int, drafts: int, tokens: int) -> list[Any]:
    """Token ids and log-probabilities of every prompt."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 60, (n,), generator=generator).tolist() for n in (5, 20, 37, 60)]
    options: dict[str, Any] = {"num_speculative_tokens": drafts} if drafts else {}
    with SpeculativeModel.from_pretrained(
        model,
        "lookup" if drafts else None,
        tokenizer=NumberTokenizer(),
        backend="batch_invariant",
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        max_model_len=110,
        kv_cache_tokens=2048,
        **options,
    ) as wrapped:
        repeating = [prompt + prompt[:6] for prompt in prompts]
        done = wrapped.generate(repeating, SamplingParams(max_new_tokens=20, logprobs=0, ignore_eos=True))
    return [(c.token_ids, [each.logprob for each in c.logprobs or ()]) for c in done]


def judged(name: str, dtype: str, device: str) -> tuple[str, str]:
    """The outcome of one type, and what there is to say about it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    case = next(case for case in all_cases() if case.name == name)
    try:
        model = build(case).to(device, getattr(torch, dtype))
    except (NotBuilt, SpecdecError) as error:
        return "not built", str(error)
    try:
        first, *others = (bits(model, *engine) for engine in ENGINES)
    except SpecdecError as error:
        return "refused", str(error).replace("\n", " ")
    except Exception as error:
        return "ERROR", f"{type(error).__name__}: {error}"
    differing = [sum(a != b for a, b in zip(first, other, strict=True)) for other in others]
    return ("DIFFERS", str(differing)) if any(differing) else ("same", "")


def _work(name: str, dtype: str, device: str, found: Any) -> None:
    found.put(judged(name, dtype, device))


def run(name: str, dtype: str, device: str, seconds: float) -> dict[str, Any]:
    """The outcome of one type, from a process of its own."""
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    process = context.Process(target=_work, args=(name, dtype, device, found))
    started = time.perf_counter()
    process.start()
    process.join(seconds)
    outcome = ("TIMEOUT", "")
    if process.is_alive():
        process.kill()
    else:
        outcome = ("ERROR", f"exit code {process.exitcode}") if found.empty() else found.get()
    facts = {"type": name, "dtype": dtype, "device": device, "outcome": outcome[0], "why": outcome[1][:300]}
    return facts | {"seconds": round(time.perf_counter() - started, 1)}


@click.command(help=__doc__)
@click.option("--types", default="", help="Names, separated by commas; default all.")
@click.option("--dtype", default="bfloat16")
@click.option("--device", default="cpu")
@click.option("--jobs", default=1, help="Processes at a time.")
@click.option("--seconds", default=120.0, help="Most seconds of a type.")
@click.option("--out", type=click.Path(path_type=Path), help="A line of JSON a type is appended to it.")
def main(types: str, dtype: str, device: str, jobs: int, seconds: float, out: Path | None) -> None:
    names = types.split(",") if types else [case.name for case in all_cases() if case.wrapper is None]
    with ThreadPoolExecutor(jobs) as pool:
        for facts in pool.map(lambda name: run(name, dtype, device, seconds), names):
            publish(facts, out, append=True)


if __name__ == "__main__":
    main()
