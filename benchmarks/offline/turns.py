"""Rounds, or whole calls, of two checkouts on one GPU, in turn: turns.sh starts a process of each, this one.

    python -m benchmarks.offline.turns NAME SHAPE [K] [rounds|calls]  # measures at each file HELD/NAME.1, NAME.2, …
    python -m benchmarks.offline.turns --compare OLD.log NEW.log WHAT_OLD_IS OUT.jsonl

`rounds`: milliseconds of a step. `calls`: of whole calls of so many requests, from nothing to the last token, with the
options that a load has by default. SIZES in the environment: a JSON object of other options, and of "weights",
"layers" and "held" (see `benchmarks.shapes.random_pair`); for rounds of "rows" and "top_p", for calls of "calls"
(counts), "long" (longest prompt of 48 more calls), "mixed" (how many of the lengths that `benchmarks.bench_serving`
has) and "poisson" (how many that arrive at 12 a second, of which the p99 between two updates is measured). The process
ends at the file HELD/NAME.end. Only what both checkouts have is called. A line of the result has the ratio of both in a
turn, as a geometric mean with its 95 % interval (Student's t over turns).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROWS, PROMPT, NEW_TOKENS = (1, 8, 32), 512, 160
CALLS, CALL = (1, 8, 32, 128), (512, 256)
"""Requests of a call, and the tokens of a prompt and of an answer."""
MIXED = (64, 1024), (32, 384)
"""Shortest and longest prompts and answers of the mixed workload."""
HELD = Path("/tmp/held")


def named(rows: int, temperature: float) -> str:
    """The key of a step of that many rows at that temperature."""
    return f"{rows} rows at {temperature}"


def rounds_of(shape: str, drafts: int) -> Callable[[], dict[str, float]]:
    """Makes the model; each call measures: median milliseconds of a step by rows and temperature."""
    import torch

    from benchmarks.bench_round import Moments, measure, prompts
    from benchmarks.shapes import random_pair
    from benchmarks.synthetic import Tokenizer
    from specdec.model import SpeculativeModel
    from specdec.requests.sampling import SamplingParams

    sizes = json.loads(os.environ.get("SIZES", "{}"))
    every, drawn = sizes.pop("rows", ROWS), {"top_p": sizes.pop("top_p", 1.0)}
    weights = sizes.pop("weights", "model"), sizes.pop("layers", None), sizes.pop("held", 0)
    pair = random_pair(shape, torch.bfloat16, torch.device("cuda"), *weights)
    torch.cuda.empty_cache()  # experts were in bfloat16 first; the next process needs the room
    length = PROMPT + NEW_TOKENS + 32
    limits = {"max_model_len": length, "max_num_seqs": max(every), "kv_cache_tokens": max(every) * length}
    tokens = {"max_num_batched_tokens": 8192, "max_num_prefill_tokens": 8192, "page_size": 16, "cuda_graphs": True}
    made: Any = SpeculativeModel.from_pretrained
    model = made(
        pair.target, pair.head if drafts else None, num_speculative_tokens=drafts, tokenizer=Tokenizer(),
        enable_prefix_caching=False, **limits | tokens | sizes,
    )  # fmt: skip
    read, vocab = Moments(), pair.target.config.get_text_config().vocab_size
    model.engine.executor.reads.after_read = read.note

    def once(rows: int, temperature: float) -> float:
        options = {"temperature": temperature, "ignore_eos": True, "cache_prefix": False, "seed": 0}
        params = [SamplingParams(NEW_TOKENS, **options | (drawn if temperature else {}))] * rows
        found = measure(model, read, prompts(rows, (PROMPT, PROMPT), vocab), params, 1)
        return float(found[0]["step_ms_median"])

    moments = [(rows, temperature) for temperature in (0.0, 1.0) for rows in every]
    return lambda: {named(*moment): once(*moment) for moment in moments}


def calls_of(shape: str, drafts: int) -> Callable[[], dict[str, float]]:
    """Makes the model; each call measures: milliseconds of a call of so many requests, and until first tokens."""
    import numpy as np
    import torch

    from benchmarks.serving import all_at_once, served
    from benchmarks.shapes import random_pair
    from benchmarks.synthetic import DrawnAcceptance, Tokenizer, decide
    from benchmarks.workload import Load, between_updates
    from specdec.model import SpeculativeModel

    sizes, place = json.loads(os.environ.get("SIZES", "{}")), torch.device("cuda")
    long, calls = sizes.pop("long", 0), sizes.pop("calls", CALLS)
    mixed, poisson = sizes.pop("mixed", 0), sizes.pop("poisson", 0)
    weights = sizes.pop("weights", "model"), sizes.pop("layers", None), sizes.pop("held", 0)
    pair = random_pair(shape, torch.bfloat16, place, *weights)
    torch.cuda.empty_cache()  # experts were in bfloat16 first; the next process needs the room
    length = max(max(CALL[0], long) + CALL[1], sum(ends[1] for ends in MIXED)) + 16
    made: Any = SpeculativeModel.from_pretrained
    limits = {
        "max_model_len": length,
        "max_num_seqs": max(ROWS),
        "kv_cache_tokens": 32 * (sum(CALL) + 16) + 16 * length,
    }
    model = made(
        pair.target, pair.head if drafts else None, num_speculative_tokens=drafts, tokenizer=Tokenizer(),
        enable_prefix_caching=False, cuda_graphs=True, **limits | sizes,
    )  # fmt: skip
    vocab = pair.target.config.get_text_config().vocab_size
    decide(model, DrawnAcceptance(0.8, vocab, np.random.default_rng(0), place))
    loads = {f"{n} calls": Load(n, (CALL[0],) * 2, (CALL[1],) * 2) for n in calls}
    loads |= {"48 long calls": Load(48, (long // 4, long), (CALL[1],) * 2)} if long else {}
    loads |= {f"{mixed} mixed calls": Load(mixed, *MIXED)} if mixed else {}
    arriving = Load(poisson, *MIXED, rate=12.0)

    def once() -> dict[str, float]:
        found = {}
        for name, load in loads.items():
            lines = all_at_once(model, load.arrivals(vocab))
            first = [line.moments[0] - line.arrived for line in lines]
            found[name] = 1e3 * max(line.moments[-1] - line.arrived for line in lines)
            found |= {f"{name}, first token": 1e3 * min(first), f"{name}, last first token": 1e3 * max(first)}
            found[f"{name}, after the last first token"] = found[name] - 1e3 * max(first)
        if poisson:
            lines = served(model, arriving.arrivals(vocab))
            found[f"{poisson} at 12/s, p99 between updates"] = between_updates(lines)["update_ms_p99"]
        return found

    return once


def measured(name: str, shape: str, drafts: str = "3", what: str = "rounds") -> None:
    """One line at each turn."""
    once = {"rounds": rounds_of, "calls": calls_of}[what](shape, int(drafts))
    once()
    (HELD / f"{name}.ready").touch()
    turn = 1
    while not (HELD / f"{name}.end").exists():
        if not (HELD / f"{name}.{turn}").exists():
            time.sleep(0.02)
            continue
        print(json.dumps({"shape": shape, "drafts": int(drafts), "turn": turn} | once()), flush=True)
        (HELD / f"{name}.{turn}.done").touch()
        turn += 1


def compared(old: str, new: str, before_is: str, out: str) -> None:
    """Append the lines of the result, by rows. before_is: what the old log measured, such as a commit."""
    from scipy.stats import t

    from benchmarks.document import publish

    before, now = (
        [json.loads(line) for line in Path(log).read_text().splitlines() if line.startswith('{"shape"')]
        for log in (old, new)
    )
    for key in [key for key in now[0] if key not in ("shape", "drafts", "turn")]:
        ratio = np.log([b[key] / a[key] for a, b in zip(before, now, strict=True)])
        half = t.ppf(0.975, len(ratio) - 1) * ratio.std(ddof=1) / len(ratio) ** 0.5
        line = {
            "benchmark": "turns",
            "shape": now[0]["shape"],
            "drafts": now[0]["drafts"],
            "of": key,
            "before": before_is,
        }
        line |= {"before_ms": [each[key] for each in before], "now_ms": [each[key] for each in now]}
        ends = [float(np.exp(ratio.mean() + sign * half)) for sign in (-1, 1)]
        publish(line | {"ratio": float(np.exp(ratio.mean())), "interval": ends}, Path(out), append=True)


if __name__ == "__main__":
    if sys.argv[1] == "--compare":
        compared(*sys.argv[2:])
    else:
        measured(*sys.argv[1:])
