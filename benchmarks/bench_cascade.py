"""Attention of rows that share their first pages: flat over the shared pages, against two levels.

    python -m benchmarks.bench_cascade --out benchmarks/results/cascade.jsonl

One layer of Llama-3.1-8B's shape (32 query heads, 8 KV heads, head dim 128, pages of 16, bfloat16), the packed kernel
of a fixed shape replayed from a CUDA graph, over as many layers as make the caches larger than the L2 cache. Times are
medians of device time for one layer. Flat attention reads the same block tables, so it finds the shared pages in the L2
cache as well. `cascade_us` is taken whatever the cost rule says; `rule` is what it says, `gain` flat over cascade, and
`expected_gain` the rule's own arithmetic. `none_us` is the graph that has a launch for shared pages, when there are
none, to be compared with `flat_us`. Both results are first compared with flat attention's.

On an H200 it takes less than 40 s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import torch

from attention.backends.flashinfer.shared_pages import SharedRows, Sharing, worth_sharing
from attention.backends.flashinfer.short_queries import PackedKernel, packed_scratch, whole_batch
from attention.batch.host import HostBatch, rows_batch
from attention.batch.metadata import CommonAttentionMetadata, single_batch_arena, stage
from attention.batch.transforms.cascade import shared_prefix
from attention.cache.kv_cache import CacheGroup, LayerKV, allocate
from attention.spec import AttentionSpec
from benchmarks.device_time import Place, device_us
from benchmarks.document import provenance, usage
from benchmarks.given import numbers

if TYPE_CHECKING:
    from attention.kernels.packed_kernel import Scratch

CUDA = torch.device("cuda")
KEY = AttentionSpec(32, 8, 128, 128, scale=128**-0.5)
PAGE_SIZE, DTYPE = 16, torch.bfloat16
_CACHES_BYTES = 160 << 20
"""More than twice an H200's L2 cache, of the distinct pages of all layers."""
_LEAST_LAUNCHES = 8


@dataclass(frozen=True)
class Case:
    """rows with query tokens each that share `prefix` keys and have `own` after them, the query's included."""

    rows: int
    prefix: int
    own: int
    query: int


def batch_of(case: Case) -> HostBatch:
    """The rows on pages in random order."""
    shared, own = case.prefix // PAGE_SIZE, -(-case.own // PAGE_SIZE)
    pages = np.random.default_rng(0).permutation(np.arange(1, shared + case.rows * own + 1)).astype(np.int32)
    table = np.concatenate([np.tile(pages[:shared], (case.rows, 1)), pages[shared:].reshape(case.rows, own)], 1)
    first = np.full(case.rows, case.prefix + case.own - case.query)
    return rows_batch(np.arange(case.rows + 1) * case.query, first, table, PAGE_SIZE)


