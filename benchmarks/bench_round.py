"""Time of a round at a published shape with random weights, through the public engine.

    python -m benchmarks.bench_round --drafts 5 --rows 1,8,32,128 --out benchmarks/results/round.json
    python -m benchmarks.bench_round --shape qwen3.5-9b --drafts 0,1,3 --rows 1,8,32 --out round-hybrid.jsonl

Acceptance is synthetic: 0.8 a position, conditional, drawn per row, and so is the token after it. The real acceptance
and resampling kernels run; their result is replaced on the device afterwards (`benchmarks.synthetic`). A step is the
wall time between two completed device-to-host reads of a full batch.

With --long the first row of every batch has a prompt of so many tokens, for the others --prompt holds; it is read
before them, so that all rows decode together. A row of 65,536 keys beside 15 short ones:

    python -m benchmarks.bench_round --rows 16 --long 65536 --repeats 2 --trace "" --out round-long.jsonl

With --sampled the rows have temperature 0.8 and top-p 0.95, but for --greedy-share of them, every other one at 0.5.
Several shares are measured one after the other in one process, a line each; 1 is a greedy batch:

    python -m benchmarks.bench_round --drafts 3 --rows 1,8,32 --sampled --greedy-share 1,0.5,0 --out round.jsonl

With --asks all rows have options or want log-probabilities, measured one after the other in one process:

    python -m benchmarks.bench_round --drafts 3 --rows 32 --asks nothing,penalties,logprobs --out round.jsonl

With --weights fp8 the target's linear layers have weights in fine-grained FP8 (blocks of 128 x 128):

    python -m benchmarks.bench_round --drafts 0,5 --rows 1,8,32 --weights fp8 --out round-fp8.jsonl
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import torch

from benchmarks.document import provenance, usage
from benchmarks.engines import sizes_of, wrapped
from benchmarks.gaps import replay_gaps
from benchmarks.given import Listed, ResultFile, check_range, wait_for
from benchmarks.kinds import ASKS, Kind, kinds_of
from benchmarks.shapes import SHAPES, Pair, random_pair
from benchmarks.synthetic import DrawnAcceptance, decide, sharpen
from benchmarks.trace import traced
from specdec.acceptance.packed import Outcome
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams

_GAP_ROUNDS, _TRACED_ROUNDS, _LEAST_ROUNDS = 30, 12, 5
_BACKENDS = {"cuda": ("flashinfer", "batch_invariant", "torch"), "cpu": ("torch",)}
"""By device; the first is the default."""
_TRACED = {"cuda": (1, 32), "cpu": ()}
"""Batch sizes that are traced by default, where they are measured."""


@dataclass
class Moments:
    """The moment of every read; for `HostReads.after_read`.

    Attributes:
        found: (seconds, rows, tokens) of every read.
    """

    found: list[tuple[float, int, int]] = field(default_factory=list)

    def note(self, outcome: Outcome, num_drafts: np.ndarray) -> Outcome:
        """The result as it is. num_drafts: [J]. The device waits for this: nothing slow here."""
        now, rows = time.perf_counter(), len(num_drafts)
        self.found.append((now, rows, int(outcome.num_accepted.sum()) + rows))
        return outcome


def prompts(rows: int, lengths: tuple[int, int], vocab: int, long: int | None = None) -> list[list[int]]:
    """Random prompts with lengths from `lengths[0]` to `lengths[1]`; the first has `long` tokens where that is given.

    >>> [len(ids) for ids in prompts(3, (4, 4), 9, 20)]
    [20, 4, 4]
    """
    rng = np.random.default_rng(1)
    sizes = rng.integers(lengths[0], lengths[1] + 1, rows)
    if long is not None:
        sizes[0] = long
    return [rng.integers(0, vocab, n).tolist() for n in sizes]


def measure(
    model: SpeculativeModel, read: Moments, ids: list[list[int]], params: list[SamplingParams], repeats: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """Generate `repeats` times; steps and speed of the rounds in which every row decodes, and the last sequences.

    Raises:
        ValueError: their new tokens leave no such round.
    """
    times: list[float] = []
    runs: list[float] = []
    emitted = 0
    for _ in range(repeats):
        read.found.clear()
        sequences = [c.prompt_token_ids + c.token_ids for c in model.generate(ids, params)]
        full = [i for i in range(1, len(read.found)) if read.found[i][1] == read.found[i - 1][1] == len(ids)]
        own = [read.found[i][0] - read.found[i - 1][0] for i in full[2:]]
        if not own:
            raise ValueError(
                f"{params[0].max_new_tokens} new tokens leave no round of {len(ids)} decoding rows; give more"
            )
        times += own
        runs.append(float(np.median(own) * 1e3))
        emitted += sum(read.found[i][2] for i in full[2:])
    steps = np.array(times)
    result = {
        "repeats": repeats,
        "rounds": len(steps),
        "tokens_a_round": emitted / len(steps),
        "step_ms_runs": runs,
        "step_ms_median": float(np.median(steps) * 1e3),
        "step_ms_mean": float(steps.mean() * 1e3),
        "step_ms_p90": float(np.quantile(steps, 0.9) * 1e3),
        "tokens_per_s": float(emitted / steps.sum()),
    }
    return result, sequences


def floor(
    pair: Pair, sequences: list[list[int]], drafts: int, new_tokens: int, accepted: float = 0.0
) -> dict[str, Any]:
    """The least time of a round, and the experts that it counts. Of uneven rows the mean counts, since bytes add up.

    accepted: drafts of a row and round that were accepted, on average.
    """
    rows = len(sequences)
    context = sum(map(len, sequences)) / rows - new_tokens / 2
    experts = pair.experts(sequences, drafts, new_tokens)
    found: dict[str, Any] = {"floor_ms": pair.floor_ms(rows, drafts, context, experts, accepted)}
    if experts[0].layers:
        found["experts_a_layer"] = experts[0].distinct / experts[0].layers
    return found


@contextmanager
def full_rounds(
    model: SpeculativeModel, read: Moments, ids: list[list[int]], params: list[SamplingParams]
) -> Iterator[Callable[[int], int]]:
    """What makes at most as many rounds as it is told, in each of which every row decodes, and returns their number.

    It stops early where a row could come to its last token.

    Raises:
        ValueError: their new tokens leave too few such rounds.
    """
    read.found.clear()
    updates, new_tokens = model.stream(ids, params), params[0].max_new_tokens
    emitted = np.zeros(len(ids), np.int64)
    last = new_tokens - 3 * (model.config.num_speculative_tokens + 1)

    def advance() -> None:
        update = next(updates)
        emitted[update.index] += len(update.token_ids)

    def go_on(rounds: int) -> int:
        start = len(read.found)
        while len(read.found) < start + rounds and emitted.max() <= last:
            advance()
        made = len(read.found) - start
        if made < _LEAST_ROUNDS:
            raise ValueError(f"{new_tokens} new tokens leave {made} rounds of {len(ids)} decoding rows; give more")
        return made

    while sum(rows == len(ids) for _, rows, _ in read.found) < 4:
        advance()
    try:
        yield go_on
    finally:
        updates.close()  # type: ignore[attr-defined]


def measured(
    model: SpeculativeModel,
    read: Moments,
    pair: Pair,
    ids: list[list[int]],
    kind: Kind,
    new_tokens: int,
    repeats: int,
) -> dict[str, Any]:
    """All numbers of a batch that need no trace; the host's share of a round only where rounds run from graphs."""
    drafts, params = model.num_speculative_tokens, kind.params(len(ids), new_tokens)
    model.generate(ids, kind.params(len(ids), min(new_tokens, 48)))  # warm-up
    result, sequences = measure(model, read, ids, params, repeats)
    result |= floor(pair, sequences, drafts, new_tokens, result["tokens_a_round"] / len(ids) - 1)
    result["over_floor"] = result["step_ms_median"] / result["floor_ms"]
    drawn = f", {kind.greedy_share:.0%} greedy" if kind.sampled else ""
    step, least, host = result["step_ms_median"], result["floor_ms"], f"graphs {model.graphs}"
    if model.graphs == "on":
        with full_rounds(model, read, ids, params) as go_on:
            result["by_events"] = replay_gaps(lambda: go_on(_GAP_ROUNDS))
        host = f"host exposed {result['by_events']['exposed_host_share']:.1%}"
    click.echo(
        f"K={drafts} rows={len(ids)}{drawn}: {step:.2f} ms, floor {least:.2f}, {result['tokens_per_s']:.0f} tokens/s, "
        f"{host}"
    )
    return result


