"""Time of a round of a target divided among GPUs, at published widths with random weights, through from_pretrained.

    python -m benchmarks.bench_parallel --shape llama-3.1-8b --tensor-parallel-size 1,2 --drafts 0,5 --out tp.jsonl
    python -m benchmarks.bench_parallel --shape llama-70b --layers 8,24 --drafts 0 --rows 1,32 --out tp.jsonl
    python -m benchmarks.bench_parallel --shape deepseek-v3 --drafts 1 --out tp.jsonl

Every rank of several reads its share from a folder, as of any checkpoint; the matrices in it are drawn on the rank's
GPU when they are read (`benchmarks.drawn_weights`), so that the folder takes no room. Acceptance is synthetic, as in
`benchmarks.bench_round`, whose measure of a step this is. Each batch is printed and appended to --out at once.

With several ranks further lines have what a round's exchanges take alone. With SPECDEC_COLLECTIVES=nccl sums are
NCCL's. With --hold several processes can load and capture at once and measure one after the other.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
from transformers.models.auto import AutoModelForCausalLM

from benchmarks.bench_round import Moments, measure, prompts
from benchmarks.document import provenance, usage
from benchmarks.drawn_weights import in_every_rank
from benchmarks.given import Listed, wait_for
from benchmarks.kinds import Kind
from benchmarks.parallel_shapes import SHAPES, write_pair
from benchmarks.rank_work import exchanges_ms, floor_ms
from benchmarks.synthetic import DrawnAcceptance, Tokenizer, decide
from specdec.extensions.parallel.engine import LeadingEngine
from specdec.model import SpeculativeModel

_LEAST_VOCAB = 4000
_SIZES = Listed(click.IntRange(1))


class Words(Tokenizer):
    """Of a text any ids, one for each word: the self-test of a multi-token-prediction module reads a text."""

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        """See the class."""
        return {"input_ids": [zlib.crc32(word.encode()) % _LEAST_VOCAB for word in text.split()]}


def open_model(
    target: Path, draft: str, size: int, drafts: int, rows: list[int], longest: int, device: str
) -> SpeculativeModel:
    """A model for batches of so many rows of `longest` tokens; on a GPU CUDA graphs are required.

    One rank's is given loaded: matrices that are drawn on the GPU would go through the host's memory otherwise.
    """
    dtype, tokens = ("bfloat16", 2048) if device == "cuda" else ("float32", 256)
    options: dict[str, Any] = {"max_num_batched_tokens": tokens, "max_num_prefill_tokens": tokens}
    loaded: Any = target
    if size == 1:
        loaded = AutoModelForCausalLM.from_pretrained(target, dtype=dtype, device_map={"": device}).eval()
    else:
        options |= {"tensor_parallel_size": size, "device": device, "dtype": dtype}
    return SpeculativeModel.from_pretrained(
        loaded,
        draft if drafts else None,
        num_speculative_tokens=drafts,
        tokenizer=Words(),
        max_num_seqs=max(rows),
        max_model_len=longest,
        kv_cache_tokens=max(rows) * longest,
        enable_prefix_caching=False,
        cuda_graphs=device == "cuda",
        **options,
    )


def measure_batch(
    model: SpeculativeModel, read: Moments, rows: int, prompt: int, new_tokens: int, repeats: int
) -> dict[str, Any]:
    """The step of a full batch of so many rows, and its floor."""
    drafts, ids = model.num_speculative_tokens, prompts(rows, (prompt, prompt), model.target.vocab_size)
    model.generate(ids, Kind().params(rows, min(new_tokens, 48)))
    line, _ = measure(model, read, ids, Kind().params(rows, new_tokens), repeats)
    line |= floor_ms(model, rows, drafts, prompt + new_tokens / 2)
    return line | {"over_floor": line["step_ms_median"] / line["floor_ms"]}


def lines_of(
    model: SpeculativeModel, rows: list[int], prompt: int, new_tokens: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """One for each batch, then one for the exchanges of each: what fails there takes no step away."""
    read, vocab, steps = Moments(), model.target.vocab_size, {}
    decide(model, DrawnAcceptance(0.8, vocab, np.random.default_rng(0), model.device))
    model.engine.executor.reads.after_read = read.note
    for count in rows:
        found = measure_batch(model, read, count, prompt, new_tokens, repeats)
        steps[count] = found["step_ms_median"]
        yield {"benchmark": "parallel", "rows": count} | found
    if isinstance(model.engine, LeadingEngine):
        for count in rows:
            tokens = count * (model.num_speculative_tokens + 1)
            alone = model.engine.run(exchanges_ms, tokens, count)
            alone["sums_share"] = alone["sums_ms"] / steps[count]
            yield {"benchmark": "parallel exchanges", "rows": count, "tokens": tokens} | alone


@click.command(help=usage(__doc__))
@click.option("--shape", type=click.Choice(list(SHAPES)), default="llama-3.1-8b", show_default=True)
@click.option("--layers", type=_SIZES, default="", help="One or several numbers.  [default: the shape's]")
@click.option("--experts", type=int, default=64, show_default=True, help="Of a layer of deepseek-v3, which has 256.")
@click.option("--tensor-parallel-size", "ranks", type=_SIZES, default="1,2", show_default=True)
@click.option("--drafts", type=Listed(click.IntRange(0)), default="0,5", show_default=True)
@click.option("--rows", type=_SIZES, default="1,8,32", show_default=True)
@click.option("--prompt", type=int, default=512, show_default=True)
@click.option("--new-tokens", type=int, default=192, show_default=True)
@click.option("--repeats", type=int, default=2, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), help="Where pairs are written and kept; default a new one.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--hold", type=click.Path(path_type=Path), help="Measure once this file exists; FILE.ready says so.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON lines are appended.")
def main(**options: Any) -> None:
    """Measure every number of layers, ranks and drafts."""
    o = SimpleNamespace(**options)
    in_every_rank()
    place = o.folder or Path(tempfile.mkdtemp(prefix="bench-parallel-"))
    facts: dict[str, Any] = {"shape": o.shape, "prompt": o.prompt, "new_tokens": o.new_tokens}
    facts |= {"collectives": os.environ.get("SPECDEC_COLLECTIVES", "auto"), **provenance()}
    facts |= {"experts": o.experts} if "deepseek" in o.shape else {}
    try:
        for depth in o.layers or [SHAPES[o.shape][0]]:
            target, draft = write_pair(o.shape, depth, o.experts, place)
            for size in o.ranks:
                for k in o.drafts:
                    started, longest = time.perf_counter(), o.prompt + o.new_tokens + 16
                    with open_model(target, draft, size, k, o.rows, longest, o.device) as model:
                        own = {"layers": depth, "tensor_parallel_size": size, "drafts": k, "graphs": model.graphs}
                        own |= {"start_s": time.perf_counter() - started, "start": dict(model.steps)}
                        own |= {"parallel": model.describe()["tensor_parallel"]}
                        if o.hold is not None:
                            wait_for(o.hold)
                        for found in lines_of(model, o.rows, o.prompt, o.new_tokens, o.repeats):
                            line = facts | own | found
                            click.echo(f"{o.shape}-{depth} TP={size} K={k} rows={line['rows']}: {json.dumps(found)}")
                            with o.out.open("a") as file:
                                file.write(json.dumps(line) + "\n")
    finally:
        if o.folder is None:
            shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
