"""Exceptions that signal handlers and other threads raise: each ends the call that it struck, as it is."""

from __future__ import annotations

import ctypes
import gc
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from fakes import LetterTokenizer, free_everywhere, hf_greedy, random_prompts, table_head, tiny_llama, wrap
from transformers import LlamaForCausalLM

from specdec import RoundFailedError, SamplingParams, SpeculativeModel

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")

PROMPTS = random_prompts((5, 33, 1, 17, 60, 9, 12, 25))
NEW = 24
GREEDY = SamplingParams(max_new_tokens=NEW)
PATIENCE = 60.0


class SoftTimeLimitExceeded(Exception):
    """As celery's."""


class Failure(RuntimeError):
    """Of a kind that models raise, too."""


def right(i: int) -> list[int]:
    return hf_greedy(PROMPTS[i], NEW)


def tokens_of(model: Any, i: int) -> list[int]:
    return list(model.generate(PROMPTS[i], GREEDY)[0].token_ids)


def model_with(tokenizer: Any = None, **options: Any) -> Any:
    target = tiny_llama()
    return wrap(
        target, table_head(target), num_speculative_tokens=3, tokenizer=tokenizer or LetterTokenizer(), **options
    )


def alarm(kind: type[BaseException], seconds: float) -> None:
    """Raise an exception of this class on the main thread, by a signal handler."""

    def on_alarm(number: int, frame: Any) -> None:
        raise kind("time is up")

    signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def set_on(thread: int, kind: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


@contextmanager
def swallowed() -> Iterator[list[type[BaseException]]]:
    """Exceptions that struck in a finalizer, where Python says so and goes on: nobody can see them."""
    found = list[type[BaseException]]()
    with patch.object(sys, "unraisablehook", lambda given: found.append(given.exc_type)):
        yield found


class Caller:
    """Generates on a thread of its own, and counts how calls end; of an exception that is expected it says so."""

    def __init__(self, model: Any, first: int) -> None:
        self._model, self._next = model, first
        self.answers, self.wrong, self.ended = 0, list[int](), Counter[str]()
        self.stop, self.struck, self.going = threading.Event(), threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.stop.is_set():
            try:
                while not self.stop.is_set():
                    self._call(self._next % 8)
            except BaseException as error:
                self.ended[type(error).__name__] += 1
                self.going.clear()
                self.struck.set()

    def _call(self, i: int) -> None:
        self.going.set()
        tokens = tokens_of(self._model, i)
        self._next += 1
        self.answers += 1
        if tokens != right(i):
            self.wrong.append(i)


def strike_main(model: Any, kind: type[BaseException], seconds: float) -> str:
    """How the call ends that an alarm strikes on this thread."""
    try:
        with swallowed() as lost:
            alarm(kind, seconds)
            while True:
                for i in range(8):
                    assert tokens_of(model, i) == right(i)
                if lost:
                    lost.clear()
                    alarm(kind, seconds)
    except BaseException as error:
        return type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def strike_other(caller: Caller, kind: type[BaseException], seconds: float) -> str:
    """How the call ends in which a thread is, when another sets an exception there."""
    assert caller.going.wait(PATIENCE), "it waits for ever"
    time.sleep(seconds)
    before, until = Counter(caller.ended), time.monotonic() + PATIENCE
    caller.struck.clear()
    with swallowed() as lost:
        set_on(caller.thread.ident or 0, kind)
        while not caller.struck.wait(0.05):
            assert time.monotonic() < until, "it never came"
            if lost:
                lost.clear()
                set_on(caller.thread.ident or 0, kind)
    (name,) = (caller.ended - before).elements()
    return name


def episodes(count: int, seed: int) -> tuple[list[tuple[str, str, str]], list[Caller]]:
    """(where, what was raised, how the call ended) of exceptions at random moments; and the other threads, at rest."""
    rng, found = random.Random(seed), []
    model = model_with(max_num_seqs=4, max_num_batched_tokens=32)
    for i in range(8):
        assert tokens_of(model, i) == right(i)
    kinds: list[type[BaseException]] = [TimeoutError, SoftTimeLimitExceeded, Failure, KeyboardInterrupt]
    before = signal.getsignal(signal.SIGALRM)
    callers = [Caller(model, k) for k in (1, 4)]
    try:
        for k in range(count):
            kind, seconds = kinds[k % 4], rng.uniform(0.001, 0.08)
            if k % 8 < 4:
                found.append(("alarm on the main thread", kind.__name__, strike_main(model, kind, seconds)))
            else:
                caller = callers[k // 8 % 2]
                found.append(("set on another thread", kind.__name__, strike_other(caller, kind, seconds)))
    finally:
        signal.signal(signal.SIGALRM, before)
        for caller in callers:
            caller.stop.set()
        for caller in callers:
            caller.thread.join(PATIENCE)
    assert not any(caller.thread.is_alive() for caller in callers), "a thread waits for ever"
    assert [tokens_of(model, i) for i in range(8)] == [right(i) for i in range(8)]
    gc.collect()
    assert free_everywhere(model)
    return found, callers


@pytest.mark.slow
@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.thorough
def test_each_ends_the_call_that_it_struck_and_no_other(count: int) -> None:
    found, callers = episodes(count, seed=7)
    assert [entry for entry in found if entry[1] != entry[2]] == [] and len(found) == count
    ended = sum((caller.ended for caller in callers), Counter[str]())
    assert ended == Counter(kind for where, kind, _ in found if where == "set on another thread")
    assert all(caller.answers and not caller.wrong for caller in callers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "kind"),
    [
        pytest.param(place, kind, marks=[pytest.mark.long] * ((i + j) % 2))
        for i, place in enumerate(("forward", "__init__"))
        for j, kind in enumerate((TimeoutError, SoftTimeLimitExceeded, Failure))
    ],
)
@pytest.mark.cases(1)
def test_at_load(place: str, kind: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the model is built; in the forward of the probe, of the small copy and of the self-test."""
    tiny_llama().save_pretrained(tmp_path)
    before = signal.getsignal(signal.SIGALRM)
    real, calls = getattr(LlamaForCausalLM, place), []

    def struck(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == strike_at:
            signal.raise_signal(signal.SIGALRM)
        return real(*args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, place, struck)
    try:
        alarm(kind, 0)
        for strike_at in (1, 2, 5):
            calls.clear()
            with pytest.raises(kind, match="time is up"):
                SpeculativeModel.from_pretrained(
                    tmp_path, tokenizer=LetterTokenizer(), num_speculative_tokens=0, device="cpu"
                )
                assert len(calls) < strike_at
                raise kind("time is up: so often it is not called")
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.cases(1)
def test_a_fault_that_comes_again_ends_the_requests_of_its_round(threads: int) -> None:
    """And is run a second time, not without end."""
    model, failed = model_with(max_num_batched_tokens=24), []
    streams = [model.stream(PROMPTS[i], GREEDY) for i in range(threads)]
    for stream in streams:
        next(stream)

    def fail(*_: object) -> None:
        failed.append(1)
        raise Failure("the device is gone")

    handle = model.hf_model.register_forward_pre_hook(fail)
    for stream in streams:
        with pytest.raises(RoundFailedError, match=f"the device is gone; the {threads} requests") as caught:
            list(stream)
        assert isinstance(caught.value.__cause__, Failure)
    assert len(failed) == 2
    handle.remove()
    assert tokens_of(model, 0) == right(0) and free_everywhere(model)


def test_a_fault_of_one_request_in_the_batch_does_not_end_calls_one_by_one() -> None:
    """It shows when that request has a row again: the prompts of the others are read before, in rounds of 24 tokens."""
    model, failed, rounds = model_with(max_num_seqs=4, max_num_batched_tokens=24), list[int](), list[int]()
    params = SamplingParams(max_new_tokens=50, num_speculative_tokens=0)
    streams = [model.stream(PROMPTS[i], params) for i in (4, 1, 7, 5)]
    for stream in streams:
        next(stream)

    def fail(*_: object) -> None:
        rounds.append(1)
        if any(request.prompt_len == len(PROMPTS[5]) for request in model.engine.scheduler.running):
            failed.append(len(rounds))
            raise Failure("this request")

    model.hf_model.register_forward_pre_hook(fail)
    for stream in streams:
        with pytest.raises(RoundFailedError, match="this request; the 4 requests"):
            list(stream)
    assert len(failed) == 2 and failed[1] > failed[0] + 2


def test_an_exception_raised_once_ends_the_call_that_runs_the_round() -> None:
    model, armed = model_with(), []
    other, struck = (model.stream(PROMPTS[i], GREEDY) for i in (1, 4))
    tokens = list(next(other).token_ids)
    next(struck)

    def once(*_: object) -> None:
        if armed:
            raise armed.pop()

    model.hf_model.register_forward_pre_hook(once)
    armed.append(error := Failure("once"))
    with pytest.raises(Failure) as caught:
        list(struck)
    assert caught.value is error
    assert tokens + [t for update in other for t in update.token_ids] == right(1)
    assert free_everywhere(model)


class StruckTokenizer(LetterTokenizer):
    """Of the text of another request: an exception from outside there ends that request no more than any other."""

    armed: list[BaseException]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        if self.armed:
            raise self.armed.pop()
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


def test_an_exception_raised_once_in_the_text_of_a_request() -> None:
    tokenizer = StruckTokenizer()
    tokenizer.armed = []
    model = model_with(tokenizer=tokenizer)
    other, struck = (model.stream(PROMPTS[i], GREEDY) for i in (1, 4))
    tokens = list(next(other).token_ids)
    next(struck)
    tokenizer.armed.append(Failure("once"))
    with pytest.raises(Failure, match="once"):
        list(struck)
    assert tokens + [t for update in other for t in update.token_ids] == right(1)
    assert free_everywhere(model)


if __name__ == "__main__":
    results, others = episodes(int(sys.argv[1]), seed=int(sys.argv[2]))
    for entry, times in sorted(Counter(results).items()):
        print(times, *entry, sep=" | ")
    for other in others:
        print("another thread:", other.answers, "answers,", len(other.wrong), "wrong, ended by", dict(other.ended))
