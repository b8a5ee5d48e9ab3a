"""Asynchronous calls: the same answers, cancelled with their tasks, slow readers, errors, several event loops."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import time
import weakref
from multiprocessing import get_context
from typing import Any

import pytest
from fakes import LetterTokenizer, free_everywhere, hf_greedy, random_prompts, table_head, tiny_llama, wrap

from specdec import ClosedModelError, Grammar, InvalidInputError, ModelChangedError, RequestFailedError, SpecdecError
from specdec.engine.streams import Stream
from specdec.extensions.service.asynchronous import MOST_UNREAD, AsyncStream
from specdec.extensions.service.leading import leader_of
from specdec.requests.sampling import SamplingParams

PROMPTS = random_prompts((5, 9, 3, 7, 6, 4))
NEW = 16
ENDLESS = SamplingParams(300, ignore_eos=True)


@pytest.fixture
def model() -> Any:
    """Its rounds take 3 ms at least, so that a request goes on for a while on any machine."""
    target = tiny_llama()
    made = wrap(target, table_head(target), num_speculative_tokens=3, kv_cache_tokens=1600)
    own = made.engine.step

    def step() -> Any:
        time.sleep(0.003)
        return own()

    made.engine.step = step
    return made


def right(prompt: list[int], new: int = NEW) -> list[int]:
    return hf_greedy(prompt, new)


async def until(condition: Any, seconds: float = 60.0) -> None:
    """Wait for what another thread brings about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.002)


def count_rounds(model: Any) -> list[int]:
    """Rounds that have begun from now on."""
    own, rounds = model.engine.step, [0]

    def step() -> Any:
        rounds[0] += 1
        return own()

    model.engine.step = step
    return rounds


@pytest.mark.slow
def test_many_calls_share_one_batch_and_one_thread(model: Any) -> None:
    most, own, threads = [0], model.engine.step, set[str]()

    def step() -> Any:
        most[0] = max(most[0], len(model.engine.scheduler.running))
        threads.add(threading.current_thread().name)
        return own()

    model.engine.step = step

    async def everything() -> list[Any]:
        return await asyncio.gather(*(model.generate_async(prompt, max_new_tokens=NEW) for prompt in PROMPTS))

    found = asyncio.run(everything())
    assert [each[0].token_ids for each in found] == [right(prompt) for prompt in PROMPTS]
    assert most[0] == 3 and threads == {"specdec-leader"}
    assert free_everywhere(model)


@pytest.mark.slow
def test_a_stream_has_every_token_and_one_call_several_prompts(model: Any) -> None:
    async def read() -> Any:
        ids, texts, done = [[], [], []], ["", "", ""], {}  # type: ignore[var-annotated]
        async for update in model.stream_async(PROMPTS[:3], max_new_tokens=NEW):
            ids[update.index] += update.token_ids
            texts[update.index] += update.text
            if update.completion is not None:
                done[update.index] = update.completion
        return ids, texts, done

    ids, texts, done = asyncio.run(read())
    assert ids == [right(prompt) for prompt in PROMPTS[:3]]
    assert texts == [done[i].text for i in range(3)] and ids == [done[i].token_ids for i in range(3)]


@pytest.mark.slow
def test_beside_threads_that_generate(model: Any) -> None:
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.extend(model.generate(PROMPTS[3:], max_new_tokens=NEW)))

    async def both() -> list[Any]:
        other.start()
        return await asyncio.gather(*(model.generate_async(prompt, max_new_tokens=NEW) for prompt in PROMPTS[:3]))

    mine = asyncio.run(both())
    other.join()
    assert [c.token_ids for c in (*(each[0] for each in mine), *found)] == [right(prompt) for prompt in PROMPTS]


def test_a_cancelled_task_is_a_cancelled_request_within_one_round(model: Any) -> None:
    async def cancelled() -> int:
        task = asyncio.create_task(model.generate_async(PROMPTS[:3], ENDLESS))
        await until(lambda: len(model.engine.scheduler.running) == 3)
        rounds = count_rounds(model)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        begun = rounds[0]
        await until(lambda: not model.engine.has_work)
        return rounds[0] - begun

    assert asyncio.run(cancelled()) <= 1
    assert free_everywhere(model)


