"""One layer's experts of a published shape at many tokens, beside the least time, both forms in one process.

    python -m benchmarks.bench_experts --shape qwen3-30b-a3b --tokens 512,2048,8192 --out experts.jsonl

`routed` is `specdec.ops.mixtures`, compiled as in an engine, `grouped_mm` transformers' form of the same module.
The least time is the larger of the distinct experts' bytes over the rate of memory and the operations over that of a
large matmul, both measured here. Routes are uniform; four sets of them over two layers' weights are timed in one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from benchmarks.document import publish, usage
from benchmarks.given import Listed, ResultFile
from benchmarks.shapes import SHAPES
from specdec.ops.mixtures.choice import mixtures, own_form


def seconds_of(launches: list[Callable[[], Any]], repeats: int = 9) -> float:
    """Median of one launch, of all in one graph."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    found = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        found.append(start.elapsed_time(stop) / 1e3 / len(launches))
    return float(np.median(found))


def rates() -> tuple[float, float]:
    """Bytes a second that a kernel reads and writes, operations a second of a matmul of 8,192 squared in bfloat16.

    Not a copy: the driver's reaches two thirds of that.
    """
    a, b = (torch.zeros(1 << 28, device="cuda") for _ in range(2))
    x = torch.randn(8192, 8192, device="cuda").bfloat16()
    return 8 * a.numel() / seconds_of([lambda: torch.neg(a, out=b)]), 2 * 8192**3 / seconds_of([lambda: x @ x])


@click.command(help=usage(__doc__))
@click.option("--shape", type=click.Choice(sorted(SHAPES)), default="qwen3-30b-a3b", show_default=True)
@click.option("--tokens", type=Listed(click.IntRange(2)), default="512,2048,8192", show_default=True)
@click.option("--out", type=ResultFile(), required=True, help="JSON lines are appended.")
@torch.inference_mode()
def main(shape: str, tokens: list[int], out: Path) -> None:
    """Time both forms at every number of tokens."""
    config = SHAPES[shape]()
    config.num_hidden_layers = 4
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:4]
    with torch.device("cuda"):
        found = mixtures(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))[-2:]
    experts, size = found[0].num_experts, sum(p[0].numel() for p in found[0].parameters())
    chosen, memory_rate, matmul_rate = config.num_experts_per_tok, *rates()
    forms = {"routed": torch.compile(own_form), "grouped_mm": ALL_EXPERTS_FUNCTIONS["grouped_mm"]}
    for count in tokens:
        x = torch.randn(count, config.hidden_size, device="cuda").bfloat16()
        sets = [torch.rand(count, experts, device="cuda").topk(chosen, -1).indices for _ in range(4)]
        weights = torch.rand(count, chosen, device="cuda").bfloat16()
        times = {}
        for name, form in forms.items():
            calls = [partial(form, found[place % 2], x, own, weights) for place, own in enumerate(sets)]
            times[name] = seconds_of(calls)
        distinct = float(np.mean([len(own.unique()) for own in sets]))
        least = max(2 * distinct * size / memory_rate, 2 * count * chosen * size / matmul_rate)
        line: dict[str, Any] = {"benchmark": "experts", "shape": shape, "tokens": count, "experts": distinct}
        line |= {f"{name}_us": 1e6 * each for name, each in times.items()}
        line |= {"least_us": 1e6 * least, "over_least": times["routed"] / least}
        publish(line | {"bytes_per_s": memory_rate, "matmul_flops": matmul_rate}, out, append=True)


if __name__ == "__main__":
    main()
