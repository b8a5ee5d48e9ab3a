"""GSM8K prompts of five shots: what the prefix cache finds of them, against the arithmetic, and that nothing changes.

    SPECDEC_DATA=DIR python -m benchmarks.bench_prefix --questions 200 --out prefix.jsonl
    SPECDEC_DATA=DIR python -m benchmarks.bench_prefix --target gsm-deepseek --draft mtp --dtype float32 --backend torch

All prompts begin with the first five problems of the train split (lm-eval's own `gsm8k` draws other shots for every
question, so there is little to share; its `gsm8k_cot` has the same ones). Without SPECDEC_DATA problems are generated.
The same call runs without the cache, then with it. In half precision answers may differ at near ties, but with
batch_invariant; in float32 tokens and draft ids are the same.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import click

from benchmarks.document import publish, usage
from benchmarks.prefix import expected_hits
from evals.data.arithmetic import problems
from evals.data.datasets import read_jsonl
from specdec import Completion, SamplingParams, SpeculativeModel
from specdec.requests.stats import pool_requests

_SHOTS = 5


def five_shots(count: int, data: Path | None) -> list[str]:
    """`count` prompts with the same five worked problems before their own."""
    if data is None:
        drawn = [(p.question, p.answer) for p in problems("train", _SHOTS + count)]
        shots, asked = drawn[:_SHOTS], drawn[_SHOTS:]
    else:
        splits = ((data / "gsm8k" / f"{name}.jsonl", n) for name, n in (("train", _SHOTS), ("test", count)))
        shots, asked = ([(r["question"], r["answer"]) for _, r in islice(read_jsonl(path), n)] for path, n in splits)
    worked = "\n\n".join(f"Question: {question}\nAnswer: {answer}" for question, answer in shots)
    return [f"{worked}\n\nQuestion: {question}\nAnswer:" for question, _ in asked]


def compared(model: SpeculativeModel, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """The same prompts without the cache and with it."""
    params = SamplingParams(max_new_tokens=new_tokens, stop=("Question:",), return_drafts=True)
    model.generate(prompts[-1], replace(params, cache_prefix=False))  # compiles, captures
    off, off_s = timed(model, prompts, replace(params, cache_prefix=False))
    on, on_s = timed(model, prompts, params)
    following = model.engine.scheduler.prefixes.cache.num_following if model.engine.scheduler.prefixes else 0
    expected = expected_hits(prompts, model.config.page_size, following if model.num_speculative_tokens else 0)
    hits = [(c.stats.prefix_hit_tokens, c.stats.cached_tokens) for c in on]
    read = sum(map(len, prompts))
    return {
        "prompt_tokens": read,
        "hit_rate": sum(found for found, _ in hits) / read,
        "hit_rate_expected": sum(found for found, _ in expected) / read,
        "cached_share": sum(taken for _, taken in hits) / read,
        "cached_share_expected": sum(taken for _, taken in expected) / read,
        "prompts_as_expected": sum(a == b for a, b in zip(hits, expected, strict=True)),
        "same_tokens": sum(a.token_ids == b.token_ids for a, b in zip(on, off, strict=True)),
        "same_drafts": sum(a.drafts == b.drafts for a, b in zip(on, off, strict=True)),
        "tau": [pool_requests([c.stats for c in side]).tau for side in (off, on)],
        "seconds": [off_s, on_s],
    }


def timed(model: SpeculativeModel, prompts: list[list[int]], params: SamplingParams) -> tuple[list[Completion], float]:
    """One call, and its seconds."""
    started = time.perf_counter()
    return model.generate(prompts, params), time.perf_counter() - started


@click.command(help=usage(__doc__))
@click.option("--target", default="gsm-llama", show_default=True)
@click.option("--draft", default="auto", show_default=True)
@click.option("--questions", "count", type=int, default=100, show_default=True)
@click.option("--new-tokens", type=int, default=128, show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--backend", default="auto", show_default=True)
@click.option("--kv-cache-tokens", type=int, help="Default: what fits.")
@click.option("--out", type=click.Path(path_type=Path))
def main(
    target: str,
    draft: str,
    count: int,
    new_tokens: int,
    dtype: str,
    backend: str,
    kv_cache_tokens: int | None,
    out: Path | None,
) -> None:
    """Ask, compare, and print one JSON line."""
    given = os.environ.get("SPECDEC_DATA")
    texts = five_shots(count, Path(given) if given else None)
    sizes: dict[str, Any] = {"dtype": dtype, "backend": backend, "kv_cache_tokens": kv_cache_tokens}
    with SpeculativeModel.from_pretrained(target, draft, enable_prefix_caching=True, **sizes) as model:
        found = compared(model, [model.tokenizer.encode(text) for text in texts], new_tokens)
        head = {"benchmark": "prefix", "target": target, "draft": draft, "questions": count}
        head |= {"data": "gsm8k" if given else "generated", "dtype": str(model.dtype), "device": str(model.device)}
        publish(head | {"page_size": model.config.page_size, "backend": model.backend_name} | found, out)


if __name__ == "__main__":
    main()
