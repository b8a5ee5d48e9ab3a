"""Tokens a round of the built-in pair under both rules for sampled tokens, with paired intervals over questions.

    python -m benchmarks.bench_sampling --data QUESTIONS.jsonl [--questions 200] [--out sampling.json]

Each question has its own seed. Ends in one JSON line with versions and commit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.document import publish, usage
from specdec import SamplingParams, SpeculativeModel

SETTINGS = ((0.3, 1.0), (0.7, 1.0), (1.0, 1.0), (1.0, 0.9))
RULES = ("rejection", "keyed")
NEW, K = 160, 5
_RESAMPLED = 4000


def counted(model: Any, questions: list[Any], temperature: float, top_p: float) -> np.ndarray:
    """[questions, 2] tokens and rounds of each."""
    params = [SamplingParams(NEW, temperature=temperature, top_p=top_p, seed=i) for i in range(len(questions))]
    rounds = [done.stats.rounds for done in model.generate(questions, params)]
    return np.array([[sum(r.accepted + 1 for r in each), len(each)] for each in rounds])


def tau(counts: np.ndarray) -> float:
    """Tokens a round, pooled over rounds."""
    tokens, rounds = counts.sum(0)
    return float(tokens / rounds)


def compared(found: dict[str, np.ndarray]) -> dict[str, Any]:
    """τ of both rules, and their ratio with a 95 % interval over the same questions."""
    first, second = (found[rule] for rule in RULES)
    draws = np.random.default_rng(0).integers(0, len(first), (_RESAMPLED, len(first)))
    low, high = np.percentile([tau(second[own]) / tau(first[own]) for own in draws], [2.5, 97.5])
    taus = {f"tau_{rule}": round(tau(found[rule]), 3) for rule in RULES}
    return taus | {"ratio": round(tau(second) / tau(first), 3), "low": round(low, 3), "high": round(high, 3)}


@click.command(help=usage(__doc__))
@click.option("--data", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--questions", default=200, show_default=True)
@click.option("--target", default="gsm-llama", show_default=True, help="With its own head.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write the JSON there.")
def main(data: Path, questions: int, target: str, out: Path | None) -> None:
    """Measure every setting."""
    rows = [json.loads(line)["question"] for line in data.read_text("utf-8").splitlines()[:questions]]
    asked = [[{"role": "user", "content": row}] for row in rows]
    found: dict[tuple[float, float], dict[str, np.ndarray]] = {own: {} for own in SETTINGS}
    for rule in RULES:
        options: dict[str, Any] = {"num_speculative_tokens": K, "max_num_seqs": 16, "sampling": rule}
        with SpeculativeModel.from_pretrained(target, "auto", **options) as model:
            for own in SETTINGS:
                found[own][rule] = counted(model, asked, *own)
    lines = [{"temperature": t, "top_p": p} | compared(found[t, p]) for t, p in SETTINGS]
    what = {"benchmark": "sampling", "target": target, "questions": len(asked), "K": K}
    publish(what | {"results": lines}, out)


if __name__ == "__main__":
    main()
