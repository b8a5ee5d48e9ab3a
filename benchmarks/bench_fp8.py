"""Matmuls in fine-grained FP8 against the bytes of their weights, tiling by tiling, and what quantises their inputs.

    python -m benchmarks.bench_fp8 --tokens 1,8,48 --out benchmarks/results/fp8.jsonl

A call is the median of graph replays over weights that do not fit into the L2 cache together. `chosen` is what
`specdec.ops.fp8_kernel.tiling_of` takes; `bf16` is the matmul in bfloat16 as unquantised targets run it. Floors are the
bytes of weights and scales over 4.25 TB/s. The shortest sweep that decides something, about half a minute:

    python -m benchmarks.bench_fp8 --tokens 1,8 --out benchmarks/results/fp8.jsonl

Tilings are printed as "64f w4 s3 b2 x5": rows of a program, f where the weight comes first and l where it comes last,
warps, stages, blocks of columns at once, splits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.device_time import Place, device_us
from benchmarks.document import provenance, usage
from benchmarks.shapes import COPY_BYTES_PER_S
from specdec.ops.fp8 import BLOCK, FP8, fp8_quantise
from specdec.ops.linear import few_tokens_linear

CUDA = torch.device("cuda")
PLACE = Place(CUDA, torch.bfloat16)
LLAMA = ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336))
"""Rows and width of Llama-3.1-8B's fused q, k, v; of o; of fused gate, up; and of down."""
_LEAST_BYTES = 160 << 20
"""Of the weights of one replay: three times an H200's L2 cache."""
_SHARED_BYTES = 227 << 10
_SPLITS = (1, 2, 3, 4, 6, 8)
_STEPS = {64: ((1, 4), (1, 8), (2, 3), (2, 5), (4, 2)), 128: ((1, 4), (2, 2), (2, 3))}
"""By rows of a program: blocks a step of the loop, and steps that are on their way at once."""
_MANY_TOKENS = ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 8))
"""Tokens and rows of a program and its warps, from 65 tokens on."""
_MOST_PROGRAMS = 8 * 132
"""Of a sweep: with more, nothing is left for splits to win."""


def candidates(tokens: int, rows: int, width: int) -> Iterator[Any]:
    """Tilings that so many tokens could have, by what shared memory holds: what had a chance in the first sweep, split.

    Few tokens have the weight as the left operand; with more than 32, the other way round has won everywhere.
    """
    from specdec.ops.fp8_kernel import Tiling

    blocks = width // BLOCK
    if tokens > 64:
        for (tile, height, warps), stages, splits in product(_MANY_TOKENS, (3, 4, 8), _SPLITS):
            tiling = Tiling(tile, height, False, warps, stages, 1, splits)
            programs = -(-tokens // tile) * (rows // height) * splits
            fits = stages * BLOCK * (tile + height) < _SHARED_BYTES and -(-blocks // tiling.share(blocks)) == splits
            if fits and (splits == 1 or programs <= _MOST_PROGRAMS // 2):
                yield tiling
        return
    tile = max(1 << (tokens - 1).bit_length(), 16)
    for height, steps in _STEPS.items():
        for (at_once, stages), splits in product(steps, _SPLITS):
            tiling = Tiling(tile, height, tokens <= 32, 4, stages, at_once, splits)
            parts = -(-blocks // tiling.share(blocks))
            programs = -(-tokens // tile) * (rows // height) * parts
            fits = stages * at_once * BLOCK * (tile + height) < _SHARED_BYTES
            if fits and parts == splits and (splits == 1 or programs <= _MOST_PROGRAMS):
                yield tiling


def shown(tiling: Mapping[str, Any]) -> str:
    """Rows, which operand comes first, warps, stages, blocks at once, splits: "64f w4 s3 b2 x5"; before them the tokens
    of a program where a matmul has more."""
    first = "f" if tiling["weight_first"] else "l"
    steps = f"s{tiling['stages']} b{tiling.get('at_once', 1)} x{tiling.get('splits', 1)}"
    tokens = f"{tiling['tokens']} x " if tiling["tokens"] > 32 else ""
    return f"{tokens}{tiling['rows']}{first} w{tiling['warps']} {steps}"


def timed(launch: Callable[[torch.Tensor, torch.Tensor], object], weights: list[tuple[torch.Tensor, ...]]) -> float:
    """Microseconds of one call."""

    def all_of_them() -> None:
        for weight in weights:
            launch(*weight)  # type: ignore[call-arg]

    return device_us(all_of_them, PLACE) / len(weights)


def measured(rows: int, width: int, tokens: int, sweep: bool) -> dict[str, Any]:
    """A shape with so many tokens."""
    from specdec.ops.fp8_kernel import launch_fp8_matmul, tiling_of

    count = max(_LEAST_BYTES // (rows * width), 2)
    half = torch.randn(tokens, width, device=CUDA, dtype=torch.bfloat16)
    x, x_scale = fp8_quantise(half)
    scales = torch.rand(rows // BLOCK, width // BLOCK, device=CUDA)
    pairs = [(torch.randn(rows, width, device=CUDA).to(FP8), scales.clone()) for _ in range(count)]

    def by(tiling: Any) -> float:
        return timed(lambda w, s: launch_fp8_matmul(x, x_scale, w, s, torch.bfloat16, tiling), pairs)

    chosen = tiling_of(tokens, rows, width)
    found = {"rows": rows, "width": width, "tokens": tokens, "chosen": asdict(chosen), "us": by(chosen)}
    found["floor_us"] = 1e6 * (rows * width + 4 * scales.numel()) / COPY_BYTES_PER_S
    found["quantise_us"] = device_us(lambda: [fp8_quantise(half) for _ in range(20)], PLACE) / 20
    plain = [(torch.randn(rows, width, device=CUDA, dtype=torch.bfloat16),) for _ in range(count)]
    found["bf16_us"] = timed(lambda w: few_tokens_linear(half, w), plain)  # type: ignore[misc, arg-type]
    if sweep:
        times = [(by(tiling), asdict(tiling)) for tiling in candidates(tokens, rows, width)]
        found["swept"] = len(times)
        found["best"] = sorted(times, key=lambda each: each[0])[:6]
    return found


@click.command(help=usage(__doc__))
@click.option("--tokens", default="1,8,48", show_default=True)
@click.option("--sweep/--no-sweep", default=True, show_default=True, help="Every tiling, not only the one in use.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON lines are appended.")
def main(tokens: str, sweep: bool, out: Path) -> None:
    """Measure every shape with every number of tokens."""
    for (rows, width), count in product(LLAMA, [int(each) for each in tokens.split(",")]):
        line = {"benchmark": "fp8", **measured(rows, width, count, sweep), **provenance()}
        best = (
            f"; best of {line['swept']}: {', '.join(f'{us:.1f} {shown(t)}' for us, t in line['best'])}" if sweep else ""
        )
        click.echo(
            f"{rows} x {width}, {count} tokens: {line['us']:.1f} us {shown(line['chosen'])}, floor "
            f"{line['floor_us']:.1f}, bf16 {line['bf16_us']:.1f}, quantise {line['quantise_us']:.1f}{best}"
        )
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
