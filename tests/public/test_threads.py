"""Callers on any thread share one model; nobody's fault, interrupt or absence harms another's request."""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import LetterTokenizer, free_everywhere, hf_greedy, random_prompts, table_head, tiny_llama, wrap

from specdec import SamplingParams, SpecdecError
from specdec.engine import sharing
from tests.public import soak_threads

PROMPTS = random_prompts((5, 33, 1, 17, 60, 9, 12, 25))
NEW = 24
GREEDY = SamplingParams(max_new_tokens=NEW)
LONG = SamplingParams(max_new_tokens=120, ignore_eos=True, num_speculative_tokens=0)
PATIENCE = 120.0


def right(i: int, new: int = NEW) -> list[int]:
    return hf_greedy(PROMPTS[i], NEW)[:new]


class Hooked(LetterTokenizer):
    """Calls `hook` with the ids before each decoding."""

    hook: Callable[[list[int]], object] | None = None

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        if self.hook is not None:
            self.hook(token_ids)
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


def model_with(tokenizer: Any = None, **options: Any) -> Any:
    target = tiny_llama()
    options = {"num_speculative_tokens": 3, **({"tokenizer": tokenizer} if tokenizer else {}), **options}
    return wrap(target, table_head(target), **options)


def in_threads(*jobs: Callable[[], object]) -> list[Any]:
    """Run jobs at once and return what they returned; the first exception of one is raised, a hang is a failure."""
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = jobs[i]()
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(jobs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE)
    assert not any(worker.is_alive() for worker in workers), "a thread waits for ever"
    if errors:
        raise errors[0]
    return results


def tokens_of(model: Any, i: int, **options: Any) -> list[int]:
    return model.generate(PROMPTS[i], SamplingParams(**{"max_new_tokens": NEW, **options}))[0].token_ids


def starts_with_output_of(i: int, ids: list[int]) -> bool:
    """Whether ids, of at least four tokens, are the first ones of what prompt i gives."""
    return len(ids) >= 4 and ids == right(i)[: len(ids)]


@pytest.mark.slow
def test_threads_get_what_each_gets_alone() -> None:
    model = model_with()

    def job(k: int) -> list[list[int]]:
        return [tokens_of(model, (k + j) % 8) for j in range(4)]

    found = in_threads(*(lambda k=k: job(k) for k in range(8)))
    assert found == [[right((k + j) % 8) for j in range(4)] for k in range(8)]
    assert free_everywhere(model)
    assert tokens_of(model, 3) == right(3), "one thread alone, after"


@pytest.mark.slow
def test_requests_of_threads_share_rounds() -> None:
    model = model_with(max_num_seqs=8, max_num_batched_tokens=64)
    tokens_of(model, 0)
    alone = model.engine_stats.rounds
    in_threads(*(lambda: tokens_of(model, 0) for _ in range(8)))
    assert model.engine_stats.rounds - alone < 6 * alone


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "requests"), [("tiny", 9), pytest.param("built_in", 10, marks=pytest.mark.long)])
@pytest.mark.thorough
def test_a_short_soak(kind: str, requests: int) -> None:
    """The driver of soak_threads.py: requests of all kinds, cancels and faults from 8 threads."""
    soak = getattr(soak_threads, kind)()
    figures = soak.run(threads=8, requests=requests, timeout_s=PATIENCE)
    assert (figures["wrong"], figures["unexpected"], figures["hung"]) == (0, 0, 0), figures
    assert {"greedy", "sampled", "cancelled", "refused", "faulty"} <= figures.keys()
    gc.collect()
    assert free_everywhere(soak.model)


@pytest.mark.slow
def test_a_paused_stream_stops_nobody() -> None:
    model = model_with()
    paused = model.stream(PROMPTS[0], GREEDY)
    first = next(paused)
    assert in_threads(lambda: tokens_of(model, 1), lambda: tokens_of(model, 2)) == [right(1), right(2)]
    other = model.stream(PROMPTS[3], GREEDY)
    assert [t for update in other for t in update.token_ids] == right(3)
    rest = in_threads(lambda: [t for update in paused for t in update.token_ids])[0]
    assert first.token_ids + rest == right(0)
    assert free_everywhere(model)


@pytest.mark.slow
def test_from_asyncio() -> None:
    model = model_with()

    async def main() -> list[list[int]]:
        return await asyncio.gather(*(asyncio.to_thread(tokens_of, model, i) for i in range(8)))

    assert asyncio.run(asyncio.wait_for(main(), PATIENCE)) == [right(i) for i in range(8)]


