"""A fault of one request ends that request: what is raised once is no fault."""

from __future__ import annotations

import pytest

from specdec.engine.ends import round_failed
from specdec.errors import RequestFailedError, RoundFailedError
from specdec.interrupts import raised_twice
from specdec.requests.request import request_failed


def test_a_fault_is_what_is_raised_twice() -> None:
    assert isinstance(raised_twice(lambda: int("planted")), ValueError)
    assert raised_twice(lambda: None) is None


def test_what_is_raised_once_came_from_outside() -> None:
    left = [TimeoutError("from outside")]

    def job() -> None:
        if left:
            raise left.pop()

    with pytest.raises(TimeoutError, match="from outside"):
        raised_twice(job)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_goes_on(interrupt: type[BaseException]) -> None:
    calls: list[int] = []

    def job() -> None:
        calls.append(1)
        raise interrupt

    with pytest.raises(interrupt):
        raised_twice(job)
    assert len(calls) == 1


def test_the_errors_name_their_cause() -> None:
    cause = ValueError("planted")
    one, other = round_failed(cause, 3), round_failed(cause, 3)
    assert one is not other, "callers in several threads raise them"
    assert isinstance(one, RoundFailedError) and one.__cause__ is cause
    assert str(one) == "a round failed with ValueError: planted; the 3 requests in it were ended, others go on"
    own = request_failed(cause, "its tokenizer")
    assert isinstance(own, RequestFailedError) and own.__cause__ is cause
    assert str(own) == "a request was ended because its tokenizer raised ValueError: planted"
