"""Time of a round at a published shape with random weights, through the public engine.

    python -m benchmarks.bench_round --drafts 5 --rows 1,8,32,128 --out benchmarks/results/round.json

Acceptance is synthetic: 0.8 a position, conditional, drawn per row, and so is the token after it. The real argmax and
acceptance kernels run; what the host has read is replaced afterwards. A step is the wall time between two completed
device-to-host reads of a full batch.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from benchmarks.shapes import SHAPES, Pair, random_pair
from benchmarks.trace import traced
from specdec.acceptance.packed import Outcome, PackedResult
from specdec.config import EngineConfig
from specdec.loading.backends import make_backend
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from specdec.target.target import probe_target

_GAP_ROUNDS, _TRACED_ROUNDS, _LEAST_ROUNDS = 30, 12, 5
_STRATA = 32
_BACKENDS = ("flashinfer", "batch_invariant")


def geometric(rate: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """[count] int64: how many drafts in a row are accepted when each is with probability `rate` given the one before.

    Every 32 values in a row hold one from each 32nd of the distribution, in any order: means of 300 rounds of one row
    scatter by 0.6 %, those of independent draws by 3 %.
    """
    if rate in (0, 1):
        return np.full(count, count if rate else 0)
    strata = rng.permuted(np.tile(np.arange(_STRATA), (-(-count // _STRATA), 1)), axis=1).reshape(-1)[:count]
    share = (strata + rng.random(count)) / _STRATA
    return np.floor(np.log1p(-share) / np.log(rate)).astype(np.int64)


@dataclass
class SyntheticAcceptance:
    """Notes the moment of every read, and accepts each draft with probability `rate` given the one before.

    The token after the accepted ones is drawn from the vocabulary: random weights left to themselves soon repeat one
    token, and a mixture's routers would send all of them to the same few experts. A model without drafts launches the
    next round before this one is read, so its tokens are drawn on the device: see `draw_on_device`.

    Attributes:
        moments: (seconds, rows, tokens) of every read.
    """

    rate: float
    vocab: int
    rng: np.random.Generator
    moments: list[tuple[float, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Draw drafts accepted in a row, and tokens, beforehand; when they are used up they start over."""
        self.drawn = geometric(self.rate, 1 << 16, self.rng)
        self.bonus = self.rng.integers(0, self.vocab, len(self.drawn))
        self._used = 0

    def decide(self, model: SpeculativeModel) -> None:
        """From now on the model's verification results are these; no request may run."""
        if model.num_speculative_tokens:
            model.executor.reads.after_read = self.accept
        else:
            draw_on_device(model, self.vocab, self.rng)
            model.executor.reads.after_read = self.note

    def note(self, real: Outcome, num_drafts: np.ndarray) -> Outcome:
        """The result as it is."""
        self.moments.append((time.perf_counter(), len(num_drafts), len(num_drafts)))
        return real

    def accept(self, real: Outcome, num_drafts: np.ndarray) -> Outcome:
        """The result with drawn acceptance. num_drafts: [J]. The device waits for this: nothing slow here."""
        now, rows = time.perf_counter(), len(num_drafts)
        start = self._used if self._used + rows <= len(self.drawn) else 0
        self._used = start + rows
        accepted = np.minimum(self.drawn[start : start + rows], num_drafts)
        tokens = np.concatenate([real.drafts, real.tokens[:, :1]], 1)
        tokens[np.arange(rows), accepted] = self.bonus[start : start + rows]
        self.moments.append((now, rows, int(accepted.sum()) + rows))
        return Outcome(accepted, tokens, real.drafts)


def draw_on_device(model: SpeculativeModel, vocab: int, rng: np.random.Generator) -> None:
    """Replace the token that a round without drafts decides by a drawn one before anybody reads it."""
    pool = torch.from_numpy(rng.integers(0, vocab, (512, 256))).to(model.device)
    rounds = itertools.count()

    def drawn(result: PackedResult) -> None:
        result.first_token.copy_(pool[next(rounds) % len(pool), : result.num_rows])

    model.executor.reads.before_read = drawn


