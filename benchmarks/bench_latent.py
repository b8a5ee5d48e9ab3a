"""Latent attention and mixtures of experts at DeepSeek-V2-Lite's sizes, one layer each, against the bytes they read.

    python -m benchmarks.bench_latent --out benchmarks/results/latent.jsonl

Attention (16 heads, latents of 512 + 64, pages of 16, bfloat16): run_us is the cache write and the kernel, replayed
from a CUDA graph, 16 layers over caches of their own; replan_us is the host's, on an idle device. Experts (64, of which
a token takes 6; hidden 2048, inner 1408): transformers' forms and ours, compiled and replayed from a CUDA graph over
eight sets of random routes. Floors are the latents of the rows, or the weights of the chosen experts, over 4.25 TB/s.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from transformers import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Experts

from attention.backends.flashinfer.backend import FlashInferBackend
from attention.batch.host import rows_batch
from attention.batch.metadata import single_batch_arena, stage
from attention.cache.kv_cache import CacheGroup
from attention.runner import GroupRunner
from attention.spec import AttentionSpec
from benchmarks.device_time import Place, device_us, host_us
from benchmarks.document import provenance, usage
from benchmarks.shapes import COPY_BYTES_PER_S
from specdec.ops.experts import CAPTURABLE

CUDA = torch.device("cuda")
PLACE = Place(CUDA, torch.bfloat16)
LAYERS, PAGE_SIZE = 16, 16
KEY = AttentionSpec(16, 1, 576, 512, scale=192**-0.5, value_in_key=True)
EXPERTS, CHOSEN, HIDDEN, INNER, SETS = 64, 6, 2048, 1408, 8


def attention(rows: int, query: int, computed: int) -> dict[str, Any]:
    """One batch of equal rows: `query` new tokens each after `computed` cached ones."""
    pages = -(-(computed + query) // PAGE_SIZE)
    table = np.random.default_rng(0).permutation(np.arange(1, rows * pages + 1)).astype(np.int32).reshape(rows, pages)
    batch = rows_batch(np.arange(rows + 1) * query, np.full(rows, computed), table, PAGE_SIZE)
    arena, bucket = single_batch_arena(rows, rows * query, pages, CUDA)
    group = CacheGroup("bench", (KEY,) * LAYERS, rows * pages + 1, PAGE_SIZE)
    runner = GroupRunner(FlashInferBackend(CUDA), group, torch.bfloat16, CUDA)
    for layer in runner.layers:
        layer.keys.normal_()
    planner = runner.fixed_planner(rows, query)
    planned = planner.plan(stage(batch, arena, bucket))
    q = torch.randn(KEY.num_q_heads, rows * query, 576, device=CUDA, dtype=torch.bfloat16).transpose(0, 1)
    k = torch.randn(rows * query, 1, 576, device=CUDA, dtype=torch.bfloat16)
    run = device_us(lambda: [runner.attend(planned, n, q, k, k[..., :512]) for n in range(LAYERS)], PLACE) / LAYERS
    floor = rows * (computed + query) * 576 * 2 / COPY_BYTES_PER_S * 1e6
    facts = {"part": "attention", "rows": rows, "query": query, "computed": computed}
    other = rows_batch(np.arange(rows + 1) * query, np.full(rows, computed - 1), table, PAGE_SIZE)
    turns = itertools.cycle([other, batch])
    return facts | {"run_us": run, "floor_us": floor, "replan_us": host_us(lambda: planner.replan(next(turns)), PLACE)}


def experts(form: str, tokens: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """One form of the mixture over several numbers of tokens."""
    torch.compiler.reset()
    config = DeepseekV2Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        experts_implementation=form,
    )
    with CUDA:
        mixture = DeepseekV2Experts(config).to(torch.bfloat16).requires_grad_(False)
    for parameter in mixture.parameters():
        parameter.normal_(std=0.02)
    compiled = torch.compile(mixture.forward, fullgraph=True, dynamic=True)
    for n in tokens:
        routes = [torch.rand(n, EXPERTS, device=CUDA).topk(CHOSEN, -1) for _ in range(SETS)]
        sets = [(torch.randn(n, HIDDEN, device=CUDA, dtype=torch.bfloat16), r.indices, r.values) for r in routes]
        run = device_us(lambda sets=sets: [compiled(*s) for s in sets], PLACE) / SETS  # type: ignore[misc]
        distinct = sum(len(r.indices.unique()) for r in routes) / SETS
        floor = distinct * 3 * HIDDEN * INNER * 2 / COPY_BYTES_PER_S * 1e6
        yield {"part": "experts", "form": form, "tokens": n, "run_us": run, "floor_us": floor, "distinct": distinct}


@click.command(help=usage(__doc__))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON lines are appended.")
def main(out: Path) -> None:
    """Measure both."""
    facts = {"benchmark": "latent", **provenance()}

    def note(found: dict[str, Any]) -> None:
        click.echo(json.dumps(found))
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts | found) + "\n")

    for computed in (640, 4096):
        for rows in (1, 8, 32):
            for query in (1, 2, 4):
                note(attention(rows, query, computed))
    with torch.no_grad():
        for form, tokens in (("grouped_mm", (16, 1, 4, 8, 32, 128)), ("batched_mm", (16, 1, 4, 8, 32))):
            for found in experts(form, tokens):
                note(found)
        for found in experts(CAPTURABLE, (16, 1, 4, 8, 32, 128)):
            note(found)


if __name__ == "__main__":
    main()
