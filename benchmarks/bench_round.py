"""Time of a round at a published shape with random weights, through the public engine.

    python -m benchmarks.bench_round --drafts 5 --rows 1,8,32,128 --out benchmarks/results/round.json

Acceptance is synthetic: 0.8 a position, conditional, drawn per row, and so is the token after it. The real acceptance
and resampling kernels run; their result is replaced on the device afterwards (`benchmarks.synthetic`). A step is the
wall time between two completed device-to-host reads of a full batch.

With --long the first row of every batch has a prompt of so many tokens, for the others --prompt holds; it is read
before them, so that all rows decode together. A row of 65,536 keys beside 15 short ones:

    python -m benchmarks.bench_round --rows 16 --long 65536 --repeats 2 --trace "" --out round-long.jsonl

With --sampled the rows have temperature 0.8 and top-p 0.95, but for --greedy-share of them, every other one at 0.5.
Several shares are measured one after the other in one process, a line each; 1 is a greedy batch:

    python -m benchmarks.bench_round --drafts 3 --rows 1,8,32 --sampled --greedy-share 1,0.5,0 --out round.jsonl
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from attention.backends.base import GraphBackend
from attention.batch.host import HostBatch
from attention.batch.metadata import CommonAttentionMetadata
from attention.cache.kv_cache import CacheGroup
from attention.spec import AttentionSpec
from benchmarks.document import provenance
from benchmarks.gaps import replay_gaps
from benchmarks.hold import wait_for
from benchmarks.shapes import SHAPES, Pair, random_pair
from benchmarks.synthetic import SAMPLED, DrawnAcceptance, Tokenizer, decide, sharpen
from benchmarks.trace import traced
from specdec.acceptance.packed import Outcome
from specdec.config import EngineConfig
from specdec.loading.backends import make_backend
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from specdec.target.probing import probe_target

_GAP_ROUNDS, _TRACED_ROUNDS, _LEAST_ROUNDS = 30, 12, 5
_BACKENDS = ("flashinfer", "batch_invariant")


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


@dataclass(frozen=True)
class Kind:
    """Which rows of a batch are sampled: all but greedy_share of them, spread evenly, or none."""

    sampled: bool = False
    greedy_share: float = 0.0

    def params(self, rows: int, new_tokens: int) -> list[SamplingParams]:
        """Of each row."""
        kinds = [SAMPLED if drawn else {} for drawn in self.sampled_rows(rows)]
        return [SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, **kind) for kind in kinds]  # type: ignore[arg-type]

    @property
    def facts(self) -> dict[str, Any]:
        """For a line of results; empty for a greedy batch."""
        return {"sampled": True, "greedy_share": self.greedy_share} if self.sampled else {}

    def sampled_rows(self, rows: int) -> list[bool]:
        """Of each row, whether it is sampled.

        >>> Kind(True, 0.5).sampled_rows(5)
        [True, False, True, False, True]
        """
        greedy = np.floor(np.arange(rows + 1) * self.greedy_share) if self.sampled else np.arange(rows + 1)
        return (np.diff(greedy) == 0).tolist()


class DevicePlanned:
    """A builder that reads the lengths back from the device before it plans, as engines that plan from there must."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._lengths: tuple[torch.Tensor, ...] = ()

    def build(self, metadata: CommonAttentionMetadata) -> Any:
        """Read qo_indptr, page_indptr and last_page_len back, then plan."""
        self._lengths = (metadata.query_start_loc, metadata.page_indptr, metadata.last_page_len)
        self._read_back()
        return self._builder.build(metadata)

    def replan(self, host: HostBatch) -> None:
        """As `build`, for the same device arrays."""
        self._read_back()
        self._builder.replan(host)

    def _read_back(self) -> None:
        for tensor in self._lengths:
            tensor.cpu()


class DevicePlannedBackend:
    """FlashInfer with every plan made from device tensors: the other configuration of the ablation."""

    name = "flashinfer, planned from device tensors"

    def __init__(self, backend: GraphBackend) -> None:
        self.run = backend.run
        self.batch_invariant = backend.batch_invariant
        self.route = backend.route
        self._backend = backend

    def builder(self, group: CacheGroup, key: AttentionSpec, dtype: torch.dtype) -> DevicePlanned:
        """See GraphBackend."""
        return DevicePlanned(self._backend.builder(group, key, dtype))

    def fixed_builder(
        self,
        group: CacheGroup,
        key: AttentionSpec,
        dtype: torch.dtype,
        rows: int,
        query_len: int,
        beside: object = None,
        tokens: int | None = None,
    ) -> DevicePlanned:
        """See GraphBackend; nothing is shared: every plan reads its own lengths back."""
        return DevicePlanned(self._backend.fixed_builder(group, key, dtype, rows, query_len, tokens=tokens))