class Tokenizer:
    """Decodes to nothing: text is not part of the measurement."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Any ids -> an empty string."""
        return ""


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
    ) -> DevicePlanned:
        """See GraphBackend; nothing is shared: every plan reads its own lengths back."""
        return DevicePlanned(self._backend.fixed_builder(group, key, dtype, rows, query_len))


def engine(pair: Pair, config: EngineConfig, name: str, plan_from: str) -> SpeculativeModel:
    """The public model over a pair."""
    device = pair.target.device
    backend: Any = make_backend(name, device)
    if plan_from == "device":
        backend = DevicePlannedBackend(backend)
    head = pair.head if config.num_speculative_tokens else None
    return SpeculativeModel(probe_target(pair.target), Tokenizer(), head, backend, config, True)


def prompts(rows: int, lengths: tuple[int, int], vocab: int) -> list[list[int]]:
    """Random prompts with lengths from `lengths[0]` to `lengths[1]`."""
    rng = np.random.default_rng(1)
    return [rng.integers(0, vocab, n).tolist() for n in rng.integers(lengths[0], lengths[1] + 1, rows)]


def measure(
    model: SpeculativeModel, read: SyntheticAcceptance, ids: list[list[int]], new_tokens: int, repeats: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """Generate `repeats` times; steps and speed of the rounds in which every row decodes, and the last sequences."""
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    times: list[float] = []
    runs: list[float] = []
    emitted = 0
    for _ in range(repeats):
        read.moments.clear()
        sequences = [c.prompt_token_ids + c.token_ids for c in model.generate(ids, params)]
        full = [i for i in range(1, len(read.moments)) if read.moments[i][1] == read.moments[i - 1][1] == len(ids)]
        own = [read.moments[i][0] - read.moments[i - 1][0] for i in full[2:]]
        times += own
        runs.append(float(np.median(own) * 1e3))
        emitted += sum(read.moments[i][2] for i in full[2:])
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
    """The least time of a round, and the experts that it counts."""
    rows = len(sequences)
    context = sum(map(len, sequences)) // rows - new_tokens // 2
    experts = pair.experts(sequences, drafts, new_tokens)
    found: dict[str, Any] = {"floor_ms": pair.floor_ms(rows, drafts, context, experts)}
    if experts[0].layers:
        found["experts_a_layer"] = experts[0].distinct / experts[0].layers
    return found


@contextmanager
def full_rounds(
    model: SpeculativeModel, read: SyntheticAcceptance, ids: list[list[int]], new_tokens: int
) -> Iterator[Callable[[int], int]]:
    """What makes at most as many rounds as it is told, in each of which every row decodes, and returns their number.

    It stops early where a row could come to its last token.

    Raises:
        ValueError: `new_tokens` leaves too few such rounds.
    """
    read.moments.clear()
    updates = model.stream(ids, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True))
    emitted = np.zeros(len(ids), np.int64)
    last = new_tokens - 3 * (model.config.num_speculative_tokens + 1)

    def advance() -> None:
        update = next(updates)
        emitted[update.index] += len(update.token_ids)

    def go_on(rounds: int) -> int:
        start = len(read.moments)
        while len(read.moments) < start + rounds and emitted.max() <= last:
            advance()
        made = len(read.moments) - start
        if made < _LEAST_ROUNDS:
            raise ValueError(f"{new_tokens} new tokens leave {made} rounds of {len(ids)} decoding rows; give more")
        return made

    while sum(rows == len(ids) for _, rows, _ in read.moments) < 4:
        advance()
    try:
        yield go_on
    finally:
        updates.close()  # type: ignore[attr-defined]


