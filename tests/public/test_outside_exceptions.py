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
from typing import Any

import pytest
from fakes import LetterTokenizer, free_everywhere, hf_greedy, random_prompts, table_head, tiny_llama, wrap

from specdec import SamplingParams

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
        alarm(kind, seconds)
        while True:
            for i in range(8):
                assert tokens_of(model, i) == right(i)
    except BaseException as error:
        return type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def strike_other(caller: Caller, kind: type[BaseException], seconds: float) -> str:
    """How the call ends in which a thread is, when another sets an exception there."""
    assert caller.going.wait(PATIENCE), "it waits for ever"
    time.sleep(seconds)
    before = Counter(caller.ended)
    caller.struck.clear()
    set_on(caller.thread.ident or 0, kind)
    assert caller.struck.wait(PATIENCE), "it never came"
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
def test_each_ends_the_call_that_it_struck_and_no_other(count: int) -> None:
    found, callers = episodes(count, seed=7)
    assert [entry for entry in found if entry[1] != entry[2]] == [] and len(found) == count
    ended = sum((caller.ended for caller in callers), Counter[str]())
    assert ended == Counter(kind for where, kind, _ in found if where == "set on another thread")
    assert all(caller.answers and not caller.wrong for caller in callers)


if __name__ == "__main__":
    results, others = episodes(int(sys.argv[1]), seed=int(sys.argv[2]))
    for entry, times in sorted(Counter(results).items()):
        print(times, *entry, sep=" | ")
    for other in others:
        print("another thread:", other.answers, "answers,", len(other.wrong), "wrong, ended by", dict(other.ended))
