"""From a new process to the first token on a CPU: transformers, and a first and a second start of specdec.

    python -m benchmarks.bench_first_token --model FOLDER --dtype float32 --out benchmarks/results/first-token.jsonl

Each start is a process of its own: it imports, loads the model and its tokenizer, and generates one token greedily. The
three take turns, `--rounds` times. A first start has empty caches in a temporary folder, the second has what the first
left there. Of each the medians are printed: wall and CPU seconds of the whole process, of the import alone, and the
largest resident memory. --model may be a GGUF file.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import click

from benchmarks.given import usage

ARMS = ("transformers", "first", "second")
_PROMPT = "Why is the sky blue?"


def spent() -> dict[str, float]:
    """What this process has taken so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"cpu_s": used.ru_utime + used.ru_stime, "peak_mib": used.ru_maxrss / 1024}


def by_transformers(model: str, dtype: str) -> dict[str, float]:
    """Start and generate a token; what the import alone took."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    imported = spent()
    path = Path(model)
    gguf = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = path.parent if gguf else path
    target: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **gguf)
    given = AutoTokenizer.from_pretrained(folder, **gguf)(_PROMPT, return_tensors="pt")
    target.generate(**given, max_new_tokens=1, do_sample=False)
    return imported


def by_specdec(model: str, dtype: str, draft: str | None = None) -> dict[str, float]:
    """Start and generate a token; what the import alone took."""
    from specdec import SpeculativeModel

    imported = spent()
    target = SpeculativeModel.from_pretrained(model, draft, dtype=dtype)
    target.generate(_PROMPT, max_new_tokens=1, temperature=0)
    return imported


def start(arm: str, model: str, dtype: str, draft: str | None, caches: Path) -> dict[str, float]:
    """One start in a process of its own: its seconds and memory.

    Raises:
        ClickException: it failed.
    """
    command = [sys.executable, "-m", "benchmarks.bench_first_token", "--model", model, "--dtype", dtype, "--here", arm]
    command += ["--draft", draft] if draft else []
    begun = time.perf_counter()
    run = subprocess.run(command, env=os.environ | {"XDG_CACHE_HOME": str(caches)}, capture_output=True, text=True)
    wall = time.perf_counter() - begun
    if run.returncode:
        raise click.ClickException(f"{arm} ended with exit code {run.returncode}: {run.stderr[-500:]}")
    return {"wall_s": wall, **json.loads(run.stdout.splitlines()[-1])}


def compared(runs: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Medians of each arm, and their ratios to those of transformers.

    >>> one = {"wall_s": 2.0, "peak_mib": 8.0}
    >>> compared({"transformers": [one], "first": [one | {"wall_s": 3.0}]})[1]
    {'arm': 'first', 'wall_s': 3.0, 'peak_mib': 8.0, 'wall_s_over': 1.5, 'peak_mib_over': 1.0}
    """
    medians = {arm: {key: median(run[key] for run in own) for key in own[0]} for arm, own in runs.items()}
    found: list[dict[str, Any]] = []
    for arm, own in medians.items():
        over = {f"{key}_over": value / medians["transformers"][key] for key, value in own.items()}
        found.append({"arm": arm, **{key: round(value, 3) for key, value in (own | over).items()}})
    return found


@click.command(help=usage(__doc__))
@click.option("--model", required=True, help="A folder in safetensors, or a GGUF file.")
@click.option("--dtype", default="float32", show_default=True)
@click.option("--draft", help="specdec's head, as `from_pretrained` takes it; none by default.")
@click.option("--rounds", type=int, default=5, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Append the line to this file.")
@click.option("--here", hidden=True, help="Measure one start in this process.")
def main(**options: Any) -> None:
    """Measure starts."""
    o = SimpleNamespace(**options)
    if o.here:
        given = (o.model, o.dtype)
        imported = by_transformers(*given) if o.here == "transformers" else by_specdec(*given, o.draft)
        click.echo(json.dumps(spent() | {"import_cpu_s": imported["cpu_s"]}))
        return
    runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for _ in range(o.rounds):
        with tempfile.TemporaryDirectory() as caches:
            for arm in ARMS:
                runs[arm].append(start(arm, o.model, o.dtype, o.draft, Path(caches)))
                click.echo(f"{arm}: {json.dumps(runs[arm][-1])}")
    from benchmarks.document import publish  # imports torch, which a start that is measured does itself

    facts = {
        "benchmark": "first_token",
        "model": Path(o.model).name,
        "dtype": o.dtype,
        "draft": o.draft,
        "rounds": o.rounds,
    }
    publish(
        facts | {"threads": os.environ.get("OMP_NUM_THREADS", "all")} | {"results": compared(runs)}, o.out, append=True
    )


if __name__ == "__main__":
    main()
