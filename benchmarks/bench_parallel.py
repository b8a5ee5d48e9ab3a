"""Time of a round of a target divided among GPUs, at a published shape with random weights, through from_pretrained.

    python -m benchmarks.bench_parallel --shape llama-3.1-8b --tensor-parallel-size 1,2 --drafts 0,5 --out tp.jsonl
    python -m benchmarks.bench_parallel --shape llama-70b --layers 8,24 --tensor-parallel-size 1,2 --out tp.jsonl

Every rank reads its share from a checkpoint, so the pair is written to a folder first (--folder; 16 GB for the 8B
shape, 45 for 24 layers of the 70B one). Acceptance is synthetic, as in `benchmarks.bench_round`, whose measure of a
step this is.
--trace measures what each kernel takes on rank 0; of the sums that includes waiting for the other rank. With
SPECDEC_COLLECTIVES=nccl sums are NCCL's alone.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from transformers import LlamaConfig

from benchmarks.bench_round import Moments, full_rounds, measure, numbers, prompts
from benchmarks.document import provenance
from benchmarks.kinds import Kind
from benchmarks.shapes import SHAPES, random_pair
from benchmarks.synthetic import DrawnAcceptance, Tokenizer, decide
from benchmarks.trace import traced
from drafters.eagle3.checkpoint import save_eagle3
from drafters.eagle3.head import Eagle3Head
from specdec.model import SpeculativeModel

_TRACED_ROUNDS = 12


def llama_70b(layers: int) -> LlamaConfig:
    """So many layers of Llama 3's 70B shape."""
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )


def write_pair(shape: str, layers: int | None, folder: Path, device: str) -> tuple[Path, Path]:
    """Folders of a random target and of its head."""
    name = shape if layers is None else f"{shape}-{layers}"
    if layers is not None:
        SHAPES[name] = lambda: llama_70b(layers)
    target, head = folder / name / "target", folder / name / "head"
    if not (target / "config.json").exists():
        pair = random_pair(name, torch.bfloat16, torch.device(device))
        if not isinstance(pair.head, Eagle3Head):
            raise click.UsageError(f"--shape {shape}: only pairs with an EAGLE-3 head are written to folders")
        pair.target.save_pretrained(target)
        save_eagle3(pair.head, head)
        del pair
        gc.collect()
        torch.cuda.empty_cache()
    return target, head


def measure_one(
    target: Path,
    head: Path,
    size: int,
    drafts: int,
    rows: list[int],
    new_tokens: int,
    traced_rows: list[int],
    device: str,
) -> list[dict[str, Any]]:
    """One line for every batch of so many rows."""
    started, prompt = time.perf_counter(), 512 if device == "cuda" else 24
    dtype = "bfloat16" if device == "cuda" else "float32"
    longest = prompt + new_tokens + 16
    sizes = {"max_num_seqs": max(rows), "max_model_len": longest, "kv_cache_tokens": max(rows) * longest}
    sizes |= {"max_num_batched_tokens": 8192, "max_num_prefill_tokens": 8192}
    options: dict[str, Any] = {"num_speculative_tokens": drafts, "dtype": dtype, "tokenizer": Tokenizer(), **sizes}
    lines: list[dict[str, Any]] = []
    where = {"tensor_parallel_size": size, "device": device}
    with SpeculativeModel.from_pretrained(target, head if drafts else None, **where, **options) as model:
        start_s, read = time.perf_counter() - started, Moments()
        vocab = model.target.vocab_size
        decide(model, DrawnAcceptance(0.8, vocab, np.random.default_rng(0), model.device))
        model.executor.reads.after_read = read.note
        for count in rows:
            ids, params = prompts(count, (prompt, prompt), vocab), Kind().params(count, new_tokens)
            model.generate(ids, Kind().params(count, min(new_tokens, 48)))
            line, _ = measure(model, read, ids, params, 3)
            line |= {"tensor_parallel_size": size, "drafts": drafts, "rows": count, "start_s": start_s}
            line |= {"graphs": model.graphs, "parallel": model.describe()["tensor_parallel"]}
            click.echo(f"TP={size} K={drafts} rows={count}: {line['step_ms_median']:.2f} ms, graphs {model.graphs}")
            if count in traced_rows:
                with full_rounds(model, read, ids, params) as go_on:
                    line["trace"] = traced(lambda go_on=go_on: go_on(_TRACED_ROUNDS))
            lines.append(line)
    return lines


@click.command(help=__doc__)
@click.option("--shape", type=click.Choice(["llama-70b", "llama-3.1-8b", "tiny"]), default="llama-3.1-8b")
@click.option("--layers", default="24", show_default=True, help="Of llama-70b; one or several.")
@click.option("--tensor-parallel-size", "ranks", default="1,2", show_default=True)
@click.option("--drafts", default="0,5", show_default=True)
@click.option("--rows", default="1,8,32", show_default=True)
@click.option("--new-tokens", type=int, default=192, show_default=True)
@click.option("--trace", default="", help="Batch sizes that are also traced with CUPTI on rank 0.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where pairs are written and kept; default a new one.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON lines are appended.")
def main(
    shape: str,
    layers: str,
    ranks: str,
    drafts: str,
    rows: str,
    new_tokens: int,
    trace: str,
    folder: Path | None,
    device: str,
    out: Path,
) -> None:
    """Measure every number of layers, ranks and drafts."""
    place = folder or Path(tempfile.mkdtemp(prefix="bench-parallel-"))
    try:
        for depth in numbers(layers) if shape == "llama-70b" else [None]:
            target, head = write_pair(shape, depth, place, device)
            for size in numbers(ranks):
                for k in numbers(drafts):
                    found = measure_one(target, head, size, k, numbers(rows), new_tokens, numbers(trace), device)
                    facts = {"benchmark": "parallel", "shape": shape, "layers": depth, **provenance()}
                    facts |= {"collectives": os.environ.get("SPECDEC_COLLECTIVES", "auto")}
                    with out.open("a") as file:
                        file.writelines(json.dumps(facts | line) + "\n" for line in found)
            if folder is None:
                shutil.rmtree(target.parent)
    finally:
        if folder is None:
            shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
