"""A fault of one request ends that request: everything but an interrupt is kept."""

from __future__ import annotations

import pytest

from specdec.engine.faults import Isolated, request_failed, round_failed
from specdec.errors import RequestFailedError, RoundFailedError


def test_an_error_is_kept_and_the_next_block_is_clean() -> None:
    with Isolated() as fault:
        raise ValueError("planted")
    assert isinstance(fault.error, ValueError)
    with Isolated() as fault:
        pass
    assert fault.error is None


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_goes_on(interrupt: type[BaseException]) -> None:
    fault = Isolated()
    with pytest.raises(interrupt), fault:
        raise interrupt
    assert fault.error is None


def test_the_errors_name_their_cause() -> None:
    cause = ValueError("planted")
    one, other = round_failed(cause, 3), round_failed(cause, 3)
    assert one is not other, "callers in several threads raise them"
    assert isinstance(one, RoundFailedError) and one.__cause__ is cause
    assert str(one) == "a round failed with ValueError: planted; the 3 requests in it were ended, others go on"
    own = request_failed(cause, "its tokenizer")
    assert isinstance(own, RequestFailedError) and own.__cause__ is cause
    assert str(own) == "a request was ended because its tokenizer raised ValueError: planted"
