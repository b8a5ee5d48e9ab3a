"""A workload of requests at a published shape with random weights, through the public SpeculativeModel.

    python -m benchmarks.bench_serving --out serving.jsonl                                      # greedy, all at once
    python -m benchmarks.bench_serving --sampled-share 1 --rate 8 --out serving.jsonl           # as they arrive
    python -m benchmarks.bench_serving --interference --rows 16 --out serving.jsonl             # prompts beside rows
    python -m benchmarks.bench_serving --shared-prefix 2048 --out serving.jsonl                 # 32 tokens of their own

Requests that are all there at time 0 are one call of `stream`; requests that arrive are submitted to the model's engine
between two rounds. Acceptance is drawn on the device (`benchmarks.synthetic`), after the real kernels. Times are those
at which a caller has the tokens; the time to the first token counts from the moment a request was due.

With --interference rows decode alone, then the same rows while prompts keep arriving: at --rate a second, or, with 0,
each as soon as the one before it has its first token.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import torch

from benchmarks.document import provenance
from benchmarks.given import ResultFile, check_range, refuse_unused, usage
from benchmarks.hold import wait_for
from benchmarks.prefix import shared_prefix
from benchmarks.serving import interference, served, tokens_to_outlast
from benchmarks.shapes import SHAPES, Pair, random_pair
from benchmarks.synthetic import DrawnAcceptance, Tokenizer, decide, engine_of, sharpen
from benchmarks.workload import Load, Timeline, between_updates, longest_silence, until_first_token
from specdec import SpeculativeModel

OF_A_KIND = {
    "serving": ("requests", "prompt", "output", "rate", "sampled_share", "repeats"),
    "interference": ("prompt", "rate", "sampled_share", "rows", "updates", "arriving"),
    "shared_prefix": ("own", "repeats"),
}
"""The options that only some kinds of measurement read; all kinds read the others."""
_READS = {
    "serving": "a workload is measured, which neither --interference nor --shared-prefix makes of it",
    "interference": "--interference measures rows that decode, alone and beside prompts that arrive",
    "shared_prefix": "--shared-prefix measures the first token of one greedy request after the other",
}
_GRAPHS: dict[str, dict[str, bool]] = {"default": {}, "on": {"cuda_graphs": True}, "off": {"cuda_graphs": False}}


def seconds_of(lines: Sequence[Timeline]) -> float:
    """From the first request to the last token."""
    return max(line.moments[-1] for line in lines) - min(line.arrived for line in lines)


def workload(model: SpeculativeModel, load: Load, vocab: int, repeats: int) -> dict[str, Any]:
    """Numbers of `repeats` runs of one workload, after one that does not count."""
    requests = load.arrivals(vocab)
    served(model, requests)
    runs = [served(model, requests) for _ in range(repeats)]
    seconds = [seconds_of(lines) for lines in runs]
    emitted = sum(sum(line.counts) for line in runs[0])
    read = sum(len(request.token_ids) for request in requests)
    pooled = [line for lines in runs for line in lines]
    found: dict[str, Any] = {"seconds_runs": seconds, "output_tokens": emitted, "prompt_tokens": read}
    found["output_tokens_per_s_runs"] = [emitted / each for each in seconds]
    found["output_tokens_per_s"] = float(emitted / np.median(seconds))
    found["total_tokens_per_s"] = float((emitted + read) / np.median(seconds))
    found |= until_first_token(pooled) | between_updates(pooled)
    if not load.rate:
        found["longest_silence_ms"] = max(map(longest_silence, runs)) * 1e3
    return found


def wrapped(pair: Pair, drafts: int, graphs: str, prefix_caching: bool = False, **sizes: int) -> SpeculativeModel:
    """The public model over a pair. sizes: other options of `from_pretrained`."""
    head = pair.head if drafts else None
    options: dict[str, Any] = sizes | _GRAPHS[graphs] | {"enable_prefix_caching": prefix_caching}
    return SpeculativeModel.from_pretrained(
        pair.target, head, num_speculative_tokens=drafts, tokenizer=Tokenizer(), **options
    )


def publish(line: dict[str, Any], out: Path | None) -> None:
    """Print the JSON line, and append it to `out`."""
    text = json.dumps(line)
    click.echo(text)
    if out is not None:
        with out.open("a") as file:
            file.write(text + "\n")


def summary(line: dict[str, Any]) -> str:
    """The numbers that matter, for a reader."""
    if line["benchmark"] == "shared_prefix":
        return (
            f"first token {line['first_token_cached_ms_median']:.1f} ms with {line['cached_tokens']} of "
            f"{line['prefix'] + line['own']} tokens cached, {line['first_token_uncached_ms_median']:.1f} ms without: "
            f"{line['cached_over_uncached']:.3f} x"
        )
    if line["benchmark"] == "interference":
        pairs = [
            f"{unit}: median alone {line['alone'][f'{unit}_ms_median']:.2f} ms, "
            f"p99 beside {line['beside'][f'{unit}_ms_p99']:.2f} ms, ratio {line[f'{unit}_p99_over_alone']:.2f}"
            for unit in ("update", "token")
        ]
        first = f"first token {line['first_token_ms_median']:.0f} ms (p99 {line['first_token_ms_p99']:.0f})"
        return "\n".join([f"{line['rows']} rows, {line['arrived_per_s']:.1f} prompts/s, {first}", *pairs])
    return (
        f"{line['output_tokens_per_s']:,.0f} output tokens/s, {line['total_tokens_per_s']:,.0f} with prompts; "
        f"first token {line['first_token_ms_median']:.0f} ms (p99 {line['first_token_ms_p99']:.0f}); "
        f"update {line['update_ms_median']:.2f} ms (p99 {line['update_ms_p99']:.2f}), "
        f"token {line['token_ms_median']:.2f} ms (p99 {line['token_ms_p99']:.2f})"
    )


def interfered(
    model: SpeculativeModel, load: Load, rows: int, arriving: tuple[int, int], updates: int
) -> dict[str, Any]:
    """Numbers of one run of `interference`, after one that does not count: rows and prompts of the load's kind."""
    vocab = model.hf_model.config.vocab_size
    lasting = tokens_to_outlast(updates, model.num_speculative_tokens)
    steady = replace(load, requests=rows, output=(lasting, lasting), rate=0.0).arrivals(vocab)
    own, new = ((n, n) for n in arriving)
    prompts = replace(load, requests=64, prompt=own, output=new, rate=0.0, seed=load.seed + 1).arrivals(vocab)
    engine = engine_of(model)
    interference(engine, steady, prompts, updates, load.rate, load.seed)
    return interference(engine, steady, prompts, updates, load.rate, load.seed)


