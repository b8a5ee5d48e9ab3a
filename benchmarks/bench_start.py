"""Seconds of a start, from the call of from_pretrained to the end of a first greedy and a first sampled generate.

    python -m benchmarks.bench_start --out benchmarks/results/start.json

Two processes one after the other, the first with empty caches (torch's compiler, Triton, FlashInfer, the algorithms of
matmuls) in a temporary folder, the second with what the first left there. The target has a published shape and random
weights, which lie on the GPU already. All other options of from_pretrained are its defaults.

After the start each process serves a mixed workload twice (prompts of 64 to 1,024 tokens, greedy and sampled rows):
what a round of the first time waits for longer than the second time is compiled or captured there. Every number is
printed as soon as it is known, and --out is written after each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from benchmarks.given import usage

_CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",
    "XDG_CACHE_HOME": "xdg",
}
_SHAPE, _PROMPT, _NEW_TOKENS = "llama-3.1-8b", 64, 32
_WORKLOAD, _WORKLOAD_PROMPT, _WORKLOAD_OUTPUT = 64, (64, 1024), (32, 128)
_LONG_WAIT_S = 0.2


def measure(shape: str, drafts: int, rows: int, options: dict[str, Any]) -> Iterator[Any]:
    """One start in this process: its numbers, in parts, as they become known."""
    begun = time.perf_counter()  # imported before the start is only what makes its arguments
    import numpy as np
    import torch

    from benchmarks.document import provenance
    from benchmarks.engines import wrapped
    from benchmarks.shapes import random_pair
    from benchmarks.synthetic import SAMPLED
    from specdec import SamplingParams

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pair = random_pair(shape, torch.bfloat16, device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    imported = time.perf_counter()
    yield {"imports_s": imported - begun} | provenance()
    imported = time.perf_counter()
    model = wrapped(pair, drafts, max_num_seqs=rows, **options)
    loaded = time.perf_counter()
    facts = model.describe()
    known = {"steps": facts["start"], "kernels": facts["kernels"], "graphs": facts["graphs"]}
    yield {"from_pretrained_s": loaded - imported} | known
    ids = np.random.default_rng(1).integers(0, model.target.vocab_size, (rows, _PROMPT)).tolist()
    model.generate(ids, SamplingParams(max_new_tokens=_NEW_TOKENS, ignore_eos=True))
    greedy = time.perf_counter()
    yield {"first_greedy_s": greedy - loaded}
    model.generate(ids, SamplingParams(max_new_tokens=_NEW_TOKENS, ignore_eos=True, **SAMPLED))  # type: ignore[arg-type]
    sampled = time.perf_counter()
    yield {"first_sampled_s": sampled - greedy, "start_s": sampled - imported}
    for time_ in ("first", "second"):
        yield {f"workload_{time_}": workload(model)}


def workload(model: Any) -> dict[str, Any]:
    """Serve the mixed workload: how long its rounds took, the longest ones first."""
    from benchmarks.serving import served
    from benchmarks.workload import Load

    room = model.config.max_model_len - _WORKLOAD_OUTPUT[1]
    prompt = min(_WORKLOAD_PROMPT[0], room), min(_WORKLOAD_PROMPT[1], room)
    load, rounds = Load(_WORKLOAD, prompt, _WORKLOAD_OUTPUT, sampled_share=0.5), []
    engine, step = model.engine, model.engine.step

    def timed() -> Any:
        started = time.perf_counter()
        try:
            return step()
        finally:
            rounds.append(time.perf_counter() - started)

    engine.step = timed
    started = time.perf_counter()
    try:
        served(model, load.arrivals(model.target.vocab_size))
    finally:
        del engine.step
    return {"seconds": time.perf_counter() - started} | rounds_of(rounds)


def rounds_of(seconds: list[float]) -> dict[str, Any]:
    """Their number, the median, the five longest, and how many of them took more than 200 ms.

    >>> rounds_of([0.01, 0.3, 0.02])
    {'rounds': 3, 'median_ms': 20.0, 'longest_ms': [300.0, 20.0, 10.0], 'over_200_ms': 1}
    """
    order = sorted(seconds, reverse=True)
    return {
        "rounds": len(order),
        "median_ms": 1e3 * order[len(order) // 2],
        "longest_ms": [1e3 * each for each in order[:5]],
        "over_200_ms": sum(each > _LONG_WAIT_S for each in order),
    }


def child(arguments: list[str], caches: Path) -> Iterator[dict[str, Any]]:
    """Run this file in a process of its own with these caches: what it prints, part by part.

    Raises:
        ClickException: it failed.
    """
    environment = os.environ | {name: str(caches / place) for name, place in _CACHES.items()}
    command = [sys.executable, "-m", "benchmarks.bench_start", *arguments]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith("{"):
                yield json.loads(line)
            else:
                click.echo(line, nl=False)
    if running.returncode:
        raise click.ClickException(f"the start ended with exit code {running.returncode}")


@click.command(help=usage(__doc__))
@click.option("--shape", default=_SHAPE, show_default=True)
@click.option("--drafts", type=int, default=3, show_default=True, help="K.")
@click.option("--rows", type=int, default=32, show_default=True)
@click.option("--options", default="{}", help="JSON: more options of from_pretrained.")
@click.option("--caches", type=click.Path(path_type=Path), help="Keep the caches in this folder (default: temporary).")
@click.option("--out", type=click.Path(path_type=Path))
@click.option("--here", is_flag=True, hidden=True, help="Measure one start in this process.")
def main(**options: Any) -> None:
    """Measure a cold and a warm start."""
    o = SimpleNamespace(**options)
    if o.here:
        for part in measure(o.shape, o.drafts, o.rows, json.loads(o.options)):
            click.echo(json.dumps(part))  # flushes
        return
    arguments = ["--shape", o.shape, "--drafts", str(o.drafts), "--rows", str(o.rows), "--options", o.options]
    document: dict[str, Any] = {"benchmark": "start", "shape": o.shape, "drafts": o.drafts, "rows": o.rows}
    document |= {"options": json.loads(o.options)}
    with tempfile.TemporaryDirectory() as temporary:
        for name in ("cold", "warm"):
            document[name] = {}
            for part in child([*arguments, "--here"], o.caches or Path(temporary)):
                document[name] |= part
                click.echo(f"{name}: {json.dumps(part)}")
                if o.out is not None:
                    o.out.write_text(json.dumps(document) + "\n", encoding="utf-8")
    from benchmarks.document import publish  # imports torch, which a start that is measured does itself

    publish(document, o.out)


if __name__ == "__main__":
    main()