class Scene:
    """A case on the device."""

    def __init__(self, case: Case, batch: HostBatch, sharing: Sharing, scratch: Scratch) -> None:
        self.case, self.batch = case, batch
        self.metadata: CommonAttentionMetadata = stage(
            batch, *single_batch_arena(case.rows, batch.num_tokens, batch.block_table.shape[1], CUDA)
        )
        num_pages = int(batch.block_table.max()) + 1
        page_bytes = 2 * PAGE_SIZE * KEY.num_kv_heads * KEY.head_dim_k * 2
        count = max(1, min(32, -(-_CACHES_BYTES // (num_pages * page_bytes))))
        self.layers: tuple[LayerKV, ...] = allocate(
            CacheGroup("bench", (KEY,) * count, num_pages, PAGE_SIZE), DTYPE, CUDA
        )
        for layer in self.layers:
            layer.keys.normal_()
            layer.values.normal_()
        shape = (batch.num_tokens, KEY.num_q_heads, KEY.head_dim_k)
        self.query = torch.randn(shape, device=CUDA, dtype=DTYPE)
        self.shared = sharing.fixed(KEY, DTYPE, (case.rows, case.query), scratch)

    def time(self, kernel: PackedKernel) -> tuple[float, torch.Tensor]:
        """Microseconds of a layer, and what the first one gives."""
        out = torch.empty_like(self.query)
        kernel.plan(whole_batch(self.metadata))
        launches = max(_LEAST_LAUNCHES, len(self.layers))

        def launch() -> None:
            for layer in islice(cycle(self.layers), launches):
                kernel.run(self.query, layer, out, None)

        taken = device_us(launch, Place(CUDA, DTYPE)) / launches
        kernel.run(self.query, self.layers[0], out, None)
        return taken, out


def rule_says(case: Case, batch: HostBatch, shared: SharedRows) -> bool:
    """What the cost rule says of a case."""
    return bool(worth_sharing(batch, case.rows, case.query, shared.cost).any())


def compile_kernels(cases: Sequence[Case], scratch: Scratch, sharing: Sharing) -> None:
    """All kernels of these cases side by side: each is another for other numbers of rows and tokens."""
    from attention.kernels.launch import compiled_together

    shapes = {(case.rows, case.query): case for case in cases}
    with compiled_together():
        for case in shapes.values():
            scene = Scene(case, batch_of(case), sharing, scratch)
            out = torch.empty_like(scene.query)
            for shared in (None, scene.shared):
                kernel = PackedKernel(KEY, scratch, shared)
                kernel.plan(whole_batch(scene.metadata))
                kernel.run(scene.query, scene.layers[0], out, None)


def lines(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Measure every case, one line each."""
    scratch, sharing = packed_scratch(CUDA), Sharing(CUDA)
    compile_kernels(cases, scratch, sharing)
    for case in cases:
        batch = batch_of(case)
        scene = Scene(case, batch, sharing, scratch)
        assert scene.shared is not None
        flat_us, flat = scene.time(PackedKernel(KEY, scratch))
        none_us, none = scene.time(PackedKernel(KEY, scratch, scene.shared))
        found = shared_prefix(batch.block_table, batch.num_computed_tokens, PAGE_SIZE)
        assert found is not None and found.num_keys >= case.prefix
        scene.shared.send(found.pages_by_row(case.rows))
        cascade_us, cascaded = scene.time(PackedKernel(KEY, scratch, scene.shared))
        errors = [float((x.double() - flat.double()).norm() / flat.double().norm()) for x in (none, cascaded)]
        if not all(error <= 3e-3 for error in errors):
            raise SystemExit(f"{case}: relative difference to flat attention {errors}")
        own, tiling = case.prefix + case.own - found.num_keys, scene.shared.shared.tiling
        expected = scene.shared.cost.gain(case.rows, case.query, found.num_keys, own)
        yield asdict(case) | {
            "flat_us": round(flat_us, 2),
            "none_us": round(none_us, 2),
            "cascade_us": round(cascade_us, 2),
            "gain": round(flat_us / cascade_us, 2),
            "expected_gain": round(expected, 2),
            "rule": rule_says(case, batch, scene.shared),
            "tile": asdict(tiling.tile),
            "parts": tiling.parts,
            "least_keys": tiling.least_keys,
            "relative_difference": round(errors[1], 5),
        }


@click.command(help=usage(__doc__))
@click.option("--rows", default="8,32,128", show_default=True)
@click.option("--prefix", default="512,2048,8192", show_default=True)
@click.option("--own", default="64,256", show_default=True)
@click.option("--query", default="1,4,6", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON lines, one a case.")
def main(rows: str, prefix: str, own: str, query: str, out: Path) -> None:
    """Measure and write as measured."""
    torch.manual_seed(0)
    sizes = (numbers(text) for text in (rows, prefix, own, query))
    cases = [Case(*each) for each in _product(*sizes)]
    common = {"benchmark": "cascade", "heads": (32, 8), "head_dim": 128, "page_size": PAGE_SIZE, **provenance()}
    with out.open("w", encoding="utf-8") as file:
        for line in lines(cases):
            file.write(json.dumps(common | line) + "\n")
            file.flush()
            click.echo(" ".join(f"{name}={value}" for name, value in line.items()))


def _product(rows: list[int], prefixes: list[int], owns: list[int], queries: list[int]) -> Iterator[tuple[int, ...]]:
    return ((r, p, o, q) for r in rows for p in prefixes for o in owns for q in queries)


if __name__ == "__main__":
    main()
