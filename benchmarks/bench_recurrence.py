"""The kernels of recurrences on a GPU: rounds and prompts, and the bytes that nobody can avoid.

    python -m benchmarks.bench_recurrence --out benchmarks/results/recurrence.jsonl
    TRITON_INTERPRET=1 python -m benchmarks.bench_recurrence --small --out /tmp/smoke.jsonl    # its times say nothing

At the shapes of Qwen3.5-9B (16 key and 32 value heads of 128, a convolution of 8,192 channels) and
Nemotron-H-8B (128 heads of 64, 8 groups of 128 states), rounds of so many rows with K + 1 tokens that accept K, and
prompts of 512 and 2,048 tokens. run_us is the device's median time of one layer, replayed from a CUDA graph over layers
that the L2 cache does not hold; where states are stored in one round of several, over as many rounds, the rows apart by
one. floor_us is the bytes of one layer over the copy rate of the same run: the states read and written by every launch,
tokens read and outputs written, the ring's entries read and written; of prompts their operations over the matmul rate
where that is longer. ratio is run over floor. moved_us is the same of the bytes that these launches move: it is less
where states are not stored by every one. copy_us is what a device copy of as many bytes as the floor's takes in the
same launches, with what it costs to start and end a kernel, which the copy rate of large tensors does not show.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from attention.recurrence.index import FoldRule, conv_ring_size
from attention.recurrence.state_rows import StateRows
from benchmarks.device_time import Place, Rates, device_us, measured_rates
from benchmarks.document import provenance, usage

ROWS, DRAFTS, PROMPTS = (1, 8, 32, 128), (0, 1, 3), ((1, 512), (1, 2048), (8, 512))
_CACHES_BYTES, _LEAST_LAUNCHES, _MOST_LAYERS = 256 << 20, 16, 64


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer of each kind, and a name."""

    name: str
    delta: tuple[int, int, int, int]
    """Heads of keys, heads of values, their widths."""
    ssd: tuple[int, int, int, int]
    """Heads, their width, groups, states."""
    conv: tuple[int, int]
    """Channels, taps."""


FULL = Shape("qwen3.5-9b, nemotron-h-8b", (16, 32, 128, 128), (128, 64, 8, 128), (8192, 4))
SMALL = Shape("small", (1, 2, 16, 16), (2, 16, 1, 16), (32, 4))


