"""Speed of a built-in pair at batch 1 on GSM8K test questions, against transformers' own `generate`.

    SPECDEC_DATA=… python -m benchmarks.bench_builtin --questions 80 [--out …]

Greedy. Every question is answered by each configuration in turn, so that a busy machine slows all of them alike: with
speculation, without it (the same engine, K = 0), and by `generate` with a static and with a dynamic cache. Acceptance
is measured by `specdec eval acceptance --data gsm8k`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.check_pair import MAX_NEW_TOKENS, test_prompts, transformers_tokens
from benchmarks.document import publish, usage
from specdec import SamplingParams, SpeculativeModel

ARMS: dict[str, dict[str, Any]] = {
    "speculative": {"num_speculative_tokens": None},
    "k0": {"num_speculative_tokens": 0},
    "transformers_static": {"cache_implementation": "static"},
    "transformers_dynamic": {},
}
"""Configurations: options of a request of ours, and of transformers' `generate`."""


def answer(model: SpeculativeModel, prompt: list[int], name: str) -> list[int]:
    """New tokens of one configuration."""
    if name.startswith("transformers"):
        return transformers_tokens(model, prompt, **ARMS[name])
    return model.generate([prompt], SamplingParams(max_new_tokens=MAX_NEW_TOKENS, **ARMS[name]))[0].token_ids


def speed_numbers(model: SpeculativeModel, prompts: list[list[int]]) -> dict[str, Any]:
    """Wall seconds of each configuration over the same questions, and speed-ups as ratios of totals.

    Raises:
        AssertionError: two configurations answer differently.
    """
    seconds, tokens = dict.fromkeys(ARMS, 0.0), 0
    for name in ARMS:
        answer(model, prompts[0], name)  # warm up
    for prompt in prompts:
        answers = []
        for name in ARMS:
            start = time.perf_counter()
            answers.append(answer(model, prompt, name))
            seconds[name] += time.perf_counter() - start
        assert all(each == answers[0] for each in answers), "the configurations disagree"
        tokens += len(answers[0])
    best = min(seconds["k0"], seconds["transformers_static"])
    return {
        "seconds": seconds,
        "tokens": tokens,
        "speed_up": {name: total / seconds["speculative"] for name, total in seconds.items()},
        "speed_up_over_best_of_k0_and_static": best / seconds["speculative"],
        "threads": torch.get_num_threads(),
    }


@click.command(help=usage(__doc__))
@click.option("--questions", "count", default=80, show_default=True)
@click.option("-k", default=5, show_default=True)
@click.option("--target", default="gsm-llama", show_default=True)
@click.option("--draft", default="auto", show_default=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(count: int, k: int, target: str, draft: str, out: Path | None) -> None:
    """Measure the pair; ends in one JSON line."""
    options: dict[str, Any] = {"num_speculative_tokens": k, "max_num_seqs": 16, "enable_prefix_caching": False}
    model = SpeculativeModel.from_pretrained(target, draft=draft, **options)  # the same questions, again and again
    head = {"benchmark": "builtin_speed", "target": target, "questions": count, "k": k, "device": str(model.device)}
    publish(head | speed_numbers(model, test_prompts(model, count)), out)


if __name__ == "__main__":
    main()