@pytest.mark.slow
@pytest.mark.thorough
def test_generate_while_iterating_a_stream_on_many_threads() -> None:
    model = model_with(max_num_seqs=6, max_num_batched_tokens=32)

    def job(i: int) -> list[int]:
        tokens: list[int] = []
        for update in model.stream(PROMPTS[i], GREEDY):
            tokens += update.token_ids
            assert tokens_of(model, (i + 1) % 8, max_new_tokens=3) == right((i + 1) % 8, 3)
        return tokens

    assert in_threads(*(lambda i=i: job(i) for i in range(4))) == [right(i) for i in range(4)]


@pytest.mark.slow
def test_streams_closed_or_dropped_on_another_thread_end_only_their_own() -> None:
    model = model_with(max_num_seqs=6, max_num_batched_tokens=32)
    streams = [model.stream(PROMPTS[i], GREEDY) for i in range(4)]
    for stream in streams:
        next(stream)

    def end_them() -> None:
        streams.pop().close()
        streams.pop()
        gc.collect()

    found = in_threads(lambda: tokens_of(model, 5), end_them, lambda: tokens_of(model, 6))
    assert found == [right(5), None, right(6)]
    for i, stream in enumerate(streams):
        rest = [t for update in stream for t in update.token_ids]
        assert rest and rest == right(i)[-len(rest) :]
    assert free_everywhere(model)


def test_closing_a_stream_that_another_thread_waits_on_ends_it_there() -> None:
    model = model_with()
    stream, began = model.stream(PROMPTS[0], SamplingParams(max_new_tokens=60)), threading.Event()

    def read() -> int:
        count = 0
        for _ in stream:
            count += 1
            began.set()
        return count

    def close() -> None:
        began.wait(PATIENCE)
        stream.close()

    count, _ = in_threads(read, close)
    assert 1 <= count < 60
    assert tokens_of(model, 1) == right(1)
    assert free_everywhere(model)


@pytest.mark.slow
def test_a_stream_may_be_closed_inside_a_round() -> None:
    """As a finalizer does that strikes while the thread is in one."""
    tokenizer = Hooked()
    model = model_with(tokenizer)
    doomed = [model.stream(PROMPTS[i], GREEDY) for i in (0, 1)]
    for stream in doomed:
        next(stream)

    def hook(ids: list[int]) -> None:
        if doomed:
            doomed.pop().close()
            doomed.pop()
            gc.collect()

    tokenizer.hook = hook
    assert in_threads(lambda: tokens_of(model, 2)) == [right(2)]
    assert not doomed and free_everywhere(model)


def test_the_model_called_from_inside_a_round_is_refused_and_harms_nobody() -> None:
    tokenizer = Hooked()
    model = model_with(tokenizer)

    def hook(ids: list[int]) -> None:
        if starts_with_output_of(0, ids):
            model.generate(PROMPTS[2], GREEDY)

    tokenizer.hook = hook
    with pytest.raises(SpecdecError, match="inside one of its own rounds"):
        in_threads(lambda: tokens_of(model, 0))
    tokenizer.hook = None
    assert tokens_of(model, 1) == right(1)
    assert free_everywhere(model)


class Planted(Exception):
    pass


@pytest.mark.slow
def test_a_tokenizer_that_raises_for_a_request_ends_that_request_alone() -> None:
    tokenizer = Hooked()
    model = model_with(tokenizer)

    def hook(ids: list[int]) -> None:
        if starts_with_output_of(0, ids):
            raise Planted("no text for these ids")

    tokenizer.hook = hook

    def faulty() -> SpecdecError:
        with pytest.raises(SpecdecError, match="Planted: no text for these ids") as caught:
            tokens_of(model, 0)
        return caught.value

    error, *others = in_threads(faulty, *(lambda i=i: tokens_of(model, i) for i in (1, 3, 5, 6)))
    assert others == [right(i) for i in (1, 3, 5, 6)]
    assert isinstance(error.__cause__, Planted)
    done = {}
    with pytest.raises(SpecdecError, match="Planted"):
        done.update((i, c.token_ids) for i, c in model.generate_iter([PROMPTS[i] for i in (1, 0, 3)], GREEDY))
    assert done == {0: right(1), 2: right(3)}, "its neighbours in the same call are finished before the error is raised"
    assert free_everywhere(model)


