"""A workload of requests at a published shape with random weights, through the public SpeculativeModel.

\b
    python -m benchmarks.bench_serving --out serving.jsonl                                      # greedy, all at once
    python -m benchmarks.bench_serving --sampled-share 1 --rate 8 --out serving.jsonl           # as they arrive
    python -m benchmarks.bench_serving --interference --rows 16 --out serving.jsonl             # prompts beside rows
    python -m benchmarks.bench_serving --shared-prefix 2048 --out serving.jsonl                 # 32 tokens of their own
    SPECDEC_COMMIT=11c2809 python -m benchmarks.bench_serving --tree OLD --out serving.jsonl    # another commit
    OTHER_COMMIT=11c2809 python -m benchmarks.bench_serving --against OLD --out serving.jsonl   # both, and their ratio

Requests that are all there at time 0 are one call of `stream`; requests that arrive are submitted to the model's engine
between two rounds. Acceptance is drawn on the device (`benchmarks.synthetic`), after the real kernels. Times are those
at which a caller has the tokens; the time to the first token counts from the moment a request was due.

With --interference rows decode alone, then the same rows while prompts keep arriving: at --rate a second, or, with 0,
each as soon as the one before it has its first token. --trace N adds what CUPTI sees of N rounds, each of which reads
prompts beside the rows that decode: `trace` in the line, as that of bench_round.

With --tree the same script, workload and acceptance run over the packages of another checkout (`git worktree add OLD
11c2809`, or an unpacked `git archive`, whose commit SPECDEC_COMMIT names). It needs that commit's own `benchmarks/`.
With --against that checkout (its commit in OTHER_COMMIT) runs first, in a process of its own and with its own size of
prompt chunks, then this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from benchmarks.document import provenance, usage
from benchmarks.given import ResultFile, check_range, refuse_unused
from benchmarks.hold import wait_for
from benchmarks.mixed import mixed_rounds
from benchmarks.prefix import shared_prefix
from benchmarks.serving import interference, served, tokens_to_outlast
from benchmarks.shapes import SHAPES, Pair, random_pair
from benchmarks.synthetic import DrawnAcceptance, Tokenizer, decide, engine_of, sharpen
from benchmarks.trace import traced
from benchmarks.workload import Arrival, Load, Timeline, between_updates, longest_silence, until_first_token
from specdec import SpeculativeModel

_ROOT = Path(__file__).resolve().parent.parent
OF_A_KIND = {
    "serving": ("requests", "prompt", "output", "rate", "sampled_share", "repeats", "against"),
    "interference": ("prompt", "rate", "sampled_share", "rows", "updates", "arriving", "traced_rounds", "against"),
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
    options: dict[str, Any] = sizes | _GRAPHS[graphs]
    if "enable_prefix_caching" in signature(SpeculativeModel.from_pretrained).parameters:  # not in older checkouts
        options["enable_prefix_caching"] = prefix_caching
    return SpeculativeModel.from_pretrained(
        pair.target, head, num_speculative_tokens=drafts, tokenizer=Tokenizer(), **options
    )


def without(argv: Sequence[str], option: str) -> list[str]:
    """A command line without an option and its value.

    >>> without(["--a", "1", "--tree", "x", "--tree=y"], "--tree")
    ['--a', '1']
    """
    kept = [word for i, word in enumerate(argv) if word != option and (i == 0 or argv[i - 1] != option)]
    return [word for word in kept if not word.startswith(f"{option}=")]


@dataclass(frozen=True)
class Other:
    """How this script runs over the packages of another checkout; what its `benchmarks` lacks is found in this one."""

    command: list[str]
    environment: dict[str, str]


def over(tree: Path, arguments: Sequence[str], name: str) -> Other:
    """This script over `tree`, with these arguments. name: the environment variable that names its commit.

    Raises:
        click.ClickException: it is not known which commit that is.
    """
    commit = os.environ.get(name)
    if (tree / ".git").exists():
        command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not commit:
        raise click.ClickException(f"{tree} is no git checkout: name its commit in {name}")
    path = os.pathsep.join([str(tree.resolve()), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "SPECDEC_COMMIT": commit}
    return Other([sys.executable, "-m", "benchmarks.bench_serving", *arguments], environment)


def line_of(tree: Path, argv: Sequence[str]) -> dict[str, Any]:
    """The line that this script prints over `tree` with the same arguments but those that only this checkout knows."""
    for option in ("--against", "--prefill-tokens", "--trace", "--out"):
        argv = without(argv, option)
    other = over(tree, argv, "OTHER_COMMIT")
    printed = subprocess.run(other.command, env=other.environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    click.echo(printed)
    line: dict[str, Any] = next(json.loads(text) for text in printed.splitlines() if text.startswith("{"))
    return line


def ratios(line: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The other checkout's line, and the throughput and the times of `line` as a share of its."""
    names = ("output_tokens_per_s", "first_token_ms_median", "update_ms_median", "update_ms_p99")
    shares = {f"{name}_over_other": line[name] / other[name] for name in names if name in line}
    for part in ("alone", "beside"):  # of an interference
        own, its = line.get(part, {}), other.get(part, {})
        shares |= {f"{part}_{name}_over_other": own[name] / its[name] for name in names if name in own}
    return {"other": other} | shares


