"""Asynchronous calls: 100 cancels at random moments, and a reader that sleeps a second for each update.

    python -m tests.public.soak_async [--cancels 100] [--readers 8] [--repeats 5]

Each cancel is of a task that awaits `generate_async` or reads `stream_async`, alone in the engine: counted are the
rounds that begin between the cancel and the moment when no request, row or page is held (at most one is right). Then
readers answer the same requests with and without a slow one beside them, in turn. Ends in one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from typing import Any

import click

from tests.public.soak_service import PROMPTS, chat, loaded


async def read(stream: Any, pause: float = 0.0) -> list[Any]:
    """All updates, with a pause after each."""
    found = []
    async for update in stream:
        found.append(update)
        await asyncio.sleep(pause)
    return found


class Rounds:
    """How many rounds have begun."""

    def __init__(self, model: Any) -> None:
        self.begun, self._step = 0, model.engine.step
        model.engine.step = self.step

    def step(self) -> Any:
        self.begun += 1
        return self._step()


async def cancelled(model: Any, rounds: Rounds, place: int) -> int | None:
    """Rounds begun between a cancel and the end of its request; None where it was not queued yet."""
    own: dict[str, Any] = {"max_new_tokens": 1500, "ignore_eos": True}
    prompt = chat(PROMPTS[place])
    call = read(model.stream_async(prompt, **own)) if place % 2 else model.generate_async(prompt, **own)
    task = asyncio.create_task(call)
    await asyncio.sleep(random.random() * 0.2)
    queued = model.engine.has_work
    task.cancel()
    before = rounds.begun
    await asyncio.gather(task, return_exceptions=True)
    while model.engine.has_work:
        await asyncio.sleep(0.0005)
    return rounds.begun - before if queued else None


async def together(model: Any, readers: int, slow: bool) -> tuple[float, int]:
    """Seconds until all readers but a slow one are through, and how many updates that one found afterwards."""
    own: dict[str, Any] = {"max_new_tokens": 48, "ignore_eos": True}
    beside = asyncio.create_task(
        read(model.stream_async(chat(PROMPTS[0]), max_new_tokens=400, ignore_eos=True), slow * 1.0)
    )
    await asyncio.sleep(0.2)
    begun = time.perf_counter()
    await asyncio.gather(*(read(model.stream_async(chat(prompt), **own)) for prompt in PROMPTS[1 : 1 + readers]))
    seconds = time.perf_counter() - begun
    if slow:
        while model.engine.has_work:
            await asyncio.sleep(0.01)
    updates = await beside
    assert sum(len(update.token_ids) for update in updates) == 400
    return seconds, len(updates)


async def everything(model: Any, cancels: int, readers: int, repeats: int) -> dict[str, Any]:
    rounds, counts = Rounds(model), Counter[int | None]()
    await model.generate_async(chat(PROMPTS[0]), max_new_tokens=8)
    for place in range(cancels):
        counts[await cancelled(model, rounds, place)] += 1
    left = {name: count for name, count in vars(model.usage()).items() if count}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    updates: dict[bool, list[int]] = {False: [], True: []}
    for _ in range(repeats):
        for slow in seconds:
            spent, found = await together(model, readers, slow)
            seconds[slow].append(spent)
            updates[slow].append(found)
    medians = {name: round(statistics.median(seconds[slow]), 3) for name, slow in (("without", False), ("with", True))}
    ratios = [round(w / o, 2) for o, w in zip(seconds[False], seconds[True], strict=True)]
    return {
        "cancels by rounds begun after them (None: not queued yet)": {str(k): v for k, v in counts.items()},
        "left": left,
        "seconds of the others, median": medians,
        "ratio in each repeat": ratios,
        "updates of a reader that sleeps 0 s": updates[False],
        "1 s": updates[True],
        "good": not left and all(count is None or count <= 1 for count in counts),
    }


@click.command()
@click.option("--cancels", default=100)
@click.option("--readers", default=8)
@click.option("--repeats", default=3)
def main(cancels: int, readers: int, repeats: int) -> None:
    """Run it."""
    random.seed(0)
    model = loaded()
    result = asyncio.run(everything(model, cancels, readers, repeats))
    print(json.dumps(result))
    sys.exit(not result["good"])


if __name__ == "__main__":
    main()
