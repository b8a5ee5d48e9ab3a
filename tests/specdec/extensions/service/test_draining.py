"""Draining, and the limit of waiting requests."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import free_everywhere, hf_greedy, random_prompts, tiny_llama, wrap

from specdec import ClosedModelError, DrainingError, InvalidInputError, QueueFullError
from specdec.extensions.service.draining import drained
from specdec.requests.sampling import SamplingParams

PROMPTS = random_prompts((5, 9, 3, 7, 6, 4))
ENDLESS = SamplingParams(300, ignore_eos=True)


def test_drain_runs_what_nobody_reads_to_its_end_and_refuses_new_calls() -> None:
    model = wrap(tiny_llama())
    stream = model.stream(PROMPTS[:4], SamplingParams(8))
    first = next(stream)
    refused: list[BaseException] = []
    own = model.engine.step

    def step() -> Any:
        if not refused:
            refused.append(ValueError())
            threading.Thread(target=ask).start()
        return own()

    def ask() -> None:
        try:
            model.generate(PROMPTS[5])
        except DrainingError as error:
            refused[0] = error

    model.engine.step = step
    assert model.drain() == 0
    assert not model.engine.has_work
    updates = [first, *stream]
    for i in range(4):
        assert [t for u in updates if u.index == i for t in u.token_ids] == hf_greedy(PROMPTS[i], 8)
    assert isinstance(refused[0], DrainingError)
    assert model.generate(PROMPTS[5], SamplingParams(8))[0].token_ids == hf_greedy(PROMPTS[5], 8), (
        "afterwards it serves"
    )


def test_those_that_were_cancelled_are_counted_once_however_long_they_take_to_end() -> None:
    """With those that wait for a row."""
    cancelled, left = list[list[int]](), [3]
    requests = [SimpleNamespace(id=i) for i in range(4)]

    class Engine:
        scheduler = SimpleNamespace(waiting=requests[:1], running=requests[1:])
        deadlines = SimpleNamespace(cancel=cancelled.append)

        @property
        def has_work(self) -> bool:
            left[0] -= 1
            return left[0] >= 0

    def help_() -> None:
        Engine.scheduler = SimpleNamespace(waiting=[], running=requests[1:2])

    shared = SimpleNamespace(between_rounds=nullcontext, num_drains=0, check_open=lambda: None, help=help_)
    with drained(SimpleNamespace(_shared=shared, engine=Engine()), 0.0) as count:
        assert (count, cancelled, shared.num_drains) == (4, [[0, 1, 2, 3]], 1)
    assert shared.num_drains == 0


def test_what_has_not_ended_at_the_limit_is_cancelled_and_reported() -> None:
    model = wrap(tiny_llama())
    stream = model.stream(PROMPTS[:5], ENDLESS)
    next(stream)
    assert model.drain(0.0) == 5
    done = [update.completion for update in stream if update.completion is not None]
    assert [c.finish_reason for c in done] == ["cancelled"] * 5
    assert free_everywhere(model)
    assert model.drain(0.0) == 0


@pytest.mark.slow
def test_aclose_lets_tasks_end() -> None:
    model = wrap(tiny_llama())

    async def closing() -> Any:
        tasks = [asyncio.create_task(model.generate_async(prompt, SamplingParams(20))) for prompt in PROMPTS]
        while not model.engine.scheduler.running or len(model.engine.scheduler.waiting) < 3:
            await asyncio.sleep(0.001)
        cancelled = await model.aclose(60.0)
        return cancelled, await asyncio.gather(*tasks)

    cancelled, found = asyncio.run(closing())
    assert cancelled == 0
    assert [each[0].token_ids for each in found] == [hf_greedy(prompt, 20) for prompt in PROMPTS]
    with pytest.raises(ClosedModelError):
        model.generate(PROMPTS[0])
    assert asyncio.run(model.aclose()) == 0, "twice is once"


def test_aclose_at_its_limit() -> None:
    model = wrap(tiny_llama())

    async def closing() -> Any:
        tasks = [asyncio.create_task(model.generate_async(prompt, ENDLESS)) for prompt in PROMPTS]
        while len(model.engine.scheduler.waiting) < 3:
            await asyncio.sleep(0.001)
        return await model.aclose(0.01), await asyncio.gather(*tasks)

    cancelled, found = asyncio.run(closing())
    assert cancelled == 6 and [each[0].finish_reason for each in found] == ["cancelled"] * 6


def test_a_closed_model_ends_a_drain() -> None:
    model = wrap(tiny_llama())
    stream = model.stream(PROMPTS[:3], ENDLESS)
    next(stream)
    own = model.engine.step

    def slow() -> Any:
        time.sleep(0.01)
        return own()

    model.engine.step = slow
    threading.Timer(0.05, model.close).start()
    with pytest.raises(ClosedModelError):
        model.drain()


@pytest.mark.slow
def test_a_full_queue_refuses_a_call_and_queues_none_of_it() -> None:
    model = wrap(tiny_llama(), max_waiting_requests=2)
    stream = model.stream(PROMPTS[:4], ENDLESS)
    next(stream)
    with pytest.raises(QueueFullError, match=r"2 new requests beside 4 .* 3 run at once .* and 2 wait"):
        model.generate(PROMPTS[4:])
    assert model.usage().requests == 4
    own = model.engine.step

    def slow() -> Any:
        time.sleep(0.01)
        return own()

    model.engine.step = slow

    async def refused() -> None:
        one_more = model.stream_async(PROMPTS[4], ENDLESS)
        await one_more.start()
        with pytest.raises(QueueFullError, match="1 new requests beside 5"):
            await model.stream_async(PROMPTS[5]).start()

    asyncio.run(refused())
    stream.close()
    assert asyncio.run(model.generate_async(PROMPTS[5], max_new_tokens=4))[0].token_ids == hf_greedy(PROMPTS[5], 4)
    assert free_everywhere(model)


def test_no_request_may_wait() -> None:
    model = wrap(tiny_llama(), max_waiting_requests=0)
    assert len(model.generate(PROMPTS[:3], max_new_tokens=2)) == 3
    with pytest.raises(InvalidInputError, match=r"brings 4 requests .* 3 run at once .* and 0 wait .* at most 3"):
        model.generate(PROMPTS[:4], max_new_tokens=2)


@pytest.mark.parametrize("timeout", ["a", float("nan"), -1, True, [1]])
def test_a_limit_that_is_no_time_is_refused_and_the_model_serves_on(timeout: Any) -> None:
    model = wrap(tiny_llama())
    with pytest.raises(InvalidInputError, match=r"timeout=.*allowed is None \(no limit\), or seconds"):
        model.drain(timeout)
    with pytest.raises(InvalidInputError, match="timeout="):
        asyncio.run(model.aclose(timeout))
    assert len(model.generate(PROMPTS[0], max_new_tokens=2)) == 1
