"""Rounds of a module that drafts on N tokens against rounds of the same that drafts on all, in one process, in turn.

    python -m benchmarks.bench_draft_round --shape qwen3.5-9b --size 32768 --rows 1,8 --out draft-vocab.jsonl

Acceptance is synthetic, 0.8 a position in both, as in bench_round: what a smaller vocabulary costs in acceptance is
measured on answers, by bench_draft_vocab.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from benchmarks.bench_round import Moments, in_turn, prompts
from benchmarks.document import publish, usage
from benchmarks.engines import sizes_of, wrapped
from benchmarks.given import Listed, ResultFile, wait_for
from benchmarks.shapes import MODULES, Pair, mtp_head, random_pair
from benchmarks.synthetic import DrawnAcceptance, decide
from specdec.requests.sampling import SamplingParams

PROMPT, NEW = 512, 128


@click.command(help=usage(__doc__))
@click.option("--shape", type=click.Choice(sorted(MODULES)), default="qwen3.5-9b", show_default=True)
@click.option("--size", type=click.IntRange(1), default=32_768, show_default=True, help="N")
@click.option("--drafts", type=click.IntRange(1), default=3, show_default=True)
@click.option("--rows", type=Listed(click.IntRange(1)), default="1", show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--hold", type=click.Path(path_type=Path), help="Measure once this file exists; FILE.ready says so.")
@click.option("--out", type=ResultFile(), required=True, help="JSON lines are appended.")
def main(
    shape: str, size: int, drafts: int, rows: list[int], repeats: int, device: str, hold: Path | None, out: Path
) -> None:
    """Measure every batch with both."""
    pair = random_pair(shape, torch.bfloat16, torch.device(device))
    with torch.device(device):
        some = mtp_head(pair.target).eval().requires_grad_(False)
    vocab = pair.target.config.get_text_config().vocab_size
    some.draft_on(torch.arange(0, vocab, vocab // size)[:size])
    with ExitStack() as stack:
        models: dict[str, Any] = {}
        for name, own in (("some", Pair(pair.target, some)), ("all", pair)):
            sizes, graphs = sizes_of(drafts, rows, PROMPT, NEW, None), True if device == "cuda" else "auto"
            model = stack.enter_context(wrapped(own, drafts, cuda_graphs=graphs, **sizes))
            models[name] = model, Moments()
            decide(model, DrawnAcceptance(0.8, vocab, np.random.default_rng(0), model.device))
            model.engine.executor.reads.after_read = models[name][1].note
        if hold is not None:
            wait_for(hold)
        for count in rows:
            ids = prompts(count, (PROMPT, PROMPT), vocab)
            params = [SamplingParams(NEW, ignore_eos=True)] * count
            found, _ = in_turn(models, ids, params, repeats)
            steps = {name: [each["step_ms_median"] for each in own] for name, own in found.items()}
            ratios = np.divide(steps["some"], steps["all"])
            line: dict[str, Any] = {"benchmark": "draft_round", "shape": shape, "draft_vocab": size, "vocab": vocab}
            line |= {"drafts": drafts, "rows": count, "ratios": ratios.tolist(), "ratio": float(np.median(ratios))}
            publish(line | {f"{name}_ms": each for name, each in steps.items()}, out, append=True)


if __name__ == "__main__":
    main()
