"""Whether a layer of two half-batches, each one's sum between GPUs behind the other's matmuls, beats a whole batch.

    python -m benchmarks.bench_half_batches --rows 32,128 --out half-batches.jsonl
    python -m benchmarks.bench_half_batches --device cpu --width 64 --rows 8       (only that it runs)

Two ranks, a Llama layer's four matmuls at 70B width (q/k/v, o, gate/up, down; each rank has half of them) for so many
rows of --tokens tokens, and the two sums of `specdec.parallel`, in one CUDA graph of several layers with weights of
their own:

- whole: matmul, matmul, sum, matmul, matmul, sum of all tokens, one after the other;
- halves: the same of each half on a stream of its own. The matmuls of the halves take turns, so that one half's sum
  runs under the other's matmuls. Every weight is read twice.
- halves, one stream: what reading twice costs without anything behind anything.
- matmuls alone, and sums alone.

Two sums at once need memory of their own: the second half's operator is another one of the same kind.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from benchmarks.document import provenance, usage
from benchmarks.given import numbers
from benchmarks.hold import wait_for
from specdec.parallel.collectives import GroupCollectives, leave_group
from specdec.parallel.symmetric import SymmetricCollectives, join_group

_REPLAYS, _BLOCKS = 10, 7


class Layers:
    """So many layers' matmuls of one rank, with weights of their own."""

    def __init__(self, count: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
        """width: of the hidden states; the other sizes are Llama 70B's for 8,192, halved."""
        head, kv, ffn = width // 2, width // 16, width * 7 // 4
        shapes = {"qkv": (head + 2 * kv, width), "o": (width, head), "up": (2 * ffn, width), "down": (width, ffn)}
        self.weights = [
            {name: torch.randn(shape, device=device, dtype=dtype) * 0.02 for name, shape in shapes.items()}
            for _ in range(count)
        ]
        self.head, self.ffn = head, ffn

    def attention(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """[T, width] -> [T, width], this rank's part; attention itself is left out."""
        weights = self.weights[layer]
        return (x @ weights["qkv"].T)[:, : self.head] @ weights["o"].T

    def feed_forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """[T, width] -> [T, width], this rank's part; the activation is left out."""
        weights = self.weights[layer]
        return (x @ weights["up"].T)[:, : self.ffn] @ weights["down"].T


Sum = Callable[[torch.Tensor], torch.Tensor]


def whole(layers: Layers, x: torch.Tensor, add: Sum) -> torch.Tensor:
    """All tokens, one step after the other."""
    for layer in range(len(layers.weights)):
        x = x + add(layers.attention(layer, x))
        x = x + add(layers.feed_forward(layer, x))
    return x


def halves(layers: Layers, parts: list[torch.Tensor], sums: list[Sum], streams: list[Any]) -> list[torch.Tensor]:
    """Two halves, each on a stream; a half's matmuls wait for the other's, and sums for nobody."""
    main, own = torch.cuda.current_stream(), list(parts)
    for stream in streams:
        stream.wait_stream(main)
    done = None
    for layer in range(len(layers.weights)):
        for part in (layers.attention, layers.feed_forward):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    if done is not None:
                        stream.wait_event(done)
                    partial = part(layer, own[i])
                    done = torch.cuda.Event()
                    done.record(stream)
                    own[i] = own[i] + sums[i](partial)
    for stream in streams:
        main.wait_stream(stream)
    return own


def in_turn(layers: Layers, parts: list[torch.Tensor], sums: list[Sum]) -> list[torch.Tensor]:
    """Two halves on one stream."""
    own = list(parts)
    for layer in range(len(layers.weights)):
        for part in (layers.attention, layers.feed_forward):
            for i, add in enumerate(sums):
                own[i] = own[i] + add(part(layer, own[i]))
    return own


def measure(rank: int, size: int, folder: str, settings: dict[str, Any]) -> None:
    """One rank's process; rank 0 prints and writes."""
    on_cuda = settings["device"] == "cuda"
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    first = join_group(rank, size, device, f"{folder}/meeting")
    second: Any = SymmetricCollectives(device) if isinstance(first, SymmetricCollectives) else GroupCollectives(device)
    dtype = torch.bfloat16 if on_cuda else torch.float32
    layers = Layers(settings["layers"], settings["width"], device, dtype)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()] if on_cuda else []
    dist.barrier()
    if settings["hold"] is not None:  # each rank by itself: in a barrier, others' GPUs would be busy all the while
        wait_for(Path(settings["hold"]))
    for rows in settings["rows"]:
        tokens = rows * settings["tokens"]
        x = torch.randn(tokens, settings["width"], device=device, dtype=dtype) / 8
        dist.broadcast(x, src=0)
        parts, sums = list(x.split(-(-tokens // 2))), [first.sum, second.sum]
        arms: dict[str, Callable[[], Any]] = {
            "whole": lambda x=x: whole(layers, x, first.sum),
            "in_turn": lambda parts=parts, sums=sums: in_turn(layers, parts, sums),
            "matmuls_alone": lambda x=x: whole(layers, x, torch.clone),
            "sums_alone": lambda x=x: [first.sum(x) for _ in range(2 * len(layers.weights))],
        }
        if on_cuda:
            arms["halves"] = lambda parts=parts, sums=sums: halves(layers, parts, sums, streams)
        found = {f"{name}_us": value / len(layers.weights) for name, value in timed(arms, on_cuda).items()}
        error = _difference(arms) if on_cuda else 0.0
        if rank == 0:
            say(settings, {"rows": rows, "tokens": tokens, "collectives": first.name, "error": error, **found})
    dist.barrier()
    leave_group()


def _difference(arms: dict[str, Callable[[], Any]]) -> float:
    """Relative difference of the halves' result from the whole batch's: both compute the same."""
    right, found = arms["whole"](), torch.cat(arms["halves"]())
    torch.cuda.synchronize()
    return float((right - found).float().norm() / right.float().norm())


def timed(arms: dict[str, Callable[[], Any]], on_cuda: bool) -> dict[str, float]:
    """Microseconds of each, the median of blocks that take turns; from CUDA graphs on a GPU."""
    runs = {name: graph_of(arm) if on_cuda else arm for name, arm in arms.items()}
    found: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(_BLOCKS):
        for name, run in runs.items():
            dist.barrier()
            if not on_cuda:
                started = time.perf_counter()
                run()
                found[name].append(1e6 * (time.perf_counter() - started))
                continue
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            run()
            start.record()
            for _ in range(_REPLAYS):
                run()
            end.record()
            torch.cuda.synchronize()
            found[name].append(1e3 * start.elapsed_time(end) / _REPLAYS)
    return {name: sorted(values)[len(values) // 2] for name, values in found.items()}


def graph_of(launch: Callable[[], Any]) -> Callable[[], Any]:
    """What replays a launch."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        launch()
    return graph.replay


def say(settings: dict[str, Any], found: dict[str, Any]) -> None:
    """Print one batch's numbers, and append them."""
    parts = ", ".join(f"{name.removesuffix('_us')} {value:.1f}" for name, value in found.items() if "_us" in name)
    click.echo(f"{found['rows']} rows, {found['tokens']} tokens, µs a layer: {parts} ({found['collectives']})")
    if "halves_us" in found:
        gain = found["whole_us"] / found["halves_us"]
        click.echo(
            f"  halves pay: {'yes' if gain > 1 else 'NO'}, {gain:.3f} times; they differ by {found['error']:.1e}"
        )
    if settings["out"] is not None:
        line = {"benchmark": "half batches", "width": settings["width"], "layers": settings["layers"], **found}
        with Path(settings["out"]).open("a") as file:
            file.write(json.dumps(line | provenance()) + "\n")


@click.command(help=usage(__doc__))
@click.option("--rows", default="32,128", show_default=True)
@click.option("--tokens", type=int, default=1, show_default=True, help="Of a row: 1 without drafts, K+1 with K.")
@click.option("--width", type=int, default=8192, show_default=True)
@click.option("--layers", type=int, default=8, show_default=True, help="With weights of their own: more than L2 holds.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--hold", type=click.Path(), help="Measure once this file exists; FILE.ready says so.")
@click.option("--out", type=click.Path(), help="JSON lines are appended.")
def main(rows: str, tokens: int, width: int, layers: int, device: str, hold: str | None, out: str | None) -> None:
    """Measure every number of rows on two ranks."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        raise click.UsageError(
            f"two GPUs are needed, torch sees {torch.cuda.device_count()}; --device cpu only runs it"
        )
    settings = {"rows": numbers(rows), "tokens": tokens, "width": width, "layers": layers, "device": device}
    settings |= {"hold": hold, "out": out}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(measure, (2, folder, settings), nprocs=2)


if __name__ == "__main__":
    main()
