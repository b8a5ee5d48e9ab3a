"""Rounds of two checkouts on one GPU, in turn: turns.sh starts a process of each, and this is that process.

    python -m benchmarks.offline.turns NAME SHAPE [K]    # measures at each file HELD/NAME.1, NAME.2, …, until NAME.end
    python -m benchmarks.offline.turns --compare OLD.log NEW.log WHAT_OLD_IS OUT.jsonl

Only what both checkouts have is called. A line of the result has the ratio of both in a turn, as a geometric mean with
its 95 % interval (Student's t over turns).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROWS, PROMPT, NEW_TOKENS = (1, 8, 32), 512, 160
MOMENTS = tuple((rows, temperature) for temperature in (0.0, 1.0) for rows in ROWS)
HELD = Path("/tmp/held")


def named(rows: int, temperature: float) -> str:
    """The key of a line for that many rows at that temperature."""
    return f"{rows} rows at {temperature}"


def measured(name: str, shape: str, drafts: str = "3") -> None:
    """One line at each turn: median milliseconds of a step by rows and temperature, with so many drafts a row."""
    import torch

    from benchmarks.bench_round import Moments, measure, prompts
    from benchmarks.shapes import random_pair
    from benchmarks.synthetic import Tokenizer
    from specdec.model import SpeculativeModel
    from specdec.requests.sampling import SamplingParams

    pair, length = random_pair(shape, torch.bfloat16, torch.device("cuda")), PROMPT + NEW_TOKENS + 32
    limits = {"max_model_len": length, "max_num_seqs": max(ROWS), "kv_cache_tokens": max(ROWS) * length}
    tokens = {"max_num_batched_tokens": 8192, "max_num_prefill_tokens": 8192, "page_size": 16, "cuda_graphs": True}
    made: Any = SpeculativeModel.from_pretrained
    model = made(
        pair.target, pair.head, num_speculative_tokens=int(drafts), tokenizer=Tokenizer(), enable_prefix_caching=False,
        **limits, **tokens,
    )  # fmt: skip
    read, vocab = Moments(), pair.target.config.get_text_config().vocab_size
    model.engine.executor.reads.after_read = read.note

    def once(rows: int, temperature: float) -> float:
        options = {"temperature": temperature, "ignore_eos": True, "cache_prefix": False, "seed": 0}
        params = [SamplingParams(NEW_TOKENS, **options)] * rows
        found = measure(model, read, prompts(rows, (PROMPT, PROMPT), vocab), params, 1)
        return float(found[0]["step_ms_median"])

    for moment in MOMENTS:
        once(*moment)
    (HELD / f"{name}.ready").touch()
    turn = 1
    while not (HELD / f"{name}.end").exists():
        if not (HELD / f"{name}.{turn}").exists():
            time.sleep(0.02)
            continue
        found = {"shape": shape, "drafts": int(drafts), "turn": turn}
        found |= {named(*moment): once(*moment) for moment in MOMENTS}
        print(json.dumps(found), flush=True)
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
    for rows, temperature in MOMENTS:
        key = named(rows, temperature)
        ratio = np.log([b[key] / a[key] for a, b in zip(before, now, strict=True)])
        half = t.ppf(0.975, len(ratio) - 1) * ratio.std(ddof=1) / len(ratio) ** 0.5
        line = {
            "benchmark": "turns",
            "shape": now[0]["shape"],
            "drafts": now[0]["drafts"],
            "rows": rows,
            "temperature": temperature,
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