@click.command(help=usage(__doc__))
@click.option("--shape", type=click.Choice(sorted(SHAPES)), default="llama-3.1-8b", show_default=True)
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
@click.option("--interference", "interfere", is_flag=True, help="Prompts arrive beside rows that decode.")
@click.option(
    "--rows", type=click.IntRange(1), default=16, show_default=True, help="Of --interference: rows that decode."
)
@click.option(
    "--updates", type=click.IntRange(1), default=300, show_default=True, help="Of --interference: of each row, twice."
)
@click.option("--arriving", nargs=2, type=int, default=(1024, 32), show_default=True, help="Prompt and new tokens.")
@click.option(
    "--shared-prefix", "prefix", type=click.IntRange(0), default=0, help="Tokens with which all prompts begin."
)
@click.option(
    "--own",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Of --shared-prefix: other tokens of each prompt.",
)
@click.option("--device", default="cuda", show_default=True)
@click.option("--hold", type=click.Path(path_type=Path), help="Measure once this file exists; FILE.ready says so.")
@click.option("--out", type=ResultFile(), help="JSON lines are appended.")
@click.pass_context
def main(context: click.Context, **options: Any) -> None:
    """Measure one workload and print one JSON line."""
    o = SimpleNamespace(**options)
    if o.prefix and o.interfere:
        raise click.UsageError("--shared-prefix is measured alone: leave out --interference")
    kind = "shared_prefix" if o.prefix else "interference" if o.interfere else "serving"
    others = dict.fromkeys(name for names in OF_A_KIND.values() for name in names)
    refuse_unused(context, [name for name in others if name not in OF_A_KIND[kind]], _READS[kind])
    check_range("--prompt", o.prompt)
    check_range("--output", o.output)
    if o.interfere and o.rows >= o.at_once:
        raise click.UsageError(f"--rows {o.rows} with --at-once {o.at_once}: no row is left for prompts that arrive")
    place = torch.device(o.device)
    o.graphs = o.graphs or ("on" if place.type == "cuda" else "default")
    pair = random_pair(o.shape, torch.bfloat16 if place.type == "cuda" else torch.float32, place)
    if o.entropy is not None:
        sharpen(pair.target, pair.head, o.entropy)
    load = Load(o.requests, o.prompt, o.output, o.sampled_share, o.rate, o.seed)
    lasting = tokens_to_outlast(o.updates, o.drafts) if o.interfere else o.output[1]
    sizes = {"max_model_len": max(o.prompt[1] + lasting, sum(o.arriving) * o.interfere) + 16, "max_num_seqs": o.at_once}
    if o.prefix:
        sizes = {"max_model_len": o.prefix + o.own + 2 * o.drafts + 32, "max_num_seqs": o.at_once}
    sizes |= {} if o.batched_tokens is None else {"max_num_batched_tokens": o.batched_tokens}
    sizes |= {} if o.prefill_tokens is None else {"max_num_prefill_tokens": o.prefill_tokens}
    started = time.perf_counter()
    model = wrapped(pair, o.drafts, o.graphs, o.prefix > 0, **sizes)
    start_s = time.perf_counter() - started
    if o.hold is not None:
        wait_for(o.hold)
    vocab = pair.target.config.vocab_size
    decide(model, DrawnAcceptance(o.acceptance, vocab, np.random.default_rng(o.seed), place))
    line: dict[str, Any] = {"benchmark": kind, "shape": o.shape, "drafts": o.drafts}
    line |= {"acceptance": o.acceptance, "at_once": o.at_once, "seed": o.seed}
    line |= {} if o.prefix else {"prompt": o.prompt, "rate": o.rate, "sampled_share": o.sampled_share}
    line |= {
        "entropy": o.entropy,
        "cuda_graphs": o.graphs,
        "graphs": model.graphs,  # what became of it
        "batched_tokens": o.batched_tokens,
        "prefill_tokens": o.prefill_tokens,
    }
    line |= {"start_s": start_s, **provenance()}
    if o.prefix:
        line |= shared_prefix(model, o.prefix, o.own, o.repeats, vocab, o.seed)
    elif o.interfere:
        line |= {"rows": o.rows, "arriving": o.arriving} | interfered(model, load, o.rows, o.arriving, o.updates)
    else:
        line |= {"requests": o.requests, "output": o.output, "repeats": o.repeats}
        line |= workload(model, load, vocab, o.repeats)
    publish(line, o.out)
    click.echo(summary(line))


if __name__ == "__main__":
    main()