@dataclass(frozen=True)
class Ring:
    """The ring of either kind: what a kernel does not have is None."""

    k: Any = None
    v: Any = None
    g: Any = None
    beta: Any = None
    x: Any = None
    B: Any = None
    dt: Any = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those that there are."""
        return [x for x in vars(self).values() if x is not None]


@dataclass(frozen=True)
class Work:
    """What is launched: rows of `tokens`, of which `new` are committed; rule: when they store their states."""

    rows: int
    tokens: int
    new: int
    rule: FoldRule

    @classmethod
    def of_round(cls, rows: int, drafts: int, kernel: str) -> Work:
        """Verifications in which every draft of the last one was accepted."""
        rule = FoldRule.deferred if kernel == "delta" else FoldRule.every_launch
        return cls(rows, drafts + 1, 1, rule(drafts))

    @classmethod
    def of_prompts(cls, rows: int, tokens: int, kernel: str) -> Work:
        """Prompts from their first token on, of an engine with K=3."""
        return replace(cls.of_round(rows, 3, kernel), tokens=tokens, new=tokens)

    @property
    def is_round(self) -> bool:
        """Whether rows verify."""
        return self.new < self.tokens or self.tokens == 1

    @cached_property
    def cycle(self) -> list[tuple[int, int]]:
        """Replayed tokens and those that go into the state, of the rounds of a row until it has stored its state."""
        if not self.is_round:
            return [(0, self.new)]
        found, replay = list[tuple[int, int]](), self.rule.num_drafts
        while not found or not found[-1][1]:
            stored = int(self.rule.num_new(np.array([replay]), np.array([1]), np.array([True]))[0])
            found.append((replay, stored))
            replay += 1 + self.rule.num_drafts
        return found

    def on(self, device: torch.device) -> list[StateRows]:
        """The rows on a device in each round of their cycle; a round's begin at position 100."""
        return [self._shifted(by, device) for by in range(len(self.cycle))]

    def _shifted(self, by: int, device: torch.device) -> StateRows:
        def sent(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        replay, new = zip(*(self.cycle[(row + by) % len(self.cycle)] for row in range(self.rows)), strict=True)
        start, loc = [100 if self.is_round else 0] * self.rows, range(0, (self.rows + 1) * self.tokens, self.tokens)
        arrays = map(sent, (range(1, self.rows + 1), start, replay, new))
        most = {"max_query_len": self.tokens, "max_replay": self.rule.most_replayed}
        return StateRows(*arrays, query_start_loc=sent(loc), **most)


@dataclass(frozen=True)
class Layer:
    """One layer's tensors, by what a launch does with them."""

    inputs: tuple[torch.Tensor, ...]
    state: torch.Tensor | None
    ring: Ring
    extra: tuple[torch.Tensor, ...] = ()

    def moved(self, work: Work, every_launch: bool) -> float:
        """Bytes of one launch: tokens in and out (the last of `inputs` has the outputs' shape), the state, the ring.

        every_launch: as if each stored the states, else on average.
        """
        tokens = [*self.inputs, self.inputs[-1]]
        total = float(sum(x.numel() * x.element_size() for x in tokens))
        drafts, cycle = work.rule.num_drafts, work.cycle
        if self.state is None:
            entries = float(min(self.ring.x.shape[1], work.tokens) + self.extra[0].shape[1] - 1)
        elif every_launch or not work.is_round:
            total += (2 if work.is_round else 1) * self.state[1:].numel() * 4
            entries = 2.0 * drafts if work.is_round else 0.0
        else:
            total += (1 + 1 / len(cycle)) * self.state[1:].numel() * 4
            entries = sum(replay + work.tokens - new for replay, new in cycle) / len(cycle)
        return total + sum(x[1:, 0].numel() * x.element_size() * entries for x in self.ring.tensors)


def delta_layer(shape: Shape, work: Work, place: Place) -> Layer:
    """Tensors of a layer of the gated delta rule, q, k and v slices of one convolution's result."""
    key_heads, heads, dim_k, dim_v = shape.delta
    tokens, slots = work.rows * work.tokens, work.rows + 1
    new = _maker(place)
    widths = [key_heads * dim_k, key_heads * dim_k, heads * dim_v]
    q, k, v = new(tokens, sum(widths)).split(widths, 1)
    gates = -torch.rand(tokens, heads, device=place.device), new(tokens, heads).sigmoid()
    ring = Ring(
        k=new(slots, work.rule.ring_size, key_heads, dim_k),
        v=new(slots, work.rule.ring_size, heads, dim_v),
        g=-torch.rand(slots, work.rule.ring_size, heads, device=place.device),
        beta=torch.rand(slots, work.rule.ring_size, heads, device=place.device),
    )
    inputs = (q.unflatten(1, (-1, dim_k)), k.unflatten(1, (-1, dim_k)), *gates, v.unflatten(1, (-1, dim_v)))
    return Layer(inputs, torch.randn(slots, heads, dim_v, dim_k, device=place.device), ring)


def ssd_layer(shape: Shape, work: Work, place: Place) -> Layer:
    """Tensors of a layer of Mamba2's scan, x, B and C slices of one convolution's result."""
    heads, dim, groups, states = shape.ssd
    tokens, slots = work.rows * work.tokens, work.rows + 1
    new = _maker(place)
    widths = [heads * dim, groups * states, groups * states]
    x, b, c = new(tokens, sum(widths)).split(widths, 1)
    dt, head = torch.rand(tokens, heads, device=place.device), torch.rand(heads, device=place.device)
    ring = Ring(
        x=new(slots, work.rule.ring_size, heads, dim),
        B=new(slots, work.rule.ring_size, groups, states),
        dt=torch.rand(slots, work.rule.ring_size, heads, device=place.device),
    )
    inputs = (dt, b.unflatten(1, (-1, states)), c.unflatten(1, (-1, states)), x.unflatten(1, (-1, dim)))
    return Layer(inputs, torch.randn(slots, heads, dim, states, device=place.device), ring, (-head, head))


def conv_layer(shape: Shape, work: Work, place: Place) -> Layer:
    """Tensors of a short convolution."""
    channels, taps = shape.conv
    new = _maker(place)
    ring = Ring(x=new(work.rows + 1, conv_ring_size(taps, work.rule.num_drafts), channels))
    return Layer((new(work.rows * work.tokens, channels),), None, ring, (new(channels, taps),))


def _maker(place: Place) -> Callable[..., torch.Tensor]:
    return lambda *size: torch.randn(*size, device=place.device).to(place.dtype)


def operations(kernel: str, shape: Shape, tokens: int) -> float:
    """Of the matmuls of a prompt in chunks of 64; 0 for the convolution."""
    chunk = 64
    if kernel == "delta":
        _, heads, dim_k, dim_v = shape.delta
        scores, solved, passed = 2 * chunk * dim_k, chunk * (dim_k + dim_v), 3 * dim_k * dim_v + chunk * dim_v
        return 2.0 * tokens * heads * (scores + solved + passed)
    if kernel == "ssd":
        heads, dim, _, states = shape.ssd
        return 2.0 * tokens * heads * (chunk * states + chunk * dim + 2 * dim * states)
    return 0.0


def launch_of(kernel: str, layer: Layer, rows: StateRows) -> Callable[[], object]:
    """What launches one layer of a kernel."""
    from attention.recurrence.conv_kernel import short_conv
    from attention.recurrence.delta_kernel import gated_delta
    from attention.recurrence.ssd_kernel import ssd_scan

    if kernel == "conv":
        return lambda: short_conv(*layer.inputs, *layer.extra, None, True, layer.ring.x, rows)
    if kernel == "delta":
        q, k, g, beta, v = layer.inputs
        return lambda: gated_delta(q, k, v, g, beta, q.shape[2] ** -0.5, True, layer.state, layer.ring, rows)
    dt, b, c, x = layer.inputs
    a, d = layer.extra
    return lambda: ssd_scan(x, dt, a, b, c, d, layer.state, layer.ring, rows)


LAYERS = {"delta": delta_layer, "conv": conv_layer, "ssd": ssd_layer}


def measure(kernel: str, shape: Shape, work: Work, place: Place, rates: Rates) -> dict[str, Any]:
    """One line: a kernel on one launch's work."""
    first = LAYERS[kernel](shape, work, place)
    moved, count = int(first.moved(work, every_launch=True)), 1
    if place.on_gpu:
        count = max(1, min(_MOST_LAYERS, -(-_CACHES_BYTES // moved)))
    layers = [first, *(LAYERS[kernel](shape, work, place) for _ in range(count - 1))]
    rounds = work.on(place.device)
    turns = len(rounds) * max(1, -(-max(_LEAST_LAUNCHES, count) // len(rounds))) if place.on_gpu else len(rounds)
    launches = [
        launch_of(kernel, layer, rows)
        for layer, rows in itertools.islice(zip(itertools.cycle(layers), itertools.cycle(rounds), strict=False), turns)
    ]

    def launch() -> None:
        for run in launches:
            run()

    run_us = device_us(launch, place, graph=True) / turns
    ops = operations(kernel, shape, work.rows * work.tokens) if not work.is_round else 0.0
    floor_us = max(moved / rates.copy, ops / rates.matmul) * 1e6
    moved_us = max(first.moved(work, every_launch=False) / rates.copy, ops / rates.matmul) * 1e6
    copy_us = _copy_us(moved, count, turns, place)
    sizes = {"rows": work.rows, "tokens": work.tokens, "most_replayed": work.rule.most_replayed, "bytes": moved}
    times = {
        "run_us": run_us,
        "floor_us": floor_us,
        "moved_us": moved_us,
        "copy_us": copy_us,
        "ratio": run_us / floor_us,
    }
    return {"kernel": kernel, **sizes, **{name: round(value, 2) for name, value in times.items()}}


def _copy_us(moved: int, count: int, turns: int, place: Place) -> float:
    """Of a copy that reads and writes so many bytes together: `turns` of them over `count` pairs of tensors."""
    half = torch.empty(count, 2, max(1, moved // 2), dtype=torch.uint8, device=place.device)

    def launch() -> None:
        for new, old in itertools.islice(itertools.cycle(half), turns):
            new.copy_(old)

    return device_us(launch, place, graph=True) / turns


def kernel_lines(
    shape: Shape, place: Place, rates: Rates, rounds: Sequence[tuple[int, int]], prompts: Sequence[tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """One line for every kernel and launch."""
    for kernel in LAYERS:
        for rows, drafts in rounds:
            yield {"kind": "round"} | measure(kernel, shape, Work.of_round(rows, drafts, kernel), place, rates)
        for rows, tokens in prompts:
            yield {"kind": "prompt"} | measure(kernel, shape, Work.of_prompts(rows, tokens, kernel), place, rates)


@click.command(help=usage(__doc__))
@click.option("--small", is_flag=True, help="Tiny layers in float32, in Triton's interpreter where there is no GPU.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON lines, one a measurement.")
def main(small: bool, out: Path) -> None:
    """Measure and write as measured."""
    torch.manual_seed(0)
    has_gpu = torch.cuda.is_available()
    if not has_gpu and (not small or os.environ.get("TRITON_INTERPRET") != "1"):
        raise click.UsageError("no GPU is here; TRITON_INTERPRET=1 and --small run on a CPU")
    device, shape = torch.device("cuda" if has_gpu else "cpu"), SMALL if small else FULL
    place = Place(device, torch.float32 if small else torch.bfloat16)
    rates = measured_rates(place)
    rounds = [(n, k) for n in (ROWS if not small else (2,)) for k in (DRAFTS if not small else (1,))]
    prompts = PROMPTS if not small else ((1, 20),)
    shared = shape, place, rates
    found = kernel_lines(*shared, rounds, prompts)
    common = {"benchmark": "recurrence", "shape": shape.name}
    common |= {"dtype": str(place.dtype).removeprefix("torch."), "copy_tb_s": rates.copy / 1e12}
    common |= {"matmul_tflops": rates.matmul / 1e12, **provenance()}
    with torch.inference_mode(), out.open("w", encoding="utf-8") as file:
        for line in found:
            file.write(json.dumps(common | line) + "\n")
            file.flush()
            click.echo(" ".join(f"{name}={value}" for name, value in line.items()))


if __name__ == "__main__":
    main()
