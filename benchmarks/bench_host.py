"""CPU time of an engine's rounds with so many requests waiting: what a round takes must not depend on the queue.

    python -m benchmarks.bench_host --queue 10 --queue 1000 --queue 100000 [--out host.json]

32 rows of a model of one layer, so that a round is nearly all host time; each round ends about eight rows and lets in
as many. Ends in one JSON line with versions and commit.
"""

from __future__ import annotations

import time
from pathlib import Path

import click
import numpy as np
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.document import publish, usage
from benchmarks.synthetic import Tokenizer
from specdec.engine.engine import Engine
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams

ROWS = 32
_REPEATS = 3
"""In turns over all lengths, the best of each: a shared machine is slower for seconds at a time."""


def queue_engine() -> Engine:
    """32 rows of a Llama of one layer, 16 wide: a round is nearly all host time."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    target = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes)).eval()
    options = {"max_num_seqs": ROWS, "max_num_batched_tokens": 1024, "kv_cache_tokens": 64 * ROWS}
    model = SpeculativeModel.from_pretrained(target, tokenizer=Tokenizer(), **options)
    return model.engine


def measure_queue(engine: Engine, waiting: int, rounds: int) -> dict[str, float]:
    """p50 and p99 of a round in microseconds with so many requests waiting, and an abort's per request."""
    rng = np.random.default_rng(0)

    def submit(count: int) -> list[int]:
        params = [SamplingParams(max_new_tokens=int(n), ignore_eos=True) for n in rng.integers(2, 7, count)]
        return [engine.submit(rng.integers(0, 64, 8).tolist(), each) for each in params]

    ids, times, ended = submit(waiting + ROWS), [], 0
    for number in range(rounds + 20):
        start = time.thread_time_ns()
        updates = engine.step()
        times.append((time.thread_time_ns() - start) / 1e3)
        last = sum(update.last for update in updates)
        ended += last if number >= 20 else 0
        ids += submit(last)
    assert engine.usage().waiting >= waiting, "the queue kept its length"
    left, start = engine.usage().requests, time.thread_time_ns()
    engine.abort(ids[::-1])
    abort_us = (time.thread_time_ns() - start) / 1e3 / left
    p50, p99 = (round(float(p), 1) for p in np.percentile(times[20:], [50, 99]))
    what = {"waiting": waiting, "rows": ROWS, "ended_per_round": round(ended / rounds, 2)}
    return what | {"p50_us": p50, "p99_us": p99, "abort_us_per_request": round(abort_us, 2)}


@click.command(help=usage(__doc__))
@click.option("--rounds", default=500, show_default=True)
@click.option("--queue", multiple=True, type=int, default=(10, 1000), show_default=True, help="Repeatable.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write the JSON there.")
def main(rounds: int, queue: tuple[int, ...], out: Path | None) -> None:
    """Measure every length of the queue."""
    engine = queue_engine()
    found = [[measure_queue(engine, n, rounds) for n in queue] for _ in range(_REPEATS)]
    best = [min(each, key=lambda result: result["p50_us"]) for each in zip(*found, strict=True)]
    publish({"benchmark": "host_queue", "results": best, "repeats": _REPEATS}, out)


if __name__ == "__main__":
    main()
