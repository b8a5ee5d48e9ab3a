"""What came from outside is told from what failed by itself."""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from specdec.interrupts import interrupt_in, interrupts_as_they_are, is_from_outside, is_from_signal


class Limit(Exception):
    """As a task queue's soft time limit."""


def raise_it(number: int, frame: Any) -> None:
    raise Limit("late")


class Handler:
    def __call__(self, *given: Any) -> None:
        raise Limit("late")

    def method(self, number: int, frame: Any) -> None:
        raise Limit("late")


def put_back_first(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise_it(0, None)


HANDLERS: dict[str, Callable[..., Any]] = {
    "function": raise_it,
    "partial": partial(lambda _, number, frame: raise_it(number, frame), 1),
    "object": Handler(),
    "method": Handler().method,
    "no longer in place": put_back_first,
}


def struck(handler: Any, busy: Callable[[], object]) -> BaseException:
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(Limit) as caught:
            signal.setitimer(signal.ITIMER_REAL, 0.005)  # inside: on a busy machine it may strike at once
            while True:
                busy()
    finally:
        signal.signal(signal.SIGALRM, before)
    return caught.value


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
@pytest.mark.parametrize("name", HANDLERS)
@pytest.mark.parametrize("busy", [partial(time.sleep, 0.1), lambda: sum(range(100))])
def test_a_handlers_exception_is_known(name: str, busy: Callable[[], object]) -> None:
    error = struck(HANDLERS[name], busy)
    assert is_from_signal(error) and is_from_outside(error)


def test_an_exception_that_another_thread_sets_is_known_without_arguments() -> None:
    found: list[BaseException] = []

    def run() -> None:
        try:
            while True:
                sum(range(100))
        except Limit as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Limit))
    thread.join(10)
    (error,) = found
    assert is_from_outside(error) and not is_from_signal(error)


@pytest.mark.parametrize("fail", [lambda: int("x"), lambda: [][1], lambda: {}["x"], lambda: raise_it(1, None)])
def test_a_failure_is_none(fail: Callable[[], object]) -> None:
    with pytest.raises(Exception) as caught:
        fail()
    assert not is_from_outside(caught.value) and interrupt_in(caught.value) is None


def test_raised_without_words_by_a_raise_statement() -> None:
    with pytest.raises(TimeoutError) as caught:
        raise TimeoutError
    assert not is_from_outside(caught.value)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
def test_what_was_made_of_it_is_raised_as_it_was() -> None:
    error = struck(raise_it, partial(time.sleep, 0.1))

    def wrapping() -> None:
        try:
            raise error
        except Limit as inner:
            raise ValueError("cannot load") from inner

    with pytest.raises(Limit) as caught, interrupts_as_they_are():
        wrapping()
    assert caught.value is error
    with pytest.raises(ValueError, match="another"), interrupts_as_they_are():
        raise ValueError("another")
