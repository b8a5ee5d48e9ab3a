"""How many prompt tokens a round should read beside rows that decode: the scheduler itself, over a clock that is told
what a round takes.

    python -m benchmarks.simulate_serving                     # both questions, for several max_num_prefill_tokens
    python -m benchmarks.simulate_serving --sampling-ms 0.5   # sampled rows
    python -m benchmarks.simulate_serving --matmul-scale 1.1 --gap-ms 1.5

The two questions are those of `benchmarks.bench_serving`: tokens a second of a full queue, and how much longer the
rounds of 16 rows are while prompts of 1,024 tokens keep arriving. Times are of one H200 at the Llama-3.1-8B shape with
an EAGLE-3 head. Checked against that GPU: a round of 32 rows at K=3 takes 6.95 ms (6.89 measured); the full queue
without a limit, with 1.8 ms of sampling, gives 5,835 tokens a second (5,810 measured), and a p99 of updates of 52 ms
(51).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click
import numpy as np

from attention.cache.pages import BlockTables
from benchmarks.workload import Load, Timeline, between_updates, until_first_token
from specdec.config import EngineConfig
from specdec.engine.scheduler import Scheduler
from specdec.execution.ragged import token_bucket
from specdec.requests.request import Request, Times
from specdec.requests.sampling import SamplingParams
from specdec.rounds.rows import RowTable

_LAYERS, _LENGTH, _BUDGET, _PAGE = 32, 4096, 2048, 16
_TOKENS = (1, 24, 48, 96, 128, 192, 384, 768)
_FIRST_US = (123.0, 123.4, 130.2, 138.0, 141.5, 169.1, 268.6, 506.4)
_BEST_US = (119.3, 120.3, 122.7, 129.8, 133.4, 156.5, 242.0, 463.3)
"""The four matmuls of a layer: cuBLASLt's first choice, and the best of its algorithms."""


@dataclass(frozen=True)
class RoundTime:
    """What a round takes, in ms.

    Attributes:
        matmul_scale: of the first choice's matmuls, which rounds with prompts run. step: a draft step.
        gap: in which the device waits for the host, of rounds with prompts. sampling: what sampled rows add.
    """

    matmul_scale: float = 0.93
    step: float = 0.28
    gap: float = 0.7
    sampling: float = 0.0

    def ms(self, rows: int, prompt: int, drafts: int) -> float:
        """A round of so many rows that decode, with `drafts` each, and so many prompt tokens.

        >>> round(RoundTime().ms(32, 0, 3), 2), round(RoundTime().ms(0, 2048, 3))
        (6.95, 50)
        """
        logits = rows * (drafts + 1)
        tokens = token_bucket(logits + prompt, _BUDGET) if prompt else logits
        layers = _LAYERS * 1e-3 * (self.matmul_scale * _at(tokens, _FIRST_US) if prompt else _at(tokens, _BEST_US))
        attention = 0.3 + 0.021 * rows + 0.001 * prompt
        rest = 0.6 + 0.0003 * logits + 0.0017 * tokens  # the output layer; norms, rotary embedding, activations
        drafting = 0.1 + 0.045 * layers + (drafts - 1) * self.step if drafts else 0.0
        return layers + attention + rest + drafting + self.sampling + (self.gap if prompt else 0.0)


def _at(tokens: int, us: tuple[float, ...]) -> float:
    """Interpolated; beyond the last one in proportion to the tokens."""
    return float(np.interp(tokens, _TOKENS, us)) * max(tokens / _TOKENS[-1], 1.0)


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
    times: RoundTime, most_prefill: int, drafts: int = 3, acceptance: float = 0.8, repeats: int = 8
) -> dict[str, Any]:
    """128 requests at once, 32 of them in a batch; several times with other drafts accepted."""
    requests = Load(128, (64, 1024), (32, 384)).arrivals(2)
    engines = [Simulated(times, most_prefill, drafts, acceptance, seed=seed) for seed in range(repeats)]
    for engine in engines:
        for request in requests:
            engine.submit(len(request.token_ids), request.new_tokens)
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


@click.command(help=__doc__)
@click.option("--prefill-tokens", type=int, multiple=True, default=(128, 256, 384, 448, 512, 640, 1024, 2048))
@click.option("--drafts", type=int, default=3, show_default=True)
@click.option("--acceptance", type=float, default=0.8, show_default=True)
@click.option("--matmul-scale", type=float, default=RoundTime.matmul_scale, show_default=True)
@click.option("--step-ms", type=float, default=RoundTime.step, show_default=True, help="A draft step.")
@click.option("--gap-ms", type=float, default=RoundTime.gap, show_default=True, help="The device waits for the host.")
@click.option("--sampling-ms", type=float, default=RoundTime.sampling, show_default=True)
def main(
    prefill_tokens: tuple[int, ...],
    drafts: int,
    acceptance: float,
    matmul_scale: float,
    step_ms: float,
    gap_ms: float,
    sampling_ms: float,
) -> None:
    """Print a table."""
    times = RoundTime(matmul_scale, step_ms, gap_ms, sampling_ms)
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
