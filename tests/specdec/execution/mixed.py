"""Rounds in which prompts are read beside rows that decode, one after the other: what a trace of mixed rounds needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.serving import Rounds
from benchmarks.workload import Arrival, Timeline

_STEADY_UPDATES = 4
_ROUNDS_AN_UPDATE = 20


def until(rounds: Rounds, lines: Sequence[Timeline], updates: int) -> None:
    """Step until each of them has so many updates.

    Raises:
        ValueError: one of them has come to its end, or hardly gets anything.
    """
    for _ in range(_ROUNDS_AN_UPDATE * (updates + 8)):
        if min(len(line.moments) for line in lines) >= updates:
            return
        rounds.step()
    raise ValueError(f"no {updates} updates of each row in {_ROUNDS_AN_UPDATE} times as many rounds")


@contextmanager
def mixed_rounds(
    engine: Any, rows: Sequence[Arrival], prompts: Sequence[Arrival], count: int
) -> Iterator[Callable[[], int]]:
    """What makes `count` mixed rounds and returns their number; all requests end with the block.

    Rows decode first; then so many prompts are queued, over and over, as these rounds can read.

    Args:
        rows: they must outlast the rounds. prompts: with few new tokens.

    Raises:
        ValueError: one of the rounds was not mixed; from what makes them.
    """
    rounds = Rounds(engine)
    now = time.perf_counter()
    until(rounds, [rounds.submit(row, now) for row in rows], _STEADY_UPDATES)
    queued, wanted = 0, (count + 2) * engine.config.max_num_prefill_tokens
    while queued < wanted:
        for prompt in prompts:
            rounds.submit(prompt, now)
            queued += len(prompt.token_ids)
    rounds.step()  # reads the round that was launched before they came

    def go_on() -> int:
        for made in range(count):
            if not _is_mixed(engine):
                raise ValueError(
                    f"round {made + 1} of {count} reads no prompt beside rows that decode: "
                    f"{engine.config.max_num_seqs} rows at once are too few for {len(rows)} that decode and the prompts"
                )
            rounds.step()
        return count

    try:
        yield go_on
    finally:
        engine.abort(list(rounds.lines))


def _is_mixed(engine: Any) -> bool:
    """Whether the round in flight reads a prompt and verifies drafts, or bonus tokens where none are drafted."""
    if engine.inflight is None:
        return False
    target = engine.inflight.target
    decodes = (target.num_new == 1).any()
    return bool(decodes) and not target.only_bonus_tokens
