"""A shared engine's own bookkeeping: calls, updates, what is abandoned; over an engine that only writes down."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec.engine.sharing import SharedEngine
from specdec.engine.stats import EngineStats
from specdec.errors import ClosedModelError, ModelChangedError, SpecdecError
from specdec.requests.request import Update

DONE: Any = "completion"


class Engine:
    """Each step reports what stands next in `script`: updates by request id, the last one of each request marked."""

    def __init__(self, *script: list[Update]) -> None:
        self.script = list(script)
        self.reported: list[Update] = []
        self.meanwhile: deque[Any] = deque()
        self.stats = EngineStats(rounds=7)
        self.next_id = 0
        self.has_work = True
        self.aborted: list[int] = []
        self.log: list[str] = []
        self.during: Any = lambda: None

    def submit(self, token_ids: Any, *_: Any) -> int:
        self.next_id += 1
        if token_ids == "bad":
            raise ValueError("refused")
        return self.next_id - 1

    def step(self) -> list[Update]:
        self.log.append("step")
        self.during()
        while self.meanwhile:
            self.meanwhile.popleft()()
        self.reported = self.script.pop(0) if self.script else []
        return self.reported

    def abort(self, ids: list[int]) -> None:
        self.aborted += ids

    def forget_prefixes(self) -> None:
        self.log.append("forget")

    def check_weights(self) -> None: ...

    def check_room(self, new: int) -> None: ...

    def arrange(self, ids: list[int]) -> None:
        self.log.append(f"arrange {ids}")

    def add_wait(self, ids: list[int], seconds: float) -> None: ...

    def usage(self) -> str:
        return "usage"


class Shared(SharedEngine):
    """One that can be looked into."""

    @property
    def calls(self) -> Any:
        return self._calls

    def deliver_again(self) -> None:
        """As after an interrupt."""
        self._delivered = []


def shared_over(engine: Engine) -> Shared:
    own: Any = engine
    return Shared(own, torch.device("cpu"))


def asked(*prompts: str) -> Any:
    return [SimpleNamespace(submit_to=lambda engine, ids=prompt: engine.submit(ids)) for prompt in prompts]


def update(number: int, token: int, last: bool = False) -> Update:
    return Update(number, [token], "", DONE if last else None)


def drained(shared: Shared, call: Any) -> list[tuple[int, int]]:
    found = []
    while (one := shared.next(call)) is not None:
        found.append((one[0], one[1].token_ids[0]))
    return found


def test_every_call_gets_its_own_updates_and_is_forgotten_at_its_end() -> None:
    engine = Engine([update(0, 1), update(2, 2)], [update(1, 3, True), update(2, 4, True)], [update(0, 5, True)])
    shared = shared_over(engine)
    first, second = shared.submit(asked("a", "b")), shared.submit(asked("c"))
    assert drained(shared, second) == [(0, 2), (0, 4)] and engine.log == ["arrange [0, 1]", "step", "step"]
    assert drained(shared, first) == [(0, 1), (1, 3), (0, 5)]
    assert engine.log[1:] == ["step"] * 3 and not shared.calls and not engine.aborted


def test_requests_of_a_call_that_is_refused_are_ended() -> None:
    engine = Engine([update(2, 1, True)])
    shared = shared_over(engine)
    with pytest.raises(ValueError, match="refused"):
        shared.submit(asked("a", "bad", "c"))
    call = shared.submit(asked("d"))
    assert engine.aborted[:2] == [0, 1] and drained(shared, call) == [(0, 1)]


def test_a_call_abandoned_while_others_are_ended_is_ended_too() -> None:
    """By another thread, or a finalizer, in the very moment in which the engine forgets what was abandoned before."""
    engine = Engine()
    shared = shared_over(engine)
    first, second = shared.submit(asked("a")), shared.submit(asked("b"))
    plain = engine.abort

    def aborting(ids: list[int]) -> None:
        plain(ids)
        if ids == [0]:
            shared.abandon(second)

    engine.abort = aborting  # type: ignore[method-assign]
    shared.abandon(first)
    assert engine.aborted == [0, 1] and not shared.calls


def test_a_refused_call_empties_the_prefix_cache_after_its_round_and_no_other() -> None:
    """Its round may have read its prompt through what has changed; the rounds of others have not."""
    engine = Engine([update(0, 1)], [update(1, 2)], [update(1, 3, True)])
    shared = shared_over(engine)

    def check() -> None:
        raise ModelChangedError("moved")

    refused, other = shared.submit(asked("a"), check), shared.submit(asked("b"))
    with pytest.raises(ModelChangedError, match="moved"):
        drained(shared, refused)
    shared.abandon(refused)
    assert drained(shared, other) == [(0, 2), (0, 3)]
    assert engine.log == ["step", "forget", "step", "step"] and engine.aborted == [0]


def test_nothing_enters_the_engine_from_inside_a_round() -> None:
    """By a tokenizer or a hook: it would wait for itself."""
    engine = Engine([update(0, 1, True)])
    shared, refused = shared_over(engine), []

    def during() -> None:
        for entering in (lambda: shared.submit(asked("b")), shared.usage, shared.close, shared.help):
            with pytest.raises(SpecdecError, match="from inside one of its own rounds"):
                entering()  # type: ignore[operator]
            refused.append(1)

    engine.during = during
    assert drained(shared, shared.submit(asked("a"))) == [(0, 1)] and len(refused) == 4
    assert shared.usage() == "usage"


def test_what_was_reported_before_close_is_handed_out() -> None:
    engine = Engine([update(0, 1), update(1, 2)])
    shared = shared_over(engine)
    first, second = shared.submit(asked("a")), shared.submit(asked("b"))
    assert shared.next(first) is not None
    engine.reported = [update(1, 3)]  # by a round that an interrupt ended before it was delivered
    shared.close()
    shared.close()
    assert [shared.next(second) for _ in range(2)] == [(0, update(1, 2)), (0, update(1, 3))]
    for call in (first, second):
        with pytest.raises(ClosedModelError, match="closed while this request was running"):
            shared.next(call)
        assert not call.places
    assert not shared.calls and shared.stats == engine.stats
    with pytest.raises(ClosedModelError, match="is closed"):
        shared.check_open()


def test_an_update_is_handed_out_once() -> None:
    """Also where an interrupt ended its delivery, and it is delivered again."""
    engine = Engine([update(0, 1)], [update(0, 2, True)])
    shared = shared_over(engine)
    call = shared.submit(asked("a"))
    assert shared.next(call) == (0, update(0, 1))
    shared.deliver_again()
    assert drained(shared, call) == [(0, 2)]


def test_requests_that_vanish_are_a_bug_and_not_waited_for() -> None:
    engine = Engine()
    shared = shared_over(engine)
    call = shared.submit(asked("a"))
    engine.has_work = False
    with pytest.raises(SpecdecError, match="nothing reported their end: a bug"):
        shared.next(call)