def publish(line: dict[str, Any], out: Path | None) -> None:
    """Print the JSON line, and append it to `out`."""
    text = json.dumps(line)
    click.echo(text)
    if out is not None:
        with out.open("a") as file:
            file.write(text + "\n")


def traced_summary(trace: dict[str, Any]) -> str:
    """What a trace says of synchronisations, copies and idle time, a round."""
    counts = trace["synchronisations"] | trace["copies"]
    listed = ", ".join(f"{count:.2f} {name}" for name, count in counts.items())
    return f"mixed rounds: {trace['span_ms']:.2f} ms, idle {trace['exposed_host_share']:.1%}; {listed}"


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
        pairs += [traced_summary(line["trace"])] if "trace" in line else []
        if "other" in line:
            shares = (f"{line[f'{part}_update_ms_median_over_other']:.3f} x {part}" for part in ("alone", "beside"))
            pairs.append(f"median update over that of {line['other']['commit']}: {', '.join(shares)}")
        return "\n".join([f"{line['rows']} rows, {line['arrived_per_s']:.1f} prompts/s, {first}", *pairs])
    share = line.get("output_tokens_per_s_over_other")
    against = "" if share is None else f"{share:.3f} x the output tokens/s of {line['other']['commit']}; "
    return against + (
        f"{line['output_tokens_per_s']:,.0f} output tokens/s, {line['total_tokens_per_s']:,.0f} with prompts; "
        f"first token {line['first_token_ms_median']:.0f} ms (p99 {line['first_token_ms_p99']:.0f}); "
        f"update {line['update_ms_median']:.2f} ms (p99 {line['update_ms_p99']:.2f}), "
        f"token {line['token_ms_median']:.2f} ms (p99 {line['token_ms_p99']:.2f})"
    )


def interfered(
    model: SpeculativeModel, load: Load, rows: int, arriving: tuple[int, int], updates: int
) -> dict[str, Any]:
    """Numbers of one run of `interference`, after one that does not count: rows and prompts of the load's kind."""
    steady, prompts = beside_each_other(model, load, rows, arriving, updates)
    engine = engine_of(model)
    interference(engine, steady, prompts, updates, load.rate, load.seed)
    return interference(engine, steady, prompts, updates, load.rate, load.seed)


def beside_each_other(
    model: SpeculativeModel, load: Load, rows: int, arriving: tuple[int, int], updates: int
) -> tuple[list[Arrival], list[Arrival]]:
    """Rows that decode for 2·updates and more, and prompts of the load's kind."""
    vocab = model.hf_model.config.vocab_size
    lasting = tokens_to_outlast(updates, model.num_speculative_tokens)
    steady = replace(load, requests=rows, output=(lasting, lasting), rate=0.0).arrivals(vocab)
    own, new = ((n, n) for n in arriving)
    return steady, replace(load, requests=64, prompt=own, output=new, rate=0.0, seed=load.seed + 1).arrivals(vocab)