def test_stop_strings_that_cannot_be_looked_for_end_their_own_request() -> None:
    tokenizer = Hooked()
    model = model_with(tokenizer)
    neighbour = model.stream(PROMPTS[1], GREEDY)
    first = next(neighbour).token_ids
    armed = threading.Event()

    def hook(ids: list[int]) -> None:
        if starts_with_output_of(0, ids) and armed.is_set():
            raise Planted

    tokenizer.hook = hook
    armed.set()
    with pytest.raises(SpecdecError):
        tokens_of(model, 0, stop=("zzzzzzzz",))
    assert first + [t for update in neighbour for t in update.token_ids] == right(1)


def test_a_parameter_that_fits_no_row_ends_its_own_request() -> None:
    model = model_with()
    neighbour = model.stream(PROMPTS[1], GREEDY)
    first = next(neighbour).token_ids
    with pytest.raises(SpecdecError):
        tokens_of(model, 0, temperature=1.0, top_k=2**31)
    assert first + [t for update in neighbour for t in update.token_ids] == right(1)
    assert free_everywhere(model)


def test_a_round_that_fails_ends_what_was_in_it_and_no_more() -> None:
    model = model_with(max_num_seqs=2)
    fail = threading.Event()

    failed: list[int] = []

    def hook(*_: object) -> None:
        if fail.is_set():
            failed.append(1)
            if len(failed) == 2:
                fail.clear()
            raise RuntimeError("the device is gone")

    model.hf_model.register_forward_pre_hook(hook)
    running, waiting = [model.stream(PROMPTS[i], GREEDY) for i in (0, 1)], model.stream(PROMPTS[2], GREEDY)
    for stream in running:
        next(stream)

    def read(stream: Any) -> Any:
        try:
            return [t for update in stream for t in update.token_ids]
        except SpecdecError as error:
            return error

    found: list[Any] = []
    waiter = threading.Thread(target=lambda: found.append(read(waiting)), daemon=True)
    fail.set()
    errors = [read(running[0])]
    waiter.start()
    errors.append(read(running[1]))
    waiter.join(PATIENCE)
    assert found == [right(2)] and len(failed) == 2
    assert all(isinstance(e, SpecdecError) and "the device is gone" in str(e) for e in errors)
    assert all(isinstance(e.__cause__, RuntimeError) for e in errors) and errors[0] is not errors[1]
    assert free_everywhere(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "options"),
    [
        pytest.param(place, options, marks=[pytest.mark.long] * (bool(options) and place != "arrays"))
        for place in ("forward", "text", "after the forward", "arrays")
        for options in ({}, {"num_speculative_tokens": 0}, {"kv_cache_tokens": 104})
    ],
)
@pytest.mark.cases(1)
def test_an_interrupt_in_one_thread_costs_the_others_nothing(place: str, options: dict[str, int]) -> None:
    tokenizer = Hooked()
    model = model_with(tokenizer, max_num_batched_tokens=24, **options)
    me, struck = threading.get_ident(), []

    def strike(*_: object) -> None:
        if armed and threading.get_ident() == me and len(struck) < 6:
            count[0] += 1
            if count[0] % 3 == 0:
                struck.append(place)
                raise KeyboardInterrupt

    count, armed = [0], []
    tokenizer.hook = strike if place == "text" else None
    if place == "forward":
        model.hf_model.register_forward_pre_hook(strike)
    if place == "after the forward":
        model.hf_model.register_forward_hook(strike)
    if place == "arrays":
        model.hf_model.get_input_embeddings().register_forward_hook(strike)
    others = [model.stream(PROMPTS[i], SamplingParams(max_new_tokens=NEW)) for i in (1, 3, 4)]
    tokens: list[list[int]] = [next(stream).token_ids for stream in others]
    armed.append(True)
    while len(struck) < 6:
        with pytest.raises(KeyboardInterrupt):
            while True:
                tokens_of(model, 0)
    for row, stream in zip(tokens, others, strict=True):
        row += in_threads(lambda s=stream: [t for update in s for t in update.token_ids])[0]
    assert tokens == [right(i) for i in (1, 3, 4)]
    assert tokens_of(model, 0) == right(0)
    assert free_everywhere(model)


