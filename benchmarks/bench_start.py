"""Seconds of a start, from the call of from_pretrained to the end of a first greedy and a first sampled generate.

    python -m benchmarks.bench_start --out benchmarks/results/start.json

Two processes one after the other, the first with empty caches (torch's compiler, Triton, FlashInfer) in a temporary
folder, the second with what the first left there. The target has a published shape and random weights, which are
loaded from a folder (--checkpoint, the time to read them counts) or lie on the GPU already. All other options of
from_pretrained are its defaults.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

_CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
_SHAPE, _PROMPT, _NEW_TOKENS = "llama-3.1-8b", 64, 32


def save_checkpoint(shape: str, folder: Path) -> None:
    """Random weights of a shape as a checkpoint of the target and one of its head."""
    import torch

    from benchmarks.shapes import random_pair
    from drafters.eagle3.checkpoint import save_eagle3

    pair = random_pair(shape, torch.bfloat16, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    pair.target.save_pretrained(folder / "target")
    save_eagle3(pair.head, folder / "head")  # type: ignore[arg-type]


def measure(shape: str, drafts: int, rows: int, folder: Path | None, options: dict[str, Any]) -> dict[str, Any]:
    """One start in this process."""
    begun = time.perf_counter()
    import numpy as np
    import torch
    from torch._dynamo.utils import compile_times, counters

    from benchmarks.bench_round import Tokenizer, prompts
    from benchmarks.shapes import random_pair
    from specdec import SamplingParams, SpeculativeModel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts: tuple[Any, Any]
    if folder is None:
        pair = random_pair(shape, torch.bfloat16, device)
        parts = pair.target, pair.head
    else:
        parts = folder / "target", folder / "head"
        options = options | {"device": device.type}
    tokenizer: Any = type("Deaf", (Tokenizer,), {"__call__": lambda self, text: {"input_ids": [1]}})()
    if device.type == "cuda":
        torch.cuda.synchronize()
    imported = time.perf_counter()
    model = SpeculativeModel.from_pretrained(
        *parts, tokenizer=tokenizer, num_speculative_tokens=drafts, max_num_seqs=rows, **options
    )
    loaded = time.perf_counter()
    ids = prompts(rows, (_PROMPT, _PROMPT), model.target.vocab_size)
    model.generate(ids, SamplingParams(max_new_tokens=_NEW_TOKENS, ignore_eos=True))
    greedy = time.perf_counter()
    params = SamplingParams(max_new_tokens=_NEW_TOKENS, ignore_eos=True, temperature=0.8, top_p=0.95)
    model.generate(ids, params)
    sampled = time.perf_counter()
    long = np.random.default_rng(3).integers(0, model.target.vocab_size, 700).tolist()
    model.generate([long[: model.config.max_model_len - 4]], SamplingParams(max_new_tokens=2, ignore_eos=True))
    facts = model.describe()
    return {
        "imports_s": imported - begun,
        "from_pretrained_s": loaded - imported,
        "first_greedy_s": greedy - loaded,
        "first_sampled_s": sampled - greedy,
        "start_s": sampled - imported,
        "long_prompt_after_s": time.perf_counter() - sampled,
        "steps": facts["start"],
        "kernels": facts["kernels"],
        "graphs": facts["graphs"],
        "compiled_graphs": counters["stats"]["unique_graphs"],
        "compiler_caches": {name: dict(counters[name]) for name in ("aot_autograd", "inductor")},
        "compile_times": compile_times(repr="csv", aggregate=True),
    }


def child(arguments: list[str], caches: Path) -> dict[str, Any]:
    """Run this file in a process of its own with these caches; what it printed last."""
    environment = os.environ | {name: str(caches / place) for name, place in _CACHES.items()}
    command = [sys.executable, "-m", "benchmarks.bench_start", *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def table(lines: dict[str, dict[str, Any]]) -> str:
    """Seconds by step, one column a start."""
    steps = list(dict.fromkeys(name for line in lines.values() for name in line["steps"]))
    rows = [(name, [line["steps"].get(name, 0.0) for line in lines.values()]) for name in steps]
    rows += [
        (name.removesuffix("_s"), [line[name] for line in lines.values()])
        for name in ("imports_s", "from_pretrained_s", "first_greedy_s", "first_sampled_s", "start_s")
    ]
    width = max(len(name) for name, _ in rows)
    head = f"{'seconds':{width}}" + "".join(f"{name:>10}" for name in lines)
    return "\n".join([head, *(f"{name:{width}}" + "".join(f"{s:10.2f}" for s in values) for name, values in rows)])


@click.command(help=__doc__)
@click.option("--shape", default=_SHAPE, show_default=True)
@click.option("--drafts", type=int, default=3, show_default=True, help="K.")
@click.option("--rows", type=int, default=32, show_default=True)
@click.option("--checkpoint/--no-checkpoint", default=False, show_default=True, help="Load the weights from a folder.")
@click.option("--options", default="{}", help="JSON: more options of from_pretrained.")
@click.option("--caches", type=click.Path(path_type=Path), help="Keep the caches in this folder (default: temporary).")
@click.option("--out", type=click.Path(path_type=Path))
@click.option("--here", is_flag=True, hidden=True, help="Measure one start in this process.")
@click.option("--folder", type=click.Path(path_type=Path), hidden=True)
@click.option("--save", is_flag=True, hidden=True, help="Only save the checkpoint.")
def main(
    shape: str,
    drafts: int,
    rows: int,
    checkpoint: bool,
    options: str,
    caches: Path | None,
    out: Path | None,
    here: bool,
    folder: Path | None,
    save: bool,
) -> None:
    """Measure a cold and a warm start."""
    if save and folder is not None:
        save_checkpoint(shape, folder)
        click.echo("{}")
        return
    if here:
        click.echo(json.dumps(measure(shape, drafts, rows, folder, json.loads(options))))
        return
    arguments = ["--shape", shape, "--drafts", str(drafts), "--rows", str(rows), "--options", options]
    with tempfile.TemporaryDirectory() as temporary:
        place = caches or Path(temporary)
        if checkpoint:
            weights = ["--folder", str(Path(temporary) / "checkpoint")]
            child([*arguments, *weights, "--save"], place / "unused")
            arguments += weights
        lines = {name: child([*arguments, "--here"], place) for name in ("cold", "warm")}
    from benchmarks.document import publish  # imports torch, which a start that is measured does itself

    click.echo(table(lines))
    for name, line in lines.items():
        click.echo(f"{name}: " + "; ".join(f"{kernel}: {state}" for kernel, state in line["kernels"].items()))
    about = {"benchmark": "start", "shape": shape, "drafts": drafts, "rows": rows, "checkpoint": checkpoint}
    publish(about | {"options": json.loads(options), **lines}, out)


if __name__ == "__main__":
    main()