def trace_of_mixed(
    model: SpeculativeModel, load: Load, rows: int, arriving: tuple[int, int], rounds: int
) -> dict[str, Any]:
    """What CUPTI sees of so many mixed rounds, after as many that are not traced (graphs, kernels)."""
    steady, prompts = beside_each_other(model, load, rows, arriving, rounds)
    engine, found = engine_of(model), {}
    for measure in (lambda run: {"rounds": run()}, traced):
        with mixed_rounds(engine, steady, prompts[:1], rounds) as go_on:
            found = measure(go_on)
    return found


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
    "--trace", "traced_rounds", type=click.IntRange(0), default=0, help="Of --interference: mixed rounds to trace."
)
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
@click.option("--tree", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Another checkout's code.")
@click.option(
    "--against",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Another checkout's code first, then this one's, and the ratio.",
)
@click.option("--hold", type=click.Path(path_type=Path), help="Measure once this file exists; FILE.ready says so.")
@click.option("--out", type=ResultFile(), help="JSON lines are appended.")
@click.pass_context
def main(
    context: click.Context,
    shape: str,
    drafts: int,
    acceptance: float,
    requests: int,
    prompt: tuple[int, int],
    output: tuple[int, int],
    at_once: int,
    rate: float,
    sampled_share: float,
    entropy: float | None,
    repeats: int,
    seed: int,
    graphs: str | None,
    batched_tokens: int | None,
    prefill_tokens: int | None,
    interfere: bool,
    rows: int,
    updates: int,
    arriving: tuple[int, int],
    traced_rounds: int,
    prefix: int,
    own: int,
    device: str,
    tree: Path | None,
    against: Path | None,
    hold: Path | None,
    out: Path | None,
) -> None:
    """Measure one workload and print one JSON line."""
    if prefix and (interfere or tree is not None):
        raise click.UsageError("--shared-prefix is measured alone: leave out --interference and --tree")
    if tree is not None and against is not None:
        raise click.UsageError("--tree measures another checkout alone, --against both: give one of them")
    kind = "shared_prefix" if prefix else "interference" if interfere else "serving"
    others = dict.fromkeys(name for names in OF_A_KIND.values() for name in names)
    refuse_unused(context, [name for name in others if name not in OF_A_KIND[kind]], _READS[kind])
    check_range("--prompt", prompt)
    check_range("--output", output)
    if interfere and rows >= at_once:
        raise click.UsageError(f"--rows {rows} with --at-once {at_once}: no row is left for prompts that arrive")
    if tree is not None:
        other = over(tree, without(sys.argv[1:], "--tree"), "SPECDEC_COMMIT")
        os.execve(sys.executable, other.command, other.environment)
    before = None if against is None else line_of(against, sys.argv[1:])
    place = torch.device(device)
    graphs = graphs or ("on" if place.type == "cuda" else "default")
    pair = random_pair(shape, torch.bfloat16 if place.type == "cuda" else torch.float32, place)
    if entropy is not None:
        sharpen(pair.target, pair.head, entropy)
    load = Load(requests, prompt, output, sampled_share, rate, seed)
    lasting = tokens_to_outlast(updates, drafts) if interfere else output[1]
    sizes = {"max_model_len": max(prompt[1] + lasting, sum(arriving) * interfere) + 16, "max_num_seqs": at_once}
    if prefix:
        sizes = {"max_model_len": prefix + own + 2 * drafts + 32, "max_num_seqs": at_once}
    sizes |= {} if batched_tokens is None else {"max_num_batched_tokens": batched_tokens}
    sizes |= {} if prefill_tokens is None else {"max_num_prefill_tokens": prefill_tokens}
    started = time.perf_counter()
    model = wrapped(pair, drafts, graphs, prefix > 0, **sizes)
    start_s = time.perf_counter() - started
    if hold is not None:
        wait_for(hold)
    vocab = pair.target.config.vocab_size
    decide(model, DrawnAcceptance(acceptance, vocab, np.random.default_rng(seed), place))
    line: dict[str, Any] = {"benchmark": kind, "shape": shape, "drafts": drafts}
    line |= {"acceptance": acceptance, "at_once": at_once, "seed": seed}
    line |= {} if prefix else {"prompt": prompt, "rate": rate, "sampled_share": sampled_share}
    line |= {
        "entropy": entropy,
        "cuda_graphs": graphs,
        "graphs": getattr(model, "graphs", None),  # what became of it; not in older checkouts
        "batched_tokens": batched_tokens,
        "prefill_tokens": prefill_tokens,
    }
    line |= {"start_s": start_s, **provenance()}
    if prefix:
        line |= shared_prefix(model, prefix, own, repeats, vocab, seed)
    elif interfere:
        line |= {"rows": rows, "arriving": arriving} | interfered(model, load, rows, arriving, updates)
        if traced_rounds:  # last: once CUPTI has been on, a process launches every graph slowly
            line["trace"] = trace_of_mixed(model, load, rows, arriving, traced_rounds)
    else:
        line |= {"requests": requests, "output": output, "repeats": repeats} | workload(model, load, vocab, repeats)
    line |= {} if before is None else ratios(line, before)
    publish(line, out)
    click.echo(summary(line))


if __name__ == "__main__":
    main()