def engine(pair: Pair, config: EngineConfig, name: str, plan_from: str) -> SpeculativeModel:
    """The public model over a pair."""
    device = pair.target.device
    backend: Any = make_backend(name, device)
    if plan_from == "device":
        backend = DevicePlannedBackend(backend)
    head = pair.head if config.num_speculative_tokens else None
    return SpeculativeModel(probe_target(pair.target), Tokenizer(), head, backend, config, True)


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


def sizes_of(
    drafts: int, batches: list[int], prompt: int, new_tokens: int, long: int | None, page_size: int = 16
) -> EngineConfig:
    """An engine for batches of so many rows: pages for `prompt` and `new_tokens` tokens a row, and for a long one.

    Prompts are read in as few rounds as go, beside rows that decode too: else the first rows of a large batch end
    before the last ones have begun.

    >>> [sizes_of(5, [8, 16], 512, 256, long).num_pages for long in (None, 65_536)]
    [785, 4849]
    """
    short, longest = prompt + new_tokens + 16, max(prompt, long or 0) + new_tokens + 16
    rows = max(batches)
    pages = (rows - 1) * -(-short // page_size) + -(-longest // page_size) + 1
    tokens = max(8192, rows * (drafts + 1))
    return EngineConfig(drafts, longest, rows, tokens, page_size, pages, max_num_prefill_tokens=tokens)


def measure(
    model: SpeculativeModel, read: Moments, ids: list[list[int]], params: list[SamplingParams], repeats: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """Generate `repeats` times; steps and speed of the rounds in which every row decodes, and the last sequences."""
    times: list[float] = []
    runs: list[float] = []
    emitted = 0
    for _ in range(repeats):
        read.found.clear()
        sequences = [c.prompt_token_ids + c.token_ids for c in model.generate(ids, params)]
        full = [i for i in range(1, len(read.found)) if read.found[i][1] == read.found[i - 1][1] == len(ids)]
        own = [read.found[i][0] - read.found[i - 1][0] for i in full[2:]]
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


def floor(pair: Pair, sequences: list[list[int]], drafts: int, new_tokens: int) -> dict[str, Any]:
    """The least time of a round, and the experts that it counts. Of uneven rows the mean counts, since bytes add up."""
    rows = len(sequences)
    context = sum(map(len, sequences)) / rows - new_tokens / 2
    experts = pair.experts(sequences, drafts, new_tokens)
    found: dict[str, Any] = {"floor_ms": pair.floor_ms(rows, drafts, context, experts)}
    if experts[0].layers:
        found["experts_a_layer"] = experts[0].distinct / experts[0].layers
    return found


def kinds_of(sampled: bool, greedy_shares: str) -> list[Kind]:
    """The batches to measure: greedy ones, or one of every share, where all greedy rows are a greedy batch.

    Raises:
        click.BadParameter: a share that is no number from 0 to 1.

    >>> kinds_of(True, "1,0.5")
    [Kind(sampled=False, greedy_share=0.0), Kind(sampled=True, greedy_share=0.5)]
    """
    if not sampled:
        return [Kind()]
    try:
        shares = [float(share) for share in greedy_shares.split(",")]
    except ValueError:
        shares = [-1.0]
    if not all(0 <= share <= 1 for share in shares):
        raise click.BadParameter(f"--greedy-share takes numbers from 0 to 1 with commas between; given {greedy_shares}")
    return [Kind() if share == 1 else Kind(True, share) for share in shares]


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
    """All numbers of a batch that need no trace."""
    drafts, params = model.num_speculative_tokens, kind.params(len(ids), new_tokens)
    model.generate(ids, kind.params(len(ids), min(new_tokens, 48)))  # warm-up
    result, sequences = measure(model, read, ids, params, repeats)
    result |= floor(pair, sequences, drafts, new_tokens)
    result["over_floor"] = result["step_ms_median"] / result["floor_ms"]
    with full_rounds(model, read, ids, params) as go_on:
        result["by_events"] = replay_gaps(lambda: go_on(_GAP_ROUNDS))
    step, least, exposed = result["step_ms_median"], result["floor_ms"], result["by_events"]["exposed_host_share"]
    drawn = f", {kind.greedy_share:.0%} greedy" if kind.sampled else ""
    click.echo(
        f"K={drafts} rows={len(ids)}{drawn}: {step:.2f} ms, floor {least:.2f}, {result['tokens_per_s']:.0f} tokens/s, "
        f"host exposed {exposed:.1%}"
    )
    return result


@click.command(help=__doc__)
@click.option("--shape", type=click.Choice(sorted(SHAPES)), default="llama-3.1-8b", show_default=True)
@click.option("--drafts", type=int, default=5, show_default=True, help="K; 0 is no speculation.")
@click.option("--rows", default="1,8,32,128", show_default=True)
@click.option("--prompt", nargs=2, type=int, default=(512, 512), show_default=True, help="Shortest and longest.")
@click.option("--long", "long_prompt", type=click.IntRange(1), help="Prompt of the first row; default as the others.")
@click.option("--new-tokens", type=int, default=256, show_default=True)
@click.option("--repeats", type=int, default=5, show_default=True)
@click.option("--acceptance", type=float, default=0.8, show_default=True)
@click.option("--sampled", is_flag=True, help="Temperature 0.8, top-p 0.95.")
@click.option("--greedy-share", default="0", show_default=True, help="With --sampled; one or more.")
@click.option(
    "--entropy", type=float, help="Scale lm_head to so many nats; default: the flat logits of random weights."
)
@click.option("--backend", type=click.Choice(_BACKENDS), default="flashinfer", show_default=True)
@click.option("--plan-from", type=click.Choice(["host", "device"]), default="host", show_default=True)
@click.option("--trace", default="1,32", show_default=True, help="Batch sizes that are also traced with CUPTI.")
@click.option("--hold", type=click.Path(path_type=Path), help="Measure once this file exists; FILE.ready says so.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON lines are appended.")
def main(
    shape: str,
    drafts: int,
    rows: str,
    prompt: tuple[int, int],
    long_prompt: int | None,
    new_tokens: int,
    repeats: int,
    acceptance: float,
    sampled: bool,
    greedy_share: str,
    entropy: float | None,
    backend: str,
    plan_from: str,
    trace: str,
    hold: Path | None,
    out: Path,
) -> None:
    """Measure every batch size and append one JSON line each."""
    started = time.perf_counter()
    batches, kinds = [int(r) for r in rows.split(",")], kinds_of(sampled, greedy_share)
    pair = random_pair(shape, torch.bfloat16, torch.device("cuda"))
    if entropy is not None:
        sharpen(pair.target, pair.head, entropy)
    config = sizes_of(drafts, batches, prompt[1], new_tokens, long_prompt)
    vocab, rng = pair.target.config.vocab_size, np.random.default_rng(0)
    read = Moments()
    model = engine(pair, config, backend, plan_from)
    decide(model, DrawnAcceptance(acceptance, vocab, rng, model.device))
    model.executor.reads.after_read = read.note
    start_s = time.perf_counter() - started
    if hold is not None:
        wait_for(hold)
    common = {"benchmark": "round", "shape": shape, "drafts": drafts, "prompt": prompt, "new_tokens": new_tokens}
    common |= {"acceptance": acceptance, "backend": backend, "plan_from": plan_from, "start_s": start_s, **provenance()}
    common |= {} if entropy is None else {"entropy": entropy}
    common |= {} if long_prompt is None else {"long": long_prompt}
    common |= {"graphs": vars(model.executor.report)}  # type: ignore[attr-defined]
    lines: list[dict[str, Any]] = []
    done: list[tuple[int, Kind]] = []
    try:
        for batch, kind in product(batches, kinds):
            ids = prompts(batch, prompt, vocab, long_prompt)
            numbers = measured(model, read, pair, ids, kind, new_tokens, repeats)
            lines.append(common | {"rows": batch} | kind.facts | numbers)
            done.append((batch, kind))
        for line, (batch, kind) in zip(lines, done, strict=True):  # last: CUPTI makes every launch after it slow
            if str(batch) in trace.split(","):
                ids = prompts(batch, prompt, vocab, long_prompt)
                params = kind.params(len(ids), new_tokens)
                with full_rounds(model, read, ids, params) as go_on:
                    line["trace"] = traced(lambda go_on=go_on: go_on(_TRACED_ROUNDS))
    finally:
        with out.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