def test_a_task_that_is_cancelled_between_two_reads_ends_its_stream(model: Any) -> None:
    """Although the cancelled task still refers to it."""

    async def between() -> bool:
        async def reads() -> None:
            async for _ in model.stream_async(PROMPTS[0], ENDLESS):
                await asyncio.sleep(3600)

        task = asyncio.create_task(reads())
        rounds = count_rounds(model)
        await until(lambda: rounds[0] > 3)
        task.cancel()
        begun = rounds[0]
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not model.engine.has_work)
        return rounds[0] - begun <= 2 and task.cancelled()

    assert asyncio.run(between())


def test_a_stream_that_another_task_goes_on_reading_is_not_ended(model: Any) -> None:
    async def handed_on() -> Any:
        stream = model.stream_async(PROMPTS[0], max_new_tokens=NEW)

        begun = asyncio.Event()

        async def begins() -> None:
            await anext(stream)
            begun.set()
            await asyncio.sleep(3600)

        task = asyncio.create_task(begins())
        await begun.wait()
        rest = asyncio.create_task(stream.completions())
        await asyncio.sleep(0)
        task.cancel()
        return await rest

    assert asyncio.run(handed_on())[0].token_ids == right(PROMPTS[0])


def test_a_planted_cancellation_that_does_not_reach_the_engine_is_seen(model: Any) -> None:
    """What the test above would miss if it looked at the task alone."""
    lost = model.engine.deadlines.cancel
    model.engine.deadlines.cancel = lambda ids: None

    async def cancelled() -> bool:
        task = asyncio.create_task(model.generate_async(PROMPTS[0], ENDLESS))
        await until(lambda: model.engine.scheduler.running)
        task.cancel()
        rounds = count_rounds(model)
        await until(lambda: rounds[0] > 3)
        return bool(model.engine.has_work)

    assert asyncio.run(cancelled())
    model.engine.deadlines.cancel = lost
    model.close()


