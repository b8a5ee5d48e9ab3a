"""How many drafts of sampled requests are accepted: drawn from the head's distribution, or its most probable tokens.

    SPECDEC_DATA=… python -m benchmarks.bench_draft_sampling --questions 60 --out draft_sampling.json

The built-in EAGLE-3 pair on GSM8K test questions, at several temperatures, with and without top-p. Tau is tokens a
verification, pooled over all requests; its interval is the bootstrap's over questions (`evals.acceptance.summary`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.bench_builtin import questions
from benchmarks.document import publish, usage
from evals.acceptance.metrics import METRICS
from evals.acceptance.summary import Resampling
from specdec import Completion, SamplingParams, SpeculativeModel
from specdec.config import DRAFT_SAMPLING
from specdec.requests.stats import pool_requests

_TAU = next(metric for metric in METRICS if metric.key == "tau")


def tau(completions: Sequence[Completion], drafts: int) -> dict[str, float]:
    """Tokens a verification of K = `drafts`, pooled over all requests, and the interval."""
    pooled = [pool_requests([completion.stats]) for completion in completions]
    columns = {name: np.array([getattr(own, name) for own in pooled]) for name in (*_TAU.over, *_TAU.under)}
    found = Resampling(len(pooled), seed=0, k=drafts).value(_TAU, columns)
    return {"tau": found.estimate, "low": found.low, "high": found.high}


@click.command(help=usage(__doc__))
@click.option("--questions", "count", type=click.IntRange(min=2), default=120, show_default=True)
@click.option("--drafts", type=int, default=3, show_default=True)
@click.option("--temperatures", default="0.3,0.6,0.8,1.0,1.3", show_default=True)
@click.option("--top-p", "top_ps", default="0.95,1.0", show_default=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(count: int, drafts: int, temperatures: str, top_ps: str, out: Path | None) -> None:
    """Answer every question in every setting; one JSON line."""
    asked = [
        [{"role": "user", "content": q["question"]}] for q in questions(Path(os.environ["SPECDEC_DATA"]), "test", count)
    ]
    settings = [(float(t), float(p)) for t in temperatures.split(",") for p in top_ps.split(",")]
    lines: list[dict[str, Any]] = []
    for kind in DRAFT_SAMPLING:
        options: Any = {"num_speculative_tokens": drafts, "draft_sampling": kind}
        with SpeculativeModel.from_pretrained("gsm-llama", draft="auto", **options) as model:
            for temperature, top_p in settings:
                params = SamplingParams(max_new_tokens=160, temperature=temperature, top_p=top_p, seed=1)
                found = tau(model.generate(asked, params), drafts)
                lines.append({"draft_sampling": kind, "temperature": temperature, "top_p": top_p} | found)
                click.echo(f"{kind} T={temperature} top_p={top_p}: tau {found['tau']:.3f}")
    publish({"benchmark": "draft_sampling", "questions": count, "drafts": drafts, "lines": lines}, out)


if __name__ == "__main__":
    main()
