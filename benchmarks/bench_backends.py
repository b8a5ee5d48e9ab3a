"""Every attention backend on every batch of the test suite: planning, running, and the bytes that nobody can avoid.

    python -m benchmarks.bench_backends --out benchmarks/results/backends.jsonl
    python -m benchmarks.bench_backends --part decode --out benchmarks/results/decode_kernels.jsonl
    python -m benchmarks.bench_backends --small --out /tmp/smoke.jsonl      # any machine; its times say nothing

Part `backends`: the batches of `benchmarks/batches.py` in a layer of Llama-3.1-8B's shape. plan_us is the host's median
time to plan on an idle device, for two batches in turn whose page counts differ; run_us is the device's for one layer,
cache write included, replayed from a CUDA graph over layers that the L2 cache does not hold (the torch reference is
launched without a graph). total_us is one plan and 32 layers, one after the other; floor_us is the bytes of these
layers over the copy rate or their operations over the matmul rate, both measured in the same run; ratio is total over
floor.

Part `decode`: one query token a row by FlashInfer's CUDA-core decode, its tensor-core decode, fa2 as this library plans
it, and our packed kernel, for query heads a KV head and head sizes; 2,048 keys a row. What FlashInfer has not compiled
for this machine is built side by side before anything is measured: the module of its tensor-core decode has eight large
files, minutes of sixteen cores, the others one each. So, within 90 seconds of a fresh machine:

    python -m benchmarks.bench_backends --part decode --head-size 256 --kernel fa2 --kernel packed \\
        --kernel "CUDA-core decode" --out benchmarks/results/decode_kernels_256.jsonl

What a backend does not serve is a line that says so.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from attention.backends.base import AttentionBackend
from attention.backends.building import in_background
from attention.backends.flashinfer.wrapper import building
from attention.backends.flex import FlexBackend
from attention.batch.metadata import CommonAttentionMetadata, single_batch_arena, stage
from attention.cache.kv_cache import CacheGroup
from attention.errors import InvalidInputError, UnsupportedAttentionError
from attention.runner import GroupRunner
from attention.spec import AttentionSpec
from benchmarks.batches import Batch, full_size, small_size
from benchmarks.device_time import Place, Rates, device_us, host_us, measured_rates
from benchmarks.document import provenance, usage
from specdec.loading.backends import make_backend

PAGE_SIZE, LAYERS = 16, 32
FIXED = ", fixed"
"""After a backend's name: planned for batches of one shape, as CUDA graphs hold them; else for any batch."""
WAYS = ("torch", "flex", "flashinfer", f"flashinfer{FIXED}", "batch_invariant")
_LEAST_LAUNCHES, _CACHES_BYTES = 8, 256 << 20
DECODE_KERNELS = ("CUDA-core decode", "tensor-core decode", "fa2", "packed")
RATIOS, HEAD_SIZES, DECODE_ROWS, DECODE_KEYS = (1, 2, 4, 8, 16), (64, 128, 256), (1, 32, 128), 2048


@dataclass(frozen=True)
class LayerPlace(Place):
    """Where a layer is measured, and which."""

    key: AttentionSpec


def backend_of(way: str, device: torch.device) -> AttentionBackend:
    """The backend of one of WAYS; Flex in its eager form where there is no GPU.

    Raises:
        InvalidInputError: it does not run there.
    """
    name = way.removesuffix(FIXED)
    return FlexBackend(device) if name == "flex" else make_backend(name, device)