@pytest.mark.slow
def test_cancels_at_random_moments_leave_nothing(model: Any) -> None:
    chance = random.Random(0)

    async def one(i: int) -> None:
        call = model.generate_async(PROMPTS[i % 6], ENDLESS) if i % 2 else read_some(model, PROMPTS[i % 6])
        task = asyncio.create_task(call)
        await asyncio.sleep(chance.random() * 0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def everything() -> None:
        await asyncio.gather(*(one(i) for i in range(30)))
        await until(lambda: not model.engine.has_work)

    asyncio.run(everything())
    assert free_everywhere(model)
    assert model.generate(PROMPTS[0], max_new_tokens=NEW)[0].token_ids == right(PROMPTS[0])


async def read_some(model: Any, prompt: Any) -> None:
    async for _ in model.stream_async(prompt, ENDLESS):
        pass


@pytest.mark.slow
@pytest.mark.thorough
def test_a_handle_ends_completions_with_their_tokens(model: Any) -> None:
    async def ended() -> Any:
        stream = model.stream_async(PROMPTS[:2], ENDLESS)
        task = asyncio.create_task(stream.completions())
        await until(lambda: len(model.engine.scheduler.running) == 2)
        rounds = count_rounds(model)
        await until(lambda: rounds[0] > 2)
        stream.cancel(1)
        await until(lambda: len(model.engine.scheduler.running) == 1)
        stream.cancel()
        return await task

    found = asyncio.run(ended())
    assert [c.finish_reason for c in found] == ["cancelled"] * 2
    for completion, prompt in zip(found, PROMPTS, strict=False):
        assert completion.token_ids == right(prompt, 300)[: len(completion.token_ids)]
    assert found[0].token_ids and free_everywhere(model)


def test_a_handle_may_be_cancelled_before_it_is_read(model: Any) -> None:
    async def ended() -> Any:
        stream = model.stream_async(PROMPTS[0], ENDLESS)
        stream.cancel()
        return await stream.completions()

    assert asyncio.run(ended())[0].finish_reason == "cancelled"
    assert free_everywhere(model)


def test_the_same_of_a_call_without_asyncio(model: Any) -> None:
    stream = model.stream(PROMPTS[:2], ENDLESS)
    begun = next(stream)
    threading.Timer(0.02, stream.cancel).start()
    found = stream.completions()
    assert begun.token_ids and [c.finish_reason for c in found] == ["cancelled"] * 2


def test_a_stream_that_is_dropped_or_left_is_ended(model: Any) -> None:
    async def left() -> None:
        async for _ in model.stream_async(PROMPTS[0], ENDLESS):
            break
        async with model.stream_async(PROMPTS[1], ENDLESS) as stream:
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await until(lambda: not model.engine.has_work)

    asyncio.run(left())
    assert free_everywhere(model)
    found = model.metrics()
    assert (found["requests_dropped_total"], found["requests_ended_by_cancelled_total"]) == (2, 0)
    assert model.generate(PROMPTS[0], max_new_tokens=2) and not model.engine.deadlines.dropped, "nothing is kept"


@pytest.mark.slow
@pytest.mark.thorough
def test_a_slow_reader_finds_few_updates_with_all_tokens_and_delays_nobody(model: Any) -> None:
    async def slow() -> Any:
        stream = model.stream_async([PROMPTS[0], PROMPTS[1]], max_new_tokens=100, ignore_eos=True, logprobs=0)
        first = await anext(stream)
        other = await model.generate_async(PROMPTS[2], max_new_tokens=NEW)
        await until(lambda: not model.engine.has_work)
        return [first, *[update async for update in stream]], other

    updates, other = asyncio.run(slow())
    assert other[0].token_ids == right(PROMPTS[2])
    assert len(updates) <= 1 + MOST_UNREAD + 2
    for i in range(2):
        own = [update for update in updates if update.index == i]
        done = own[-1].completion
        assert [t for update in own for t in update.token_ids] == done.token_ids and len(done.token_ids) == 100
        assert "".join(update.text for update in own) == done.text
        assert tuple(told for update in own for told in update.logprobs or ()) == done.logprobs


@pytest.mark.slow
@pytest.mark.thorough
def test_an_event_loop_is_woken_once_while_it_does_not_look(model: Any) -> None:
    async def blocked() -> int:
        loop, calls = asyncio.get_running_loop(), [0]
        own = loop.call_soon_threadsafe

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            return own(*args, **kwargs)

        stream = model.stream_async(PROMPTS[0], max_new_tokens=200, ignore_eos=True)
        await stream.start()
        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        while model.engine.has_work:
            time.sleep(0.01)  # blocks the loop
        seen = calls[0]
        loop.call_soon_threadsafe = own  # type: ignore[method-assign]
        assert [update async for update in stream][-1].completion is not None
        return seen

    assert asyncio.run(blocked()) <= 1


def test_bad_input_is_told_by_start_and_by_reading(model: Any) -> None:
    async def bad() -> None:
        with pytest.raises(InvalidInputError, match="temperature"):
            await model.generate_async(PROMPTS[0], temperature=-1)
        with pytest.raises(InvalidInputError, match="empty"):
            await model.stream_async([[]]).start()
        assert (await model.generate_async(PROMPTS[0], max_new_tokens=NEW))[0].token_ids == right(PROMPTS[0])

    asyncio.run(bad())


def test_a_tokenizer_is_not_called_on_the_event_loop_nor_on_the_thread_of_rounds(model: Any) -> None:
    own, threads = model.tokenizer, list[str]()

    class Watched:
        chat_template = None

        def __call__(self, text: str) -> Any:
            threads.append(threading.current_thread().name)
            return own(text)

        def decode(self, *args: Any, **kwargs: Any) -> Any:
            return own.decode(*args, **kwargs)

    model.tokenizer = Watched()
    asyncio.run(model.generate_async("abc", max_new_tokens=2))
    assert threads and set(threads) == {"specdec-prompts_0"}


def test_a_failed_request_is_raised_after_the_others_have_ended(model: Any) -> None:
    def faulty(ids: Any, scores: Any) -> Any:
        if ids.shape[1] > len(PROMPTS[0]) + 4:
            raise ValueError("planted")
        return scores

    async def mixed() -> Any:
        params = [SamplingParams(NEW, logits_processor=[faulty]), SamplingParams(NEW)]
        done = {}
        with pytest.raises(RequestFailedError, match="planted"):
            async for update in model.stream_async(PROMPTS[:2], params):
                done |= {update.index: update.completion} if update.completion is not None else {}
        return done

    done = asyncio.run(mixed())
    assert set(done) == {1} and done[1].token_ids == right(PROMPTS[1])
    assert free_everywhere(model)


@pytest.mark.slow
def test_a_changed_model_refuses_its_call_alone(model: Any) -> None:
    async def changed() -> Any:
        running = asyncio.create_task(model.generate_async(PROMPTS[0], max_new_tokens=60, ignore_eos=True))
        await until(lambda: model.engine.scheduler.running)
        attention = model.hf_model.model.layers[0].self_attn
        attention.scaling *= 2
        with pytest.raises(ModelChangedError):
            await model.generate_async(PROMPTS[1], max_new_tokens=NEW)
        attention.scaling /= 2
        return await running

    assert len(asyncio.run(changed())[0].token_ids) == 60


@pytest.mark.slow
def test_a_check_that_fails_during_the_first_round_refuses_its_call_alone(model: Any) -> None:
    def changed() -> None:
        raise ModelChangedError("planted")

    def make() -> Stream:
        requests, _ = model.stream(PROMPTS[1], max_new_tokens=NEW).hand_over()
        return Stream(leader_of(model).shared, requests, check=changed)

    async def both() -> Any:
        running = asyncio.create_task(model.generate_async(PROMPTS[0], max_new_tokens=60, ignore_eos=True))
        await until(lambda: model.engine.scheduler.running)
        with pytest.raises(ModelChangedError, match="planted"):
            await AsyncStream(leader_of(model), make).completions()
        return await running

    assert len(asyncio.run(both())[0].token_ids) == 60
    assert free_everywhere(model)


def test_close_ends_a_thread_that_has_nothing_to_do(model: Any) -> None:
    asyncio.run(model.generate_async(PROMPTS[0], max_new_tokens=2))
    model.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "specdec-leader"]