@pytest.mark.slow
@pytest.mark.thorough
def test_interrupts_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real signal, at random moments, in the thread that runs most of the rounds."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        pytest.skip("signals are delivered to the main thread")
    model, stop, rng = model_with(max_num_seqs=4, max_num_batched_tokens=32), threading.Event(), random.Random(3)
    found: list[bool] = []
    errors: list[BaseException] = []

    def neighbour(k: int) -> None:
        try:
            while not stop.is_set():
                found.append(tokens_of(model, k % 8) == right(k % 8))
                k += 1
        except BaseException as error:
            errors.append(error)

    def on_alarm(*_: object) -> None:
        raise KeyboardInterrupt

    right(0)
    lost = list[type[BaseException]]()  # struck in a finalizer, where Python says so and goes on
    monkeypatch.setattr(sys, "unraisablehook", lambda given: lost.append(given.exc_type))
    before = signal.signal(signal.SIGALRM, on_alarm)
    neighbours = [threading.Thread(target=neighbour, args=(k,), daemon=True) for k in (1, 4)]
    struck = 0
    try:
        for worker in neighbours:
            worker.start()
        for done in range(60):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.001, 0.08))
                while struck + len(lost) == done:
                    tokens_of(model, 0)
            except KeyboardInterrupt:
                struck += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    stop.set()
    for worker in neighbours:
        worker.join(PATIENCE)
    assert not any(worker.is_alive() for worker in neighbours), "a thread waits for ever"
    assert struck + len(lost) == 60 and struck > 50 and not errors and found and all(found)
    assert tokens_of(model, 0) == right(0)
    gc.collect()
    assert free_everywhere(model)


@pytest.mark.slow
@pytest.mark.thorough
def test_two_models_over_one_target_and_its_own_generate_on_other_threads() -> None:
    """A forward of a round and another one through the same modules must not meet: masks, caches, aux hidden states."""
    target = tiny_llama()
    ids = torch.tensor([[0] * 4 + PROMPTS[5], PROMPTS[5] + [3] * 4])
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    own = target.generate(ids, **options).tolist()
    models = [wrap(target, table_head(target), num_speculative_tokens=3), wrap(target, num_speculative_tokens=0)]

    def users() -> list[Any]:
        return [target.generate(ids, **options).tolist() for _ in range(4)]

    def job(model: Any) -> list[list[int]]:
        return [tokens_of(model, j) for j in range(4)]

    *rounds, first, second = in_threads(*(lambda m=m: job(m) for m in models * 2), users, users)
    assert rounds == [[right(j) for j in range(4)]] * 4
    assert first == second == [own] * 4


@pytest.mark.slow
def test_an_interrupted_forward_of_the_users_own_does_not_block_the_rounds() -> None:
    model = model_with()
    fail = threading.Event()
    done = threading.Event()

    def hook(*_: object) -> None:
        if fail.is_set():
            fail.clear()
            raise KeyboardInterrupt

    model.hf_model.get_input_embeddings().register_forward_pre_hook(hook)

    def users() -> None:
        fail.set()
        with pytest.raises(KeyboardInterrupt):
            model.hf_model(torch.tensor([PROMPTS[0]]))
        done.set()
        finished.wait(PATIENCE)

    def rounds() -> list[int]:
        done.wait(PATIENCE)
        try:
            return tokens_of(model, 1)
        finally:
            finished.set()

    finished = threading.Event()
    assert in_threads(users, rounds)[1] == right(1)


@pytest.mark.slow
@pytest.mark.thorough
def test_facts_and_counters_may_be_read_while_rounds_run() -> None:
    model = model_with()
    going = threading.Event()
    going.set()

    def watch() -> int:
        rounds = [0]
        while going.is_set():
            assert model.describe()["vocab_size"] == 64
            rounds.append(model.engine_stats.rounds)
            assert rounds[-1] >= rounds[-2]
            time.sleep(0.001)
        return rounds[-1]

    def work() -> list[int]:
        try:
            return [tokens_of(model, j) for j in range(8)][-1]
        finally:
            going.clear()

    seen, found = in_threads(watch, work)
    assert found == right(7) and seen > 0


@pytest.mark.slow
@pytest.mark.thorough
def test_rounds_are_the_same_whoever_runs_them() -> None:
    """Autocast belongs to a thread: a caller's must not reach its neighbours' tokens."""
    model = model_with()

    def under_autocast() -> list[list[int]]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return [tokens_of(model, j) for j in range(8)]

    def plain() -> list[list[int]]:
        return [tokens_of(model, j) for j in range(8)]

    assert in_threads(under_autocast, plain) == [[right(j) for j in range(8)]] * 2


