"""A workload of requests at a published shape with random weights, through the public SpeculativeModel.

    python -m benchmarks.bench_serving --out serving.jsonl                                      # greedy, all at once
    python -m benchmarks.bench_serving --sampled-share 1 --rate 8 --out serving.jsonl           # as they arrive
    python -m benchmarks.bench_serving --shared-prefix 2048 --prompt 32 32 --output 9 9 --rate 4 --out serving.jsonl

Requests that are all there at time 0 are one call of `stream`; requests that arrive are submitted to the model's engine
between two rounds. Acceptance is drawn on the device (`benchmarks.synthetic`), after the real kernels. Times are those
at which a caller has the tokens; the time to the first token counts from the moment a request was due, and the p99
between two updates at a --rate shows what prompts cost the rows that decode beside them.

With --shared-prefix all prompts begin with the same tokens, before those of --prompt, and the prefix cache is on; the
same with --no-prefix-caching shows what it saves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import torch

from benchmarks.document import publish
from benchmarks.engines import wrapped
from benchmarks.given import ResultFile, check_range, usage, wait_for
from benchmarks.serving import served
from benchmarks.shapes import SHAPES, random_pair
from benchmarks.synthetic import DrawnAcceptance, decide, sharpen
from benchmarks.workload import Load, Timeline, between_updates, until_first_token
from specdec import SpeculativeModel

_GRAPHS: dict[str, dict[str, bool]] = {"default": {}, "on": {"cuda_graphs": True}, "off": {"cuda_graphs": False}}


def seconds_of(lines: Sequence[Timeline]) -> float:
    """From the first request to the last token."""
    return max(line.moments[-1] for line in lines) - min(line.arrived for line in lines)


def workload(model: SpeculativeModel, load: Load, vocab: int, repeats: int) -> dict[str, Any]:
    """Numbers of `repeats` runs of one workload, after one that does not count."""
    first, *runs = (served(model, load.arrivals(vocab, run)) for run in range(repeats + 1))
    seconds = [seconds_of(lines) for lines in runs]
    emitted = sum(sum(line.counts) for line in first)
    read = sum(len(request.token_ids) for request in load.arrivals(vocab))
    pooled = [line for lines in runs for line in lines]
    found: dict[str, Any] = {"seconds_runs": seconds, "output_tokens": emitted, "prompt_tokens": read}
    found["output_tokens_per_s_runs"] = [emitted / each for each in seconds]
    found["output_tokens_per_s"] = float(emitted / np.median(seconds))
    found["total_tokens_per_s"] = float((emitted + read) / np.median(seconds))
    return found | until_first_token(pooled) | between_updates(pooled)


def summary(line: dict[str, Any]) -> str:
    """The numbers that matter, for a reader."""
    return (
        f"{line['output_tokens_per_s']:,.0f} output tokens/s, {line['total_tokens_per_s']:,.0f} with prompts; "
        f"first token {line['first_token_ms_median']:.0f} ms (p99 {line['first_token_ms_p99']:.0f}); "
        f"update {line['update_ms_median']:.2f} ms (p99 {line['update_ms_p99']:.2f}), "
        f"token {line['token_ms_median']:.2f} ms (p99 {line['token_ms_p99']:.2f})"
    )


@click.command(help=usage(__doc__))
@click.option("--shape", type=click.Choice(sorted(SHAPES)), default="llama-3.1-8b", show_default=True)
@click.option("--layers", type=click.IntRange(1), help="Fewer than the shape has.")
@click.option("--drafts", type=click.IntRange(0), default=3, show_default=True, help="K; 0 is no speculation.")
@click.option("--acceptance", type=click.FloatRange(0, 1), default=0.8, show_default=True)
@click.option("--requests", type=click.IntRange(1), default=128, show_default=True)
@click.option("--prompt", nargs=2, type=int, default=(64, 1024), show_default=True, help="Shortest and longest.")
@click.option("--output", nargs=2, type=int, default=(32, 384), show_default=True, help="Fewest and most new tokens.")
@click.option("--at-once", type=click.IntRange(1), default=32, show_default=True, help="Most requests in one batch.")
@click.option(
    "--rate",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="Requests a second, Poisson; 0: all at once.",
)
@click.option("--sampled-share", type=click.FloatRange(0, 1), default=0.0, show_default=True)
@click.option(
    "--entropy", type=float, help="Scale lm_head to so many nats; default: the flat logits of random weights."
)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--graphs",
    type=click.Choice(list(_GRAPHS)),
    help='Required, as the model chooses, or none.  [default: "on", on the CPU "default"]',
)
@click.option("--batched-tokens", type=int, help="Most tokens of one forward; default: the model's own.")
@click.option(
    "--prefill-tokens", type=int, help="Most prompt tokens beside rows that decode; default: the model's own."
)
@click.option("--shared-prefix", type=click.IntRange(0), default=0, help="Tokens with which all prompts begin.")
@click.option("--prefix-caching/--no-prefix-caching", default=None, help="Default: on with --shared-prefix.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--hold", type=click.Path(path_type=Path), help="Measure once this file exists; FILE.ready says so.")
@click.option("--out", type=ResultFile(), help="JSON lines are appended.")
def main(**options: Any) -> None:
    """Measure one workload and print one JSON line."""
    o = SimpleNamespace(**options)
    check_range("--prompt", o.prompt)
    check_range("--output", o.output)
    place = torch.device(o.device)
    o.graphs = o.graphs or ("on" if place.type == "cuda" else "default")
    caching = o.shared_prefix > 0 if o.prefix_caching is None else o.prefix_caching
    pair = random_pair(o.shape, torch.bfloat16 if place.type == "cuda" else torch.float32, place, layers=o.layers)
    if o.entropy is not None:
        sharpen(pair.target, pair.head, o.entropy)
    load = Load(o.requests, o.prompt, o.output, o.sampled_share, o.rate, o.seed, o.shared_prefix)
    sizes = {"max_model_len": o.shared_prefix + o.prompt[1] + o.output[1] + 16, "max_num_seqs": o.at_once}
    sizes |= {} if o.batched_tokens is None else {"max_num_batched_tokens": o.batched_tokens}
    sizes |= {} if o.prefill_tokens is None else {"max_num_prefill_tokens": o.prefill_tokens}
    started = time.perf_counter()
    model = wrapped(pair, o.drafts, enable_prefix_caching=caching, **_GRAPHS[o.graphs], **sizes)
    start_s = time.perf_counter() - started
    if o.hold is not None:
        wait_for(o.hold)
    vocab = pair.target.config.vocab_size
    decide(model, DrawnAcceptance(o.acceptance, vocab, np.random.default_rng(o.seed), place))
    names = ("shape", "layers", "drafts", "acceptance", "at_once", "seed", "prompt", "rate", "sampled_share", "entropy")
    names += ("batched_tokens", "prefill_tokens", "requests", "output", "repeats", "shared_prefix")
    line = {"benchmark": "serving"} | {name: options[name] for name in names}
    line |= {"prefix_caching": caching, "cuda_graphs": o.graphs, "graphs": model.graphs, "start_s": start_s}
    line |= workload(model, load, vocab, o.repeats)
    publish(line, o.out, append=True)
    click.echo(summary(line))


if __name__ == "__main__":
    main()