def test_close_is_told_to_those_who_wait_and_ends_the_threads(model: Any) -> None:
    async def closed() -> None:
        tasks = [asyncio.create_task(model.generate_async(prompt, ENDLESS)) for prompt in PROMPTS]
        await until(lambda: len(model.engine.scheduler.running) == 3)
        model.close()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in found] == [ClosedModelError] * 6
        with pytest.raises(ClosedModelError):
            await model.generate_async(PROMPTS[0])

    asyncio.run(closed())
    assert not [thread for thread in threading.enumerate() if thread.name == "specdec-leader"]


@pytest.mark.slow
def test_two_event_loops_and_one_that_is_gone(model: Any) -> None:
    async def one(prompt: Any) -> Any:
        return (await model.generate_async(prompt, max_new_tokens=NEW))[0].token_ids

    async def gone() -> None:
        stream = model.stream_async(PROMPTS[2], ENDLESS)
        await anext(stream)
        kept.append(stream)

    kept: list[Any] = []
    found: dict[int, Any] = {}
    asyncio.run(gone())  # its loop is closed while the request runs
    threads = [threading.Thread(target=lambda i=i: found.update({i: asyncio.run(one(PROMPTS[i]))})) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: right(PROMPTS[0]), 1: right(PROMPTS[1])}
    assert asyncio.run(one(PROMPTS[3])) == right(PROMPTS[3])
    end = time.monotonic() + 60
    while model.engine.has_work and time.monotonic() < end:
        time.sleep(0.01)
    assert free_everywhere(model) and kept[0].closed


def test_an_error_from_outside_ends_the_calls_and_the_next_one_works(model: Any) -> None:
    own, planted = model.engine.step, [True]

    def step() -> Any:
        if planted.pop() if planted else False:
            raise TimeoutError("planted")
        return own()

    model.engine.step = step

    async def struck() -> Any:
        with pytest.raises(SpecdecError, match="from outside"):
            await model.generate_async(PROMPTS[0], max_new_tokens=NEW)
        return await model.generate_async(PROMPTS[0], max_new_tokens=NEW)

    assert asyncio.run(struck())[0].token_ids == right(PROMPTS[0])
    assert free_everywhere(model)


