"""Planning and running one attention layer: every kernel against the bytes and operations it cannot avoid.

    python -m benchmarks.bench_attention --out benchmarks/results/attention.jsonl

A layer of Llama-3.1-8B's shape (32 query heads, 8 KV heads, head dim 128, pages of 16). Two kinds of batches: rows with
a few query tokens over a long cache (decoding and verification), bound by the bytes of the cache; and prompt chunks,
bound by operations. plan_us is the host's median time to plan on an idle device. run_us is the device's: launches over
as many layers as make the caches larger than the L2 cache, at least 16, replayed from a CUDA graph, so without launch
overhead (the torch reference runs once, without a graph). The floor is bytes over the copy rate or operations over the
matmul rate, both measured in the same run; a kernel that only reads can be a little faster than a copy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import click
import torch

from attention.cache.kv_cache import FP8
from benchmarks.attention_configurations import CUDA, PAGE_SIZE, Case, Configuration, Scene, configurations, make_scene
from benchmarks.device_time import Place, Rates, device_us, host_us, measured_rates
from benchmarks.document import provenance, usage
from benchmarks.given import numbers

PLACE = Place(CUDA, torch.bfloat16)
_LEAST_LAUNCHES = 16
_WORKSPACE_BYTES = 256 << 20


def floor_us(case: Case, rates: Rates) -> float:
    """The least time of a case."""
    return max(case.cache_bytes / rates.copy, case.operations / rates.matmul) * 1e6


def decode_cases(rows: list[int], contexts: list[int], queries: list[int]) -> Iterator[Case]:
    """Few query tokens over a long cache, in every pair of dtypes."""
    pairs = ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.bfloat16, FP8))
    for n in rows:
        for context in contexts:
            for query in queries:
                yield from (Case(n, query, context, dtype, cache) for dtype, cache in pairs)


def prompt_cases() -> Iterator[Case]:
    """Prompt chunks: whole prompts, several of them, and the last chunk of a long one."""
    for rows, query, context in [(1, n, n) for n in (64, 128, 256, 512, 1024, 2048, 4096, 8192)] + [
        (4, 512, 512),
        (16, 128, 128),
        (1, 2048, 8192),
        (1, 512, 8192),
    ]:
        yield Case(rows, query, context, torch.bfloat16, torch.bfloat16)


def measure(one: Configuration, name: str, scene: Scene) -> dict[str, float]:
    """Plan and run one configuration."""
    planning = host_us(one.plan, PLACE)
    launches = 1 if name == "torch" else max(_LEAST_LAUNCHES, len(scene.layers))

    def launch() -> None:
        for layer in islice(cycle(scene.layers), launches):
            one.run(layer)

    running = device_us(launch, PLACE, graph=name != "torch") / launches
    return {"plan_us": round(planning, 1), "run_us": round(running, 2)}


def lines(cases: Iterable[Case], kind: str, rates: Rates) -> Iterator[dict[str, Any]]:
    """Measure every configuration of every case, one line each."""
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=CUDA)
    for case in cases:
        scene = make_scene(case)
        dtypes = {name: str(getattr(case, name)).removeprefix("torch.") for name in ("dtype", "cache")}
        shape = {name: getattr(case, name) for name in ("rows", "query", "context")}
        for route, one in configurations(scene, workspace, kind == "prompt"):
            floor = {} if route == "write" else {"floor_us": round(floor_us(case, rates), 2)}
            yield {"kind": kind, "route": route, **shape, **dtypes, **measure(one, route, scene), **floor}


@click.command(help=usage(__doc__))
@click.option("--rows", default="1,8,32,128", show_default=True)
@click.option("--context", default="512,2048,8192", show_default=True)
@click.option("--query", default="1,6", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON lines, one a measurement.")
def main(rows: str, context: str, query: str, out: Path) -> None:
    """Measure and write as measured."""
    torch.manual_seed(0)
    rates = measured_rates(PLACE)
    common = {"benchmark": "attention", "heads": (32, 8), "head_dim": 128, "page_size": PAGE_SIZE}
    common |= {"copy_tb_s": rates.copy / 1e12, "matmul_tflops": rates.matmul / 1e12, **provenance()}
    decoding = decode_cases(numbers(rows), numbers(context), numbers(query))
    found = chain(lines(prompt_cases(), "prompt", rates), lines(decoding, "decode", rates))
    with out.open("w", encoding="utf-8") as file:
        for line in found:
            file.write(json.dumps(common | line) + "\n")
            file.flush()
            click.echo(" ".join(f"{name}={value}" for name, value in line.items()))


if __name__ == "__main__":
    main()