def floor_us(batch: Batch, place: LayerPlace, rates: Rates) -> float:
    """The least time of one layer: keys and values read, new ones written, queries read, the result written."""
    key, tokens = place.key, sum(batch.query_lens)
    keys_and_values = 2 * key.num_kv_heads * key.head_dim_k * (sum(batch.seq_lens) + tokens)
    moved = (keys_and_values + 2 * key.num_q_heads * key.head_dim_k * tokens) * place.dtype.itemsize
    seen = sum(q * s - q * (q - 1) // 2 for q, s in zip(batch.query_lens, batch.seq_lens, strict=True))
    return max(moved / rates.copy, 4 * seen * key.num_q_heads * key.head_dim_k / rates.matmul) * 1e6


def metadata_of(batch: Batch, place: LayerPlace) -> CommonAttentionMetadata:
    """The batch on the device."""
    host = batch.host(PAGE_SIZE)
    return stage(host, *single_batch_arena(host.num_reqs, host.num_tokens, host.block_table.shape[1], place.device))


def one_page_less(batch: Batch) -> Batch:
    """Rows of other page counts, where they are long enough."""
    return Batch(batch.query_lens, tuple(max(0, n - PAGE_SIZE) for n in batch.computed))


def measure(way: str, batch: Batch, place: LayerPlace) -> dict[str, float]:
    """Plan and run one backend on one batch.

    Raises:
        InvalidInputError, UnsupportedAttentionError: it does not serve this.
    """
    key, tokens, fixed = place.key, sum(batch.query_lens), way.endswith(FIXED)
    if fixed and not batch.even:
        raise UnsupportedAttentionError("rows of unequal queries have no plan that a CUDA graph can hold")
    layer_bytes = 2 * key.num_kv_heads * key.head_dim_k * place.dtype.itemsize * sum(batch.seq_lens)
    count = max(1, min(LAYERS, _CACHES_BYTES // layer_bytes)) if place.on_gpu else 1
    group = CacheGroup("bench", (key,) * count, batch.num_pages(PAGE_SIZE), PAGE_SIZE)
    backend = backend_of(way, place.device)
    runner = GroupRunner(backend, group, place.dtype, place.device)
    for layer in runner.layers:
        layer.keys.normal_()
        layer.values.normal_()
    heads = (key.num_q_heads, key.num_kv_heads, key.num_kv_heads)
    states = [torch.randn(tokens, n, key.head_dim_k, device=place.device).to(place.dtype) for n in heads]
    metadata, other = metadata_of(batch, place), metadata_of(one_page_less(batch), place)
    planner: Any = runner.fixed_planner(len(batch.query_lens), batch.query_lens[0]) if fixed else runner
    planned = planner.plan(metadata)
    launches = max(_LEAST_LAUNCHES, count) if place.on_gpu else 1

    def launch() -> None:
        for number in range(launches):
            runner.attend(planned, number % count, *states)

    run = device_us(launch, place, graph=backend.name != "torch") / launches
    turns = itertools.cycle([other, metadata])
    if fixed:
        plan = host_us(lambda: planner.replan(next(turns).host), place)
    else:
        plan = host_us(lambda: planner.plan(next(turns)), place)
    return {"plan_us": plan, "run_us": run, "total_us": plan + LAYERS * run}


def backend_lines(place: LayerPlace, batches: dict[str, Batch], only: Iterable[str]) -> Iterator[dict[str, Any]]:
    """One line for every backend and batch."""
    rates = measured_rates(place)
    measured_at = {"copy_tb_s": rates.copy / 1e12, "matmul_tflops": rates.matmul / 1e12}
    for name, batch in batches.items():
        floor = LAYERS * floor_us(batch, place, rates)
        sizes = {"rows": len(batch.query_lens), "tokens": sum(batch.query_lens), "keys": sum(batch.seq_lens)}
        for way in only:
            line: dict[str, Any] = {"batch": name, "backend": way, **sizes, "floor_us": round(floor, 2), **measured_at}
            try:
                found = measure(way, batch, place)
            except (InvalidInputError, UnsupportedAttentionError) as refusal:
                yield line | {"refused": str(refusal)}
                continue
            yield line | {k: round(v, 2) for k, v in found.items()} | {"ratio": round(found["total_us"] / floor, 2)}


def build_decode_kernels(sizes: Sequence[int], kernels: Sequence[str]) -> None:
    """Build FlashInfer's modules for heads of these sizes, all at once.

    Raises:
        KernelBuildError: one could not be built.
    """
    from flashinfer.decode import get_batch_decode_module
    from flashinfer.prefill import get_batch_prefill_module

    half, builds = torch.bfloat16, []
    for dim in sizes:
        whole = (half, half, half, torch.int32, dim, dim, 0, False, False)  # no positions, window or cap
        if "fa2" in kernels:
            builds.append(building(half, AttentionSpec(1, 1, dim, dim, 1.0), half, "fa2"))
        if "CUDA-core decode" in kernels:
            make = partial(get_batch_decode_module, *whole)
            builds.append(in_background(("CUDA-core decode", dim), f"CUDA-core decode {dim}", make))
        if "tensor-core decode" in kernels:
            make = partial(get_batch_prefill_module, "fa2", *whole, False)
            builds.append(in_background(("tensor-core decode", dim), f"tensor-core decode {dim}", make))
    for build in builds:
        build.wait()
        click.echo(f"{build.name}: {build.state}")


def decode_lines(sizes: Sequence[int], kernels: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One line for every decode kernel, number of query heads a KV head, head size and number of rows."""
    from benchmarks.attention_configurations import (
        CUDA,
        Case,
        Configuration,
        DecodeConfiguration,
        FlashInferConfiguration,
        PackedConfiguration,
        make_scene,
    )

    build_decode_kernels(sizes, kernels)
    workspace = torch.empty(_CACHES_BYTES, dtype=torch.uint8, device=CUDA)
    place = Place(CUDA, torch.bfloat16)
    rates = measured_rates(place)
    for dim, ratio, rows in itertools.product(sizes, RATIOS, DECODE_ROWS):
        key = AttentionSpec(32, 32 // ratio, dim, dim, scale=dim**-0.5)
        scene = make_scene(Case(rows, 1, DECODE_KEYS, torch.bfloat16, torch.bfloat16, key))
        makers: dict[str, Callable[[], Configuration]] = {
            "CUDA-core decode": lambda s=scene: DecodeConfiguration(s, workspace, tensor_cores=False),  # type: ignore[misc]
            "tensor-core decode": lambda s=scene: DecodeConfiguration(s, workspace),  # type: ignore[misc]
            "fa2": lambda s=scene: FlashInferConfiguration(s, workspace, "fa2", fixed=True),  # type: ignore[misc]
            "packed": lambda s=scene: PackedConfiguration(s),  # type: ignore[misc]
        }
        floor = scene.case.cache_bytes / rates.copy * 1e6
        for name in kernels:
            line = {"head_dim": dim, "query_heads_a_kv_head": ratio, "rows": rows, "kernel": name}
            line |= {"floor_us": round(floor, 2)}
            try:
                kernel = makers[name]()
                plan = host_us(kernel.plan, place)
                launches = max(_LEAST_LAUNCHES, len(scene.layers))
                layers = list(itertools.islice(itertools.cycle(scene.layers), launches))
                run = device_us(lambda k=kernel, n=layers: [k.run(x) for x in n], place, graph=True) / launches  # type: ignore[misc]
            except (RuntimeError, ValueError, UnsupportedAttentionError) as refusal:  # FlashInfer's: no such group size
                yield line | {"refused": str(refusal)[:300]}
                continue
            yield line | {"plan_us": round(plan, 2), "run_us": round(run, 2), "ratio": round(run / floor, 2)}


@click.command(help=usage(__doc__))
@click.option("--part", type=click.Choice(["backends", "decode"]), default="backends", show_default=True)
@click.option("--small", is_flag=True, help="Tiny batches and heads in float32, on a CPU too.")
@click.option("--backend", "only", multiple=True, type=click.Choice(WAYS), help="Repeatable; default all.")
@click.option("--head-size", "sizes", multiple=True, type=int, help=f"Of `decode`; default {HEAD_SIZES}.")
@click.option("--kernel", "kernels", multiple=True, type=click.Choice(DECODE_KERNELS), help="Of `decode`; default all.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON lines, one a measurement.")
def main(
    part: str, small: bool, only: tuple[str, ...], sizes: tuple[int, ...], kernels: tuple[str, ...], out: Path
) -> None:
    """Measure and write as measured."""
    torch.manual_seed(0)
    has_gpu = torch.cuda.is_available()
    if not has_gpu and (part == "decode" or not small):
        raise click.UsageError("no GPU is here; --small runs part `backends` on a CPU")
    device = torch.device("cuda" if has_gpu else "cpu")
    if small:
        place = LayerPlace(device, torch.float32, AttentionSpec(4, 2, 16, 16, scale=0.25))
    else:
        place = LayerPlace(device, torch.bfloat16, AttentionSpec(32, 8, 128, 128, scale=128**-0.5))
    batches = small_size() if small else full_size()
    if part == "decode":
        found = decode_lines(sizes or HEAD_SIZES, kernels or DECODE_KERNELS)
    else:
        found = backend_lines(place, batches, only or WAYS)
    key = place.key
    common: dict[str, Any] = {"benchmark": "backends" if part == "backends" else "decode_kernels"}
    if part == "backends":
        common |= {"heads": (key.num_q_heads, key.num_kv_heads), "head_dim": key.head_dim_k, "page_size": PAGE_SIZE}
    common |= {"dtype": str(place.dtype).removeprefix("torch."), **provenance()}
    with torch.inference_mode(), out.open("w", encoding="utf-8") as file:
        for line in found:
            file.write(json.dumps(common | line) + "\n")
            file.flush()
            click.echo(" ".join(f"{name}={value}" for name, value in line.items()))


if __name__ == "__main__":
    main()