def test_a_model_that_was_dropped_is_collected_and_its_thread_ends() -> None:
    model = wrap(tiny_llama())
    asyncio.run(model.generate_async(PROMPTS[0], max_new_tokens=2))
    left = weakref.ref(leader_of(model))
    del model
    end = time.monotonic() + 60
    while left() is not None and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert left() is None


def test_a_long_life_keeps_nothing_of_ended_requests(model: Any) -> None:
    async def several() -> None:
        for _ in range(3):
            await asyncio.gather(*(model.generate_async(prompt, max_new_tokens=2) for prompt in PROMPTS))

    asyncio.run(several())
    call, leader = leader_of(model).call, leader_of(model)
    assert call.places == {} and call.inbox.empty() and not leader.kept
    assert all(not value for name, value in vars(call).items() if name == "_last")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_has_asynchronous_calls_of_its_own(model: Any) -> None:
    async def parent() -> Any:
        stream = model.stream_async(PROMPTS[0], ENDLESS)
        await anext(stream)
        child = get_context("fork").Process(target=in_child, args=(model, stream))
        child.start()
        await stream.aclose()
        await asyncio.to_thread(child.join, 120)
        return child.exitcode

    assert asyncio.run(parent()) == 0
    assert model.generate(PROMPTS[1], max_new_tokens=NEW)[0].token_ids == right(PROMPTS[1])


def in_child(model: Any, stream: Any) -> None:
    """Raises where the parent's stream is not refused, or a new call is not served."""
    with pytest.raises(SpecdecError, match="forked"):
        stream.__anext__().send(None)
    found = asyncio.run(model.generate_async(PROMPTS[1], max_new_tokens=NEW))
    assert found[0].token_ids == right(PROMPTS[1]) and not model.engine.has_work


def test_other_calls_do_not_wait_until_a_long_prompt_is_tokenised(model: Any) -> None:
    """Long texts are read on a thread of their own, be they in messages, tools, or many prompts."""
    began, goes_on = threading.Event(), threading.Event()

    class Slow(LetterTokenizer):
        chat_template = "{{ messages }}"

        def __call__(self, text: str, **options: Any) -> Any:
            if len(text) > 1000:
                began.set()
                assert goes_on.wait(60)
            return super().__call__(text, **options)

        def apply_chat_template(self, messages: Any, tokenize: bool = True, tools: Any = (), **options: Any) -> Any:
            text = "".join([*(each["content"] for each in messages), *(each["name"] for each in tools)])
            return self(text) if tokenize else text

    model.tokenizer = Slow()

    async def run(*prompt: Any, **options: Any) -> None:
        began.clear(), goes_on.clear()
        slow = asyncio.create_task(model.generate_async(*prompt, max_new_tokens=2, **options))
        assert await asyncio.to_thread(began.wait, 60)
        done = await asyncio.wait_for(model.generate_async("ab", max_new_tokens=2), 60)
        assert len(done[0].token_ids) == 2
        goes_on.set()
        await asyncio.gather(slow, return_exceptions=True)

    chat, text = [{"role": "user", "content": "ab"}], "ab " * 30_000
    for prompt in ([{"role": "user", "content": text}], text, ["a"] * 101 + ["ab " * 500], ["a", text]):
        asyncio.run(run(prompt))
    asyncio.run(run(chat, tools=[{"name": text}]))


def test_other_calls_do_not_wait_until_a_grammar_is_compiled(model: Any) -> None:
    """Calls with grammars are read on a thread of their own."""
    began, goes_on = threading.Event(), threading.Event()

    stream = model.stream

    def slow(prompts: Any, params: Any, **options: Any) -> Any:
        if params is not None and params.grammar is not None:
            began.set()
            assert goes_on.wait(60)
        return stream(prompts, params, **options)

    model.stream = slow

    async def run() -> None:
        params = SamplingParams(2, grammar=Grammar.regex("a"))
        first = asyncio.create_task(model.generate_async(PROMPTS[0], params))
        assert await asyncio.to_thread(began.wait, 60)
        done = await asyncio.wait_for(model.generate_async(PROMPTS[1], max_new_tokens=2), 60)
        assert len(done[0].token_ids) == 2
        goes_on.set()
        await asyncio.gather(first, return_exceptions=True)

    asyncio.run(run())
