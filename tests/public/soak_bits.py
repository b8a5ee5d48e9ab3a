"""Sampled requests from several threads, keyed and with invariant kernels in bfloat16: with drafts tokens and
log-probabilities are those of K = 0, bit for bit, in any company and after preemptions.

    python -m tests.public.soak_bits --shape llama-3.1-8b [--drafts 5] [--requests 256] [--threads 8] [--out FILE]

Weights are random, and so is the head; at high temperatures both distributions are nearly uniform, so drafts are
accepted. Pools hold a third of what the rows want. Ends in a JSON line; exits with 1 where something differs.
"""

from __future__ import annotations

import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.document import publish
from benchmarks.engines import wrapped
from benchmarks.shapes import Pair, random_pair
from specdec import SamplingParams

ROWS, LONGEST, MOST_NEW = 32, 500, 96
CALL = 4
"""Requests of a call: with fewer the threads would not fill the pool."""
PARAMETERS: dict[str, tuple[float, ...]] = {
    "temperature": (0.5, 1.0, 4.0, 10.0),
    "top_p": (1.0, 0.95, 0.8),
    "top_k": (0, 1000),
    "min_p": (0.0, 0.05),
}
Asked = tuple[list[int], SamplingParams]
Found = tuple[list[int], list[Any]]
"""Token ids, and log-probabilities of every token with those of the best ones."""


def asked_of(rng: random.Random, vocab: int) -> Asked:
    """A prompt and its parameters."""
    prompt = [rng.randrange(vocab) for _ in range(rng.randint(8, LONGEST))]
    drawn: dict[str, Any] = {name: rng.choice(values) for name, values in PARAMETERS.items()}
    own = {"seed": rng.randrange(2**40), "ignore_eos": True, "logprobs": 2}
    return prompt, SamplingParams(max_new_tokens=rng.randint(16, MOST_NEW), **own, **drawn)


def answers(pair: Pair, drafts: int, asked: list[Asked], threads: int, seed: int) -> tuple[list[Found], Any]:
    """What each request got, in an order of its own, and counters."""
    order = list(range(len(asked)))
    random.Random(seed).shuffle(order)
    pool = ROWS * (LONGEST + MOST_NEW) // 3
    limits = {"max_model_len": LONGEST + MOST_NEW + 16, "max_num_seqs": ROWS, "kv_cache_tokens": pool // 16 * 16}
    options: dict[str, Any] = {"sampling": "keyed", "backend": "batch_invariant", "max_num_batched_tokens": 2048}
    calls = [order[start : start + CALL] for start in range(0, len(order), CALL)]
    with wrapped(pair, drafts, enable_prefix_caching=True, **limits | options) as model:

        def found_by(call: list[int]) -> dict[int, Found]:
            completions = model.generate([asked[i][0] for i in call], [asked[i][1] for i in call])
            return {i: (list(c.token_ids), list(c.logprobs or [])) for i, c in zip(call, completions, strict=True)}

        with ThreadPoolExecutor(threads) as callers:
            found = dict(item for each in callers.map(found_by, calls) for item in each.items())
        return [found[i] for i in range(len(asked))], model.engine_stats


@click.command(help=__doc__)
@click.option("--shape", default="tiny", show_default=True)
@click.option("--drafts", default=5, show_default=True)
@click.option("--requests", default=256, show_default=True)
@click.option("--threads", default=8, show_default=True)
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(shape: str, drafts: int, requests: int, threads: int, device: str, out: Path | None) -> None:
    """Run it."""
    started, rng = time.perf_counter(), random.Random(0)
    pair = random_pair(shape, torch.bfloat16, torch.device(device))
    vocab = pair.target.config.get_text_config().vocab_size
    asked = [asked_of(rng, vocab) for _ in range(requests)]
    right, plain = answers(pair, 0, asked, threads, 1)
    found, stats = answers(pair, drafts, asked, threads, 2)
    line = {
        "benchmark": "soak_bits",
        "shape": shape,
        "K": drafts,
        "requests": requests,
        "threads": threads,
        "tokens": sum(len(tokens) for tokens, _ in found),
        "wrong tokens": sum(a[0] != b[0] for a, b in zip(right, found, strict=True)),
        "wrong log-probabilities": sum(a[1] != b[1] for a, b in zip(right, found, strict=True)),
        "preemptions": [plain.preemptions, stats.preemptions],
        "tau": round(stats.tau, 3),
        "seconds": round(time.perf_counter() - started, 1),
    }
    publish(line, out, append=True)
    sys.exit(bool(line["wrong tokens"] or line["wrong log-probabilities"]))


if __name__ == "__main__":
    main()