def graphs_of(pair: Pair, backend: str) -> Any:
    """CUDA graphs are required where the backend has them, since a step without them is another measurement; but of a
    target with recurrent layers: where these have no kernels that a graph can hold, a warning says so and rounds run
    without (`SpeculativeModel.graphs`)."""
    return True if backend != "torch" and not pair.state_bytes(0, 0.0) else "auto"


@dataclass(frozen=True)
class Run:
    """What the engines of one run share, whatever their K.

    Attributes:
        kinds: each batch is measured with all of them. facts: what all lines have in common. options: of the command.
    """

    pair: Pair
    kinds: list[Kind]
    facts: dict[str, Any]
    options: SimpleNamespace

    @contextmanager
    def engine(self, drafts: int) -> Iterator[tuple[SpeculativeModel, Moments]]:
        """An engine with K=`drafts` whose verification results are drawn, and the moments of its reads."""
        vocab, read = self.pair.target.config.vocab_size, Moments()
        o = self.options
        sizes = sizes_of(drafts, o.rows, o.prompt[1], o.new_tokens, o.long_prompt)
        graphs = graphs_of(self.pair, o.backend)
        with wrapped(self.pair, drafts, backend=o.backend, cuda_graphs=graphs, **sizes) as model:
            decide(model, DrawnAcceptance(o.acceptance, vocab, np.random.default_rng(0), model.device))
            model.engine.executor.reads.after_read = read.note
            yield model, read

    def prompts(self, rows: int) -> list[list[int]]:
        """Of a batch of so many rows."""
        return prompts(rows, self.options.prompt, self.pair.target.config.vocab_size, self.options.long_prompt)

    def measure(self, model: SpeculativeModel, read: Moments, start_s: float) -> Iterator[dict[str, Any]]:
        """One line for every batch and kind."""
        graphs = vars(model.engine.executor.report) if model.graphs == "on" else model.graphs  # type: ignore[attr-defined]
        facts = self.facts | {"drafts": model.num_speculative_tokens, "graphs": graphs, "start_s": start_s}
        for rows, kind in product(self.options.rows, self.kinds):
            ids = self.prompts(rows)
            found = measured(model, read, self.pair, ids, kind, self.options.new_tokens, self.options.repeats)
            yield facts | {"rows": rows} | kind.facts | found

    def trace(self, model: SpeculativeModel, read: Moments, lines: list[dict[str, Any]]) -> None:
        """Add a trace to those of the lines that are the model's, and are to be traced."""
        for line in lines:
            if line["drafts"] == model.num_speculative_tokens and line["rows"] in self.options.trace:
                ids = self.prompts(line["rows"])
                with full_rounds(model, read, ids, Kind.of(line).params(len(ids), self.options.new_tokens)) as go_on:
                    line["trace"] = traced(lambda go_on=go_on: go_on(_TRACED_ROUNDS))

    def measure_all(self, drafts: list[int], lines: list[dict[str, Any]], hold: Path | None, started: float) -> None:
        """Append a line for every K and batch.

        Traces come last, with new engines but for the last K: once CUPTI has been on, a process launches every graph
        slowly.

        Args:
            hold: see `wait_for`; started: `time.perf_counter` when the first engine's start began.
        """
        for k in drafts:
            with self.engine(k) as (model, read):
                start_s = time.perf_counter() - started
                if hold is not None and not lines:
                    wait_for(hold)
                for line in self.measure(model, read, start_s):
                    lines.append(line)
                if k == drafts[-1]:
                    self.trace(model, read, lines)
            started = time.perf_counter()
        for k in drafts[:-1] if self.options.trace else ():
            with self.engine(k) as (model, read):
                self.trace(model, read, lines)


