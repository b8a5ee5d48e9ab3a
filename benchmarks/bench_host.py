"""Host time of a round's preparation: every numpy array of the draft loop and the next verification, and their packing.

    python -m benchmarks.bench_host [--out benchmarks/results/host.json]
    python -m benchmarks.bench_host --queue 10 --queue 1000 --queue 100000

Ends in one JSON line with versions and commit. Runs on CPU; the transfer itself is not part of it. With `--queue` whole
rounds of an engine are measured instead, in CPU time, with so many requests waiting: 32 rows of a model of one layer,
of which each round ends about eight and lets in as many. What a round takes must not depend on the queue.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from attention.cache.pages import BlockTables
from attention.cache.windowed import WindowedTables
from attention.spec import Reach
from benchmarks.document import publish
from benchmarks.synthetic import Tokenizer
from drafters.loops.chain import ChainLoop
from drafters.loops.chain_arrays import chain_arrays
from drafters.loops.chain_passes import FixedSteps
from drafters.loops.lengths import num_drafts_allowed
from specdec.config import EngineConfig, WindowedPool
from specdec.engine.engine import Engine
from specdec.engine.scheduler import windowed_tables
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from specdec.rounds.buckets import static_shape
from specdec.rounds.drafting import draft_input, drafts_after, rows_after
from specdec.rounds.randomness import sampling_round
from specdec.rounds.rows import RowTable, Schedule
from specdec.rounds.static import fixed_target
from specdec.rounds.transfer import RoundTransfer
from specdec.rounds.verification import RoundTables, Verified, WindowedTable, target_after, target_arrays

PAGE_SIZE = 16
QUEUE_ROWS = 32
_QUEUE_REPEATS = 3
"""In turns over all lengths, the best of each: a shared machine is slower for seconds at a time."""
CONTEXT = 1024
WINDOW = 512


@dataclass(frozen=True)
class State:
    """A running batch between commit and launch: B rows of about 1,024 tokens, each with K drafts to come."""

    schedule: Schedule
    verified: Verified
    table: RowTable
    target_pages: BlockTables
    head_pages: BlockTables
    windowed_pages: tuple[WindowedTables, ...]
    transfer: RoundTransfer
    config: EngineConfig


def make_state(rows: int, num_drafts: int, seed: int = 0, windows: tuple[int, ...] = ()) -> State:
    """A steady-state decoding batch with random lengths and acceptances; windows: of further cache groups."""
    rng = np.random.default_rng(seed)
    num_pages = rows * 2 * CONTEXT // PAGE_SIZE + 1
    pools = tuple(WindowedPool(Reach(window), num_pages) for window in windows)
    tokens = rows * (num_drafts + 1)
    config = EngineConfig(num_drafts, 2 * CONTEXT, rows, tokens, PAGE_SIZE, num_pages, windowed=pools)
    table = RowTable(rows, config.max_model_len)
    lengths = rng.integers(CONTEXT - 256, CONTEXT, rows)
    for length in lengths:
        table.open(rng.integers(0, 1000, length), config.max_model_len, num_drafts, 1, SamplingParams())
    order = np.arange(rows)[::-1].copy()
    accepted = rng.integers(0, num_drafts + 1, rows)
    table.computed[:] = table.prefill[:] = table.length - 1  # every row is at its bonus token
    table.mark_batch(order)
    pages = [BlockTables(config.num_pages, rows, config.max_model_len, PAGE_SIZE) for _ in range(2)]
    windowed = tuple(windowed_tables(config, pool) for pool in config.windowed)
    for tables in (*pages, *windowed):
        tables.resize(order.tolist(), (table.length[order] + num_drafts).tolist())
    full = np.full(rows, num_drafts)
    verified = Verified(np.arange(rows + 1) * (num_drafts + 1), order, full, accepted)
    schedule = Schedule(order, np.ones(rows, np.int64), full)
    loop = ChainLoop(None)  # type: ignore[arg-type]  # arrays and packing ask nothing of a head
    transfer = RoundTransfer(loop, config, torch.device("cpu"))
    return State(schedule, verified, table, pages[0], pages[1], windowed, transfer, config)


def prepare(state: State) -> None:
    """One round's preparation, as `Scheduler.schedule` and `Launcher.launch` do it."""
    rows = state.schedule.rows
    width = 1 << (CONTEXT // PAGE_SIZE).bit_length()
    head, target_table = state.head_pages.table[:, :width], state.target_pages.table[:, :width]
    draft = draft_input(state.verified, state.schedule, state.table, head, PAGE_SIZE)
    for pages in state.windowed_pages:
        pages.free_behind(rows, state.table.computed[rows])
        pages.extend(rows, state.table.length[rows] + state.schedule.num_drafts)
    windowed = tuple(WindowedTable(pages.reach, pages.table, rows) for pages in state.windowed_pages)
    target = target_arrays(state.schedule, state.table, RoundTables(target_table, head, PAGE_SIZE, windowed))
    sampling = sampling_round(target, state.schedule.rows, state.table)
    state.transfer.send(target.inputs, None if draft is None else chain_arrays(draft), sampling)


class FixedRounds:
    """The same of rounds that run from graphs: pages, the draft steps and the verification, all rows going on."""

    def __init__(self, state: State, num_drafts: int) -> None:
        rows, cpu = len(state.schedule.rows), torch.device("cpu")
        self._state = state
        self._target = fixed_target(state.config, rows, 1, cpu)
        self._steps = FixedSteps(static_shape(state.config, rows), cpu)
        self._accepted = state.verified.num_accepted
        self._tokens = np.zeros((rows, num_drafts + 1), np.int64)
        windowed = tuple(WindowedTable(g.reach, g.table, state.schedule.rows) for g in state.windowed_pages)
        pages = RoundTables(state.target_pages.table, state.head_pages.table, PAGE_SIZE, windowed)
        self._last = target_arrays(state.schedule, state.table, pages)

    def prepare(self) -> None:
        """One round's preparation, as `Lookahead` and `GraphExecutor` do it."""
        state, last, table = self._state, self._last, self._state.table
        rows = state.schedule.rows
        bonus = table.computed[rows] + state.schedule.num_new + state.schedule.num_drafts
        left = table.limit[rows] - table.length[rows] - state.schedule.num_drafts
        allowed = num_drafts_allowed(table.drafts[rows], table.max_model_len, bonus, left)
        for pages in state.windowed_pages:
            pages.free_behind(rows, table.computed[rows])
        for pages in (state.target_pages, *state.windowed_pages, state.head_pages):
            pages.extend(rows, bonus + allowed)
        width = 1 << (CONTEXT // PAGE_SIZE).bit_length()
        windowed = tuple(WindowedTable(each.reach, each.table, rows) for each in state.windowed_pages)
        tables = (state.target_pages.table[:, :width], state.head_pages.table[:, :width])
        reserved = RoundTables(*tables, PAGE_SIZE, windowed).rows(rows)
        self._steps.send(rows_after(last, self._accepted))
        drafts = drafts_after(last, self._accepted)
        self._target.send(target_after(last, table, reserved, drafts, self._accepted, self._tokens))


def measure(
    rows: int, num_drafts: int, rounds: int, windows: tuple[int, ...] = (), graphs: bool = False
) -> dict[str, float]:
    """p50 and p99 of one preparation in microseconds; windows: of further cache groups."""
    state = make_state(rows, num_drafts, windows=windows)
    run = FixedRounds(state, num_drafts).prepare if graphs else partial(prepare, state)
    times = []
    for _ in range(rounds + 20):
        start = time.perf_counter_ns()
        run()
        times.append((time.perf_counter_ns() - start) / 1e3)
    p50, p99 = (round(float(p), 1) for p in np.percentile(times[20:], [50, 99]))
    what = {"rows": rows, "num_speculative_tokens": num_drafts, "groups": 1 + len(windows), "graphs": graphs}
    return what | {"p50_us": p50, "p99_us": p99}


def queue_engine() -> Engine:
    """32 rows of a Llama of one layer, 16 wide: a round is nearly all host time."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    target = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes)).eval()
    options = {"max_num_seqs": QUEUE_ROWS, "max_num_batched_tokens": 1024, "kv_cache_tokens": 64 * QUEUE_ROWS}
    model = SpeculativeModel.from_pretrained(target, tokenizer=Tokenizer(), **options)
    return model.engine


def measure_queue(engine: Engine, waiting: int, rounds: int) -> dict[str, float]:
    """p50 and p99 of a round in microseconds with so many requests waiting, and an abort's per request."""
    rng = np.random.default_rng(0)

    def submit(count: int) -> list[int]:
        params = [SamplingParams(max_new_tokens=int(n), ignore_eos=True) for n in rng.integers(2, 7, count)]
        return [engine.submit(rng.integers(0, 64, 8).tolist(), each) for each in params]

    ids, times, ended = submit(waiting + QUEUE_ROWS), [], 0
    for number in range(rounds + 20):
        start = time.thread_time_ns()
        updates = engine.step()
        times.append((time.thread_time_ns() - start) / 1e3)
        last = sum(update.last for update in updates)
        ended += last if number >= 20 else 0
        ids += submit(last)
    assert engine.usage().waiting >= waiting, "the queue kept its length"
    left, start = engine.usage().requests, time.thread_time_ns()
    engine.abort(ids[::-1])
    abort_us = (time.thread_time_ns() - start) / 1e3 / left
    p50, p99 = (round(float(p), 1) for p in np.percentile(times[20:], [50, 99]))
    what = {"waiting": waiting, "rows": QUEUE_ROWS, "ended_per_round": round(ended / rounds, 2)}
    return what | {"p50_us": p50, "p99_us": p99, "abort_us_per_request": round(abort_us, 2)}


@click.command()
@click.option("--rounds", default=500, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Also write the JSON there.")
@click.option("--queue", multiple=True, type=int, help="Whole rounds with so many requests waiting; repeatable.")
def main(rounds: int, out: Path | None, queue: tuple[int, ...]) -> None:
    """Measure B = 1, 8, 64, 256 and K = 3, 5, of one cache group and of two, without graphs and with."""
    if queue:
        engine = queue_engine()
        found = [[measure_queue(engine, n, rounds) for n in queue] for _ in range(_QUEUE_REPEATS)]
        best = [min(each, key=lambda result: result["p50_us"]) for each in zip(*found, strict=True)]
        publish({"benchmark": "host_queue", "results": best, "repeats": _QUEUE_REPEATS}, out)
        return
    sizes = [(rows, drafts) for drafts in (3, 5) for rows in (1, 8, 64, 256)]
    results = [
        measure(*size, rounds, windows, graphs)
        for graphs in (False, True)
        for windows in ((), (WINDOW,))
        for size in sizes
    ]
    for r in results:
        how = "graphs" if r["graphs"] else "eager"
        size = f"{how:>6} groups={r['groups']} K={r['num_speculative_tokens']} B={r['rows']:>3}"
        click.echo(f"{size}  p50 {r['p50_us']:7.1f} µs  p99 {r['p99_us']:7.1f} µs")
    publish({"benchmark": "host", "results": results, "context": CONTEXT, "page_size": PAGE_SIZE}, out)


if __name__ == "__main__":
    main()