def measured(
    model: SpeculativeModel,
    read: SyntheticAcceptance,
    pair: Pair,
    ids: list[list[int]],
    config: EngineConfig,
    new_tokens: int,
    repeats: int,
) -> dict[str, Any]:
    """All numbers of a batch that need no trace."""
    drafts = config.num_speculative_tokens
    model.generate(ids, SamplingParams(max_new_tokens=min(new_tokens, 48), ignore_eos=True))  # warm-up
    result, sequences = measure(model, read, ids, new_tokens, repeats)
    result |= floor(pair, sequences, drafts, new_tokens)
    result["over_floor"] = result["step_ms_median"] / result["floor_ms"]
    with full_rounds(model, read, ids, new_tokens) as go_on:
        result["by_events"] = replay_gaps(lambda: go_on(_GAP_ROUNDS))
    step, least, exposed = result["step_ms_median"], result["floor_ms"], result["by_events"]["exposed_host_share"]
    click.echo(
        f"K={drafts} rows={len(ids)}: {step:.2f} ms, floor {least:.2f}, {result['tokens_per_s']:.0f} tokens/s, "
        f"host exposed {exposed:.1%}"
    )
    return result


def wait_for(file: Path) -> None:
    """Several processes can build their graphs at once and measure one after the other."""
    file.with_name(f"{file.name}.ready").touch()
    while not file.exists():
        time.sleep(0.1)


@click.command(help=__doc__)
@click.option("--shape", type=click.Choice(sorted(SHAPES)), default="llama-3.1-8b", show_default=True)
@click.option("--drafts", type=int, default=5, show_default=True, help="K; 0 is no speculation.")
@click.option("--rows", default="1,8,32,128", show_default=True)
@click.option("--prompt", nargs=2, type=int, default=(512, 512), show_default=True, help="Shortest and longest.")
@click.option("--new-tokens", type=int, default=256, show_default=True)
@click.option("--repeats", type=int, default=5, show_default=True)
@click.option("--acceptance", type=float, default=0.8, show_default=True)
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
    new_tokens: int,
    repeats: int,
    acceptance: float,
    backend: str,
    plan_from: str,
    trace: str,
    hold: Path | None,
    out: Path,
) -> None:
    """Measure every batch size and append one JSON line each."""
    started = time.perf_counter()
    batches = [int(r) for r in rows.split(",")]
    pair = random_pair(shape, torch.bfloat16, torch.device("cuda"))
    length = prompt[1] + new_tokens + 16
    pages = max(batches) * -(-length // 16) + 1
    tokens = max(8192, max(batches) * (drafts + 1))
    config = EngineConfig(drafts, length, max(batches), tokens, 16, pages)
    vocab, rng = pair.target.config.vocab_size, np.random.default_rng(0)
    read = SyntheticAcceptance(acceptance, vocab, rng)
    model = engine(pair, config, backend, plan_from)
    read.decide(model)
    start_s = time.perf_counter() - started
    if hold is not None:
        wait_for(hold)
    common = {"benchmark": "round", "shape": shape, "drafts": drafts, "prompt": prompt, "new_tokens": new_tokens}
    common |= {"acceptance": acceptance, "backend": backend, "plan_from": plan_from, "start_s": start_s, **provenance()}
    common |= {"graphs": vars(model.executor.report)}  # type: ignore[attr-defined]
    lines: list[dict[str, Any]] = []
    try:
        for batch in batches:
            ids = prompts(batch, prompt, vocab)
            lines.append(common | {"rows": batch} | measured(model, read, pair, ids, config, new_tokens, repeats))
        for line in lines:  # last: once CUPTI has been on, a process launches every graph slowly
            if str(line["rows"]) in trace.split(","):
                with full_rounds(model, read, prompts(line["rows"], prompt, vocab), new_tokens) as go_on:
                    line["trace"] = traced(lambda go_on=go_on: go_on(_TRACED_ROUNDS))
    finally:
        with out.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