def in_turn(
    models: dict[str, tuple[SpeculativeModel, Moments]],
    ids: list[list[int]],
    params: list[SamplingParams],
    repeats: int,
) -> tuple[dict[str, list[dict[str, Any]]], list[list[int]]]:
    """What `measure` finds with each model, turn by turn, after a turn that does not count; and the last sequences."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in models}
    for turn in range(repeats + 1):
        for name, (model, read) in models.items():
            result, sequences = measure(model, read, ids, params, 1)
            if turn:
                found[name].append(result)
    return found, sequences


@click.command(help=usage(__doc__))
@click.option("--shape", type=click.Choice(sorted(SHAPES)), default="llama-3.1-8b", show_default=True)
@click.option("--layers", type=click.IntRange(1), help="Fewer than the shape has.")
@click.option(
    "--drafts",
    type=Listed(click.IntRange(0)),
    default="5",
    show_default=True,
    help="K, one or several: 0,1,3; 0 is no speculation.",
)
@click.option("--rows", type=Listed(click.IntRange(1)), default="1,8,32,128", show_default=True)
@click.option("--prompt", nargs=2, type=int, default=(512, 512), show_default=True, help="Shortest and longest.")
@click.option("--long", "long_prompt", type=click.IntRange(1), help="Prompt of the first row; default as the others.")
@click.option("--new-tokens", type=click.IntRange(1), default=256, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--acceptance", type=click.FloatRange(0, 1), default=0.8, show_default=True)
@click.option("--sampled", is_flag=True, help="Temperature 0.8, top-p 0.95.")
@click.option("--greedy-share", type=Listed(click.FloatRange(0, 1)), help="With --sampled; one or more.  [default: 0]")
@click.option(
    "--asks",
    type=Listed(click.Choice(list(ASKS))),
    default="nothing",
    show_default=True,
    help=f"One or more, beside tokens: {', '.join(ASKS)}.",
)
@click.option(
    "--entropy", type=float, help="Scale lm_head to so many nats; default: the flat logits of random weights."
)
@click.option("--device", type=click.Choice(list(_BACKENDS)), default="cuda", show_default=True)
@click.option(
    "--weights",
    type=click.Choice(["model", "fp8", "mxfp4"]),
    default="model",
    show_default=True,
    help="The target: bfloat16; linear layers and experts in fine-grained FP8; gpt-oss's experts in MXFP4.",
)
@click.option("--backend", type=click.Choice(_BACKENDS["cuda"]), help="Default: flashinfer, on the CPU torch.")
@click.option(
    "--trace",
    type=Listed(click.IntRange(1)),
    help="Batch sizes, of --rows, that are also traced with CUPTI.  [default: 1,32, on the CPU none]",
)
@click.option("--hold", type=click.Path(path_type=Path), help="Measure once this file exists; FILE.ready says so.")
@click.option("--out", type=ResultFile(), required=True, help="JSON lines are appended.")
def main(**options: Any) -> None:
    """Measure every K and batch size and append one JSON line each."""
    o = SimpleNamespace(**options)
    started, kinds = time.perf_counter(), kinds_of(o.sampled, o.greedy_share or [0.0], o.asks)
    o.backend = o.backend or _BACKENDS[o.device][0]
    if o.backend not in _BACKENDS[o.device]:
        raise click.UsageError(f"--backend {o.backend} needs a GPU; on the CPU: {', '.join(_BACKENDS[o.device])}")
    if o.trace and o.device == "cpu":
        raise click.UsageError(f"--trace {_written(o.trace)} needs a GPU (CUPTI); on the CPU leave it out")
    if o.trace and not set(o.trace) <= set(o.rows):
        raise click.UsageError(f"--trace {_written(o.trace)}: only batches of --rows {_written(o.rows)} can be traced")
    if o.greedy_share and not o.sampled:
        raise click.UsageError("--greedy-share would do nothing: without --sampled all rows are greedy")
    check_range("--prompt", o.prompt)
    pair = random_pair(o.shape, torch.bfloat16, torch.device(o.device), o.weights, o.layers)
    if o.long_prompt is not None:
        config = pair.target.config.get_text_config()
        config.max_position_embeddings = max(config.max_position_embeddings, o.long_prompt + o.new_tokens + 16)
    if o.entropy is not None:
        sharpen(pair.target, pair.head, o.entropy)
    facts = {"benchmark": "round", "shape": o.shape, "prompt": o.prompt, "new_tokens": o.new_tokens}
    facts |= {"acceptance": o.acceptance, "backend": o.backend, **provenance()}
    facts |= {} if o.weights == "model" else {"weights": o.weights}
    facts |= {} if o.layers is None else {"layers": o.layers}
    facts |= {} if o.entropy is None else {"entropy": o.entropy}
    facts |= {} if o.long_prompt is None else {"long": o.long_prompt}
    o.trace = list(_TRACED[o.device]) if o.trace is None else o.trace
    run = Run(pair, kinds, facts, o)
    lines: list[dict[str, Any]] = []
    try:
        run.measure_all(list(dict.fromkeys(o.drafts)), lines, o.hold, started)
    finally:
        with o.out.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def _written(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


if __name__ == "__main__":
    main()