class SlowToWake:
    """A lock that this thread gets a third of a second after it is free: others ask for it again meanwhile."""

    def __init__(self) -> None:
        self._lock, self._slow = threading.Lock(), threading.get_ident()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> None:
        if threading.get_ident() == self._slow:
            time.sleep(0.3)
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class Beside:
    """Threads that generate, in rounds of 20 ms, which are counted while somebody asks the model for something."""

    def __init__(self, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(sharing, "threading", SimpleNamespace(Lock=SlowToWake))
            monkeypatch.setattr(sharing, "_LONGEST_TURN", 5.0)
            self.model = model_with(max_num_seqs=8, max_num_batched_tokens=64)
        step, self._asking, self._begun = self.model.engine.step, False, 0
        self.ended: list[str] = []

        def paced() -> Any:
            self._begun += self._asking
            time.sleep(0.02)
            return step()

        monkeypatch.setattr(self.model.engine, "step", paced)
        self._callers = [threading.Thread(target=self._generate, daemon=True) for _ in range(threads)]
        for caller in self._callers:
            caller.start()
        until = time.monotonic() + PATIENCE
        while self.model.usage().running < threads:
            assert time.monotonic() < until and not self.ended
            time.sleep(0.01)

    def _generate(self) -> None:
        try:
            self.model.generate(PROMPTS[2], LONG)
        except SpecdecError as error:
            self.ended.append(type(error).__name__)

    def rounds_until(self, job: Callable[[], object]) -> int:
        """How many rounds begin before `job` is done."""
        self._begun, self._asking = 0, True
        job()
        self._asking = False
        return self._begun

    def join(self) -> list[str]:
        """Wait for all callers; how each has ended."""
        for caller in self._callers:
            caller.join(PATIENCE)
        return self.ended


@pytest.mark.slow
@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.thorough
def test_who_wants_the_engine_waits_for_a_round_and_not_for_the_requests_of_others(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock alone goes to whoever has just let go of it: these calls took as long as the requests of the others."""
    beside = Beside(threads, monkeypatch)
    assert max(beside.rounds_until(beside.model.usage) for _ in range(3)) <= 8
    one = SamplingParams(max_new_tokens=1)
    assert beside.rounds_until(lambda: beside.model.generate(PROMPTS[2], one)) <= 12
    assert beside.model.usage().running == threads  # the others go on all the while
    beside.model.close()
    assert beside.join() == ["ClosedModelError"] * threads


@pytest.mark.slow
def test_closing_waits_for_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = Beside(3, monkeypatch)
    assert beside.rounds_until(beside.model.close) <= 8
    assert beside.join() == ["ClosedModelError"] * 3


@pytest.mark.slow
@pytest.mark.thorough
def test_the_wait_for_others_counts_as_time_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = Beside(1, monkeypatch)
    (answer,) = beside.model.generate(PROMPTS[2], SamplingParams(max_new_tokens=1))
    assert 0.3 <= answer.stats.queue_s < 2
    beside.model.close()
    assert beside.join() == ["ClosedModelError"]


@pytest.mark.slow
def test_who_was_interrupted_in_the_line_is_waited_for_once() -> None:
    """It could not step out."""
    model = model_with()
    stream = model.stream(PROMPTS[0], GREEDY)
    next(stream)
    line = vars(vars(model)["_shared"])["_line"]
    line[-1] = SimpleQueue()
    began = time.perf_counter()
    in_threads(lambda: next(stream))
    assert 0.1 < time.perf_counter() - began < PATIENCE and line == {}
    stream.close()
    assert model.generate(PROMPTS[0], GREEDY)[0].token_ids == right(0)


@pytest.mark.slow
@pytest.mark.parametrize(("visitors", "seconds"), [(12, 0.0), (2, 0.005)])
@pytest.mark.cases(1)
def test_visitors_who_come_again_and_again_stop_no_rounds(visitors: int, seconds: float) -> None:
    """Short ones, and ones that let other threads run while they have the engine."""
    model, done = model_with(max_num_seqs=8, max_num_batched_tokens=64), threading.Event()
    visit_engine = vars(model)["_shared"].between_rounds

    def visit() -> None:
        while not done.is_set():
            with visit_engine():
                time.sleep(seconds)

    def generate() -> tuple[list[int], float]:
        began = time.perf_counter()
        try:
            return list(model.generate(PROMPTS[0], GREEDY)[0].token_ids), time.perf_counter() - began
        finally:
            done.set()

    *_, (tokens, took) = in_threads(*[visit] * visitors, generate)
    assert tokens == right(0) and took < 20
