"""How many prompt tokens a round should read beside rows that decode: the scheduler itself, over a clock that is told
what a round takes.

    python -m benchmarks.simulate_serving                     # both questions, for several max_num_prefill_tokens
    python -m benchmarks.simulate_serving --sampling-ms 0.5   # sampled rows
    python -m benchmarks.simulate_serving --scale 1.1

The two questions are those of `benchmarks.bench_serving`: tokens a second of a full queue, and how much longer the
rounds of 16 rows are while prompts of 1,024 tokens keep arriving. Times are of one H200 at the Llama-3.1-8B shape with
an EAGLE-3 head, K = 3: measured on 2026-11-22 and interpolated. Checked against an H200: the workload of `full_queue`,
greedy, gave 7,127 tokens a second; it gives 7,061 here (1 % less), from nothing but the times of single rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click
import numpy as np

from attention.cache.pages import BlockTables
from benchmarks.document import usage
from benchmarks.workload import Load, Timeline, between_updates, until_first_token
from specdec.config import EngineConfig
from specdec.engine.admission import admission_order
from specdec.engine.scheduler import Scheduler
from specdec.execution.ragged import token_bucket
from specdec.requests.request import Request, Times
from specdec.requests.sampling import SamplingParams
from specdec.rounds.rows import RowTable

_LENGTH, _BUDGET, _PAGE = 4096, 2048, 16
_MEASURED_DRAFTS = 3
_DECODING_TOKENS, _DECODING_MS = (4, 8, 16, 32, 64, 128), (5.07, 5.18, 5.33, 5.95, 6.24, 7.15)
"""Rounds of 1 to 32 rows that decode."""
_MIXED_TOKENS = (4, 192, 256, 320, 384, 448, 512, 640, 2048)
_MIXED_MS = (5.07, 10.15, 10.8, 12.56, 13.66, 15.5, 15.45, 18.5, 44.4)
"""Rounds with prompts, by all of their tokens: from 192 to 640 beside rows that decode, of 2,048 without any."""


@dataclass(frozen=True)
class RoundTime:
    """What a round takes, in ms.

    Attributes:
        scale: of what was measured. step: a draft step, by which rounds of another K differ. sampling: what sampled
            rows add.
    """

    scale: float = 1.0
    step: float = 0.28
    sampling: float = 0.0

    def ms(self, rows: int, prompt: int, drafts: int) -> float:
        """A round of so many rows that decode, with `drafts` each, and so many prompt tokens.

        >>> [round(RoundTime().ms(*round_), 2) for round_ in ((32, 0, 3), (16, 448, 3), (0, 2048, 3), (32, 0, 2))]
        [7.15, 15.45, 44.4, 6.42]
        """
        tokens = rows * (drafts + 1)
        if prompt:
            measured = _at(token_bucket(tokens + prompt, _BUDGET), _MIXED_TOKENS, _MIXED_MS)
        else:
            measured = _at(tokens, _DECODING_TOKENS, _DECODING_MS)
        return self.scale * measured + (drafts - _MEASURED_DRAFTS) * self.step + self.sampling


def _at(tokens: int, measured: tuple[int, ...], ms: tuple[float, ...]) -> float:
    """Interpolated; beyond the last one in proportion to the tokens."""
    return float(np.interp(tokens, measured, ms)) * max(tokens / measured[-1], 1.0)


class Simulated:
    """An engine without a device: it schedules, and accepts each draft with one probability.

    Attributes:
        now: seconds. lines: what each request got when.
    """

    def __init__(
        self, times: RoundTime, most_prefill: int, drafts: int, acceptance: float, rows: int = 32, seed: int = 0
    ) -> None:
        pages = 1 + rows * _LENGTH // _PAGE
        config = EngineConfig(drafts, _LENGTH, rows, _BUDGET, _PAGE, pages, max_num_prefill_tokens=most_prefill)
        self._table = RowTable(rows, _LENGTH)
        target, head = (BlockTables(n, rows, _LENGTH, _PAGE) for n in (pages, config.num_head_pages))
        self._scheduler = Scheduler(config, self._table, target, head)
        self._times, self._drafts, self._acceptance = times, drafts, acceptance
        self._rng = np.random.default_rng(seed)
        self.now = 0.0
        self.lines: list[Timeline] = []

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return not self._scheduler.idle

    def submit(self, prompt: int, new: int) -> Timeline:
        """Queue a request; what it will have got."""
        stream: Any = None  # nobody reads text
        sizes = (prompt, prompt + new, self._drafts, 1)
        tokens = np.zeros(prompt, np.int32)
        number = len(self.lines)
        self._scheduler.waiting.append(Request(number, SamplingParams(), *sizes, tokens, stream, 0, (), Times(0.0)))
        self.lines.append(Timeline(self.now))
        return self.lines[-1]

    def step(self) -> None:
        """One round."""
        schedule, table = self._scheduler.schedule(), self._table
        assert schedule is not None
        rows, prefilling = schedule.rows, table.prefilling(schedule.rows)
        read = int(schedule.num_new[prefilling].sum())
        self.now += self._times.ms(int((~prefilling).sum()), read, self._drafts) / 1e3
        decided = table.computed[rows] + schedule.num_new == table.length[rows]
        hits = self._rng.random((len(rows), max(self._drafts, 1))) < self._acceptance
        accepted = np.where(decided, np.minimum(hits.cumprod(1).sum(1), schedule.num_drafts), 0)
        count = np.where(decided, np.minimum(accepted + 1, table.limit[rows] - table.length[rows]), 0)
        table.computed[rows] += schedule.num_new + accepted
        table.length[rows] += count
        self._report(dict(zip(rows.tolist(), count.tolist(), strict=True)))

    def _report(self, counts: dict[int, int]) -> None:
        for request in list(self._scheduler.running):
            self.lines[request.id].add(self.now, counts.get(request.row, 0))
            if self._table.length[request.row] >= request.limit:
                self._scheduler.remove(request)


def full_queue(
    times: RoundTime, most_prefill: int, drafts: int = 3, acceptance: float = 0.8, repeats: int = 8, rows: int = 32
) -> dict[str, Any]:
    """128 requests of one call, 32 of them in a batch; several times with other drafts accepted."""
    requests = Load(128, (64, 1024), (32, 384)).arrivals(2)
    engines = [Simulated(times, most_prefill, drafts, acceptance, rows, seed) for seed in range(repeats)]
    order = admission_order([request.new_tokens for request in requests], rows)
    for engine in engines:
        for i in order:
            engine.submit(len(requests[i].token_ids), requests[i].new_tokens)
        while engine.busy:
            engine.step()
    lines = [line for engine in engines for line in engine.lines]
    rate = sum(sum(line.counts) for line in lines) / sum(engine.now for engine in engines)
    return {"output_tokens_per_s": rate} | between_updates(lines) | until_first_token(lines)


def interference(
    times: RoundTime, most_prefill: int, drafts: int = 3, acceptance: float = 0.8, rows: int = 16, updates: int = 300
) -> dict[str, Any]:
    """Rows that decode, alone and while prompts of 1,024 tokens arrive one after the other."""
    engine = Simulated(times, most_prefill, drafts, acceptance)
    steady = [engine.submit(512, _LENGTH - 600) for _ in range(rows)]
    while min(len(line.moments) for line in steady) < updates:
        engine.step()
    alone, before = between_updates(steady), [len(line.moments) for line in steady]
    arrived = [engine.submit(1024, 32)]
    for _ in range(updates):
        if arrived[-1].moments:
            arrived.append(engine.submit(1024, 32))
        engine.step()
    rest = [Timeline(0.0, line.moments[n:], line.counts[n:]) for line, n in zip(steady, before, strict=True)]
    ratio = between_updates(rest)["update_ms_p99"] / alone["update_ms_median"]
    return {"update_p99_over_alone": ratio} | until_first_token([line for line in arrived if line.moments])


@click.command(help=usage(__doc__))
@click.option("--prefill-tokens", type=int, multiple=True, default=(128, 256, 384, 448, 512, 640, 1024, 2048))
@click.option("--drafts", type=int, default=3, show_default=True)
@click.option("--acceptance", type=float, default=0.8, show_default=True)
@click.option("--scale", type=float, default=RoundTime.scale, show_default=True, help="Of the measured times.")
@click.option("--step-ms", type=float, default=RoundTime.step, show_default=True, help="A draft step.")
@click.option("--sampling-ms", type=float, default=RoundTime.sampling, show_default=True)
def main(
    prefill_tokens: tuple[int, ...],
    drafts: int,
    acceptance: float,
    scale: float,
    step_ms: float,
    sampling_ms: float,
) -> None:
    """Print a table."""
    times = RoundTime(scale, step_ms, sampling_ms)
    click.echo(
        "prompt tokens | tokens/s | first token, update p99 (ms) | beside prompts: p99 over alone, first token (ms)"
    )
    for most in prefill_tokens:
        queue, beside = (run(times, most, drafts, acceptance) for run in (full_queue, interference))
        click.echo(
            f"{most:13,} | {queue['output_tokens_per_s']:8,.0f} | {queue['first_token_ms_median']:13,.0f} "
            f"{queue['update_ms_p99']:14.1f} | {beside['update_p99_over_alone']:30.2f} "
            f"{beside['first_token_ms_median']:17.0f}"
        )


if __name__ == "__main__":
    main()
