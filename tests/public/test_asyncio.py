"""What docs/threads.md says of asyncio: its code runs all calls at once, and a cancelled await ends its request."""

from __future__ import annotations

import asyncio
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fakes import free_everywhere, hf_greedy, random_prompts, table_head, tiny_llama, wrap

PAGE = Path(__file__).resolve().parents[2] / "docs" / "threads.md"
PROMPTS = random_prompts([5] * 14)


@pytest.fixture
def model() -> Any:
    target = tiny_llama()
    return wrap(target, table_head(target), num_speculative_tokens=3, max_num_seqs=14, max_num_batched_tokens=56)


def documented(model: Any) -> dict[str, Any]:
    """The names that the page's code defines."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names = {"model": model, "asyncio": asyncio, "ThreadPoolExecutor": ThreadPoolExecutor}
    exec(code, names)
    return names


@pytest.mark.slow
def test_all_calls_run_in_one_batch(model: Any) -> None:
    names, most = documented(model), [0]

    async def everything() -> list[Any]:
        return await asyncio.gather(*(names["answer"](prompt, max_new_tokens=16) for prompt in PROMPTS))

    own = model.engine.step

    def step() -> Any:
        most[0] = max(most[0], len(model.engine.scheduler.running))
        return own()

    model.engine.step = step
    found = asyncio.run(everything())
    names["pool"].shutdown()
    assert [completions[0].token_ids for completions in found] == [hf_greedy(prompt, 16) for prompt in PROMPTS]
    assert most[0] > 8, "a pool of cpu + 4 threads would have run six"


def test_a_cancelled_await_ends_its_request(model: Any) -> None:
    names, begun = documented(model), threading.Event()
    own = model.engine.step

    def step() -> Any:
        begun.set()
        return own()

    model.engine.step = step

    async def give_up() -> None:
        task = asyncio.create_task(names["answer"](PROMPTS[0], max_new_tokens=100, ignore_eos=True))
        await asyncio.to_thread(begun.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    names["pool"].shutdown()
    assert free_everywhere(model) and model.engine_stats.requests == 0
