"""Exceptions from outside: raised by a signal handler, or by another thread, in whatever a thread was doing.

KeyboardInterrupt is one by its class. Any other class (TimeoutError of an alarm, a time limit of a task queue) looks
like a failure of the code that it struck, which may be anybody's. It is for the caller, whose `except` names it.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from traceback import walk_tb
from types import FrameType

_RAISING = ("RAISE_VARARGS", "RERAISE")
_RAISED_WITHOUT_WORDS = (MemoryError, StopIteration)
"""By Python's own functions."""


def is_from_signal(error: BaseException) -> bool:
    """Whether a signal handler raised it, whichever it is and whether it is still in place.

    Such a handler is a frame that was given the frame in which it struck: handlers get (number, frame).
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return any(_was_given(frame, outer) for outer, frame in pairwise(frames))


def is_from_outside(error: BaseException) -> bool:
    """Whether a signal handler raised it, or most likely another thread (PyThreadState_SetAsyncExc).

    The latter makes an instance without arguments in the midst of code that raises nothing itself. Where the same can
    be tried once more, that tells it for certain.
    """
    if is_from_signal(error):
        return True
    trace = error.__traceback__
    if trace is None or error.args or isinstance(error, _RAISED_WITHOUT_WORDS):
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code.co_code
    return dis.opname[code[trace.tb_lasti]] not in _RAISING


def interrupt_in(error: BaseException) -> BaseException | None:
    """The exception from outside that an error was made of, or that it is; None where there is none."""
    return next(filter(is_from_outside, causes(error)), None)


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that it was made of, the nearest first."""
    seen = []
    link: BaseException | None = error
    # Causes may form a ring: an error may be raised from one that has it as its context.
    while link is not None and link not in seen:
        seen.append(link)
        yield link
        # Dynamo's BackendCompilerFailed keeps the original as `inner_exception`, not as its cause.
        link = getattr(link, "inner_exception", None) or link.__cause__ or link.__context__


def raised_twice(job: Callable[[], object]) -> Exception | None:
    """Run a job that may fail, and run it once more if it raises; what both runs raise is its fault.

    A request's tokenizer, stop strings or parameters may raise any exception. So may a signal handler or another
    thread meanwhile: such an exception is for the caller on this thread.

    Returns:
        The fault; None when the job succeeded.

    Raises:
        Exception: one that was raised once. BaseException: an interrupt (KeyboardInterrupt, SystemExit).
    """
    try:
        job()
        return None
    except Exception as error:
        first = error
    try:
        return raised_again(first, job)
    finally:
        del first


def raised_again(first: Exception, job: Callable[[], object]) -> Exception | None:
    """`raised_twice` from where the job's first run has raised `first`."""
    try:
        if not is_from_signal(first):
            job()
    except Exception as error:
        if is_from_signal(error):
            raise
        return error
    try:
        raise first
    finally:
        del first


@contextmanager
def interrupts_as_they_are() -> Iterator[None]:
    """What code inside has made an error of its own of, though it came from outside, is raised as it was."""
    found: BaseException | None = None
    try:
        yield
    except Exception as error:
        found = interrupt_in(error)
        if found is None or found is error:
            raise
    if found is not None:
        try:
            raise found  # not in the block above, which would make the other error its context
        finally:
            del found


def _was_given(frame: FrameType, outer: FrameType) -> bool:
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)
    given = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
    return any(x is outer or (type(x) is tuple and any(y is outer for y in x)) for x in given)
