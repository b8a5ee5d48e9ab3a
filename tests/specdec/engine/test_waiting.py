"""The queue: any request is found at once, and what a round takes does not grow with those that wait."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from fakes import engine_of, examples, free_everywhere, hf_greedy, random_prompts, tiny_llama, wrap
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec.engine.admission
from specdec import SamplingParams
from specdec.engine.admission import WaitingRequests
from specdec.requests.request import Request

touched = 0


class Watched(Request):
    """A request that counts how often it is read or compared."""

    def __getattribute__(self, name: str) -> Any:
        global touched
        touched += 1
        return super().__getattribute__(name)

    def __eq__(self, other: object) -> bool:
        global touched
        touched += 1
        return self is other

    __hash__ = object.__hash__


def touches(waiting: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], float]:
    """Of each of eight rounds with so many requests behind them, one look at the usage included; and of the abort of
    those that are left, per request."""
    monkeypatch.setattr(specdec.engine.admission, "Request", Watched)
    wrapped = wrap(tiny_llama(), max_num_seqs=2)
    engine = engine_of(wrapped)
    ids = [engine.submit([1, 2, 3], SamplingParams(max_new_tokens=3, ignore_eos=True)) for _ in range(waiting + 8)]
    counts, ended = [], 0
    for _ in range(8):
        before = touched
        ended += sum(update.last for update in engine.step())
        assert engine.usage().waiting >= waiting
        counts.append(touched - before)
    assert ended >= 4, "rounds in which requests end are among them"
    left = engine.usage().requests
    before = touched
    engine.abort(ids[::-1])
    assert free_everywhere(wrapped)
    return counts, (touched - before) / left


def test_a_round_is_as_short_with_many_waiting_as_with_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed."""
    few, many = (touches(waiting, monkeypatch) for waiting in (10, 400))
    assert many[0] == few[0]
    assert many[1] <= few[1] + 1


def test_putting_a_call_in_order_touches_that_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specdec.engine.admission, "Request", Watched)
    counts = []
    for waiting in (10, 400):
        engine = engine_of(wrap(tiny_llama(), max_num_seqs=2))
        for _ in range(waiting):
            engine.submit([1, 2, 3], SamplingParams(max_new_tokens=3))
        ids = [engine.submit([1, 2, 3], SamplingParams(max_new_tokens=n)) for n in (3, 3, 3, 9)]
        before = touched
        engine.arrange(ids)
        counts.append(touched - before)
        assert [request.id for request in engine.scheduler.waiting][-4:] == [ids[3], *ids[:3]]
        engine.abort(range(ids[-1] + 1))
    assert counts[0] == counts[1]


def test_a_call_longer_than_the_batch_is_answered_in_its_own_order() -> None:
    prompts = random_prompts((5, 6, 7, 5, 9, 4, 4))
    wrapped = wrap(tiny_llama(), max_num_seqs=2)
    answers = wrapped.generate(prompts, SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert [answer.token_ids for answer in answers] == [hf_greedy(prompt, 4) for prompt in prompts]


class Plain:
    """A request, compared by identity."""


STEPS = ("append", "appendleft", "popleft", "remove", "arrange")


@settings(max_examples=examples(80), deadline=None)
@given(st.data())
@pytest.mark.thorough
def test_it_is_a_deque(data: st.DataObject) -> None:
    """Any order of its operations, beside one."""
    queue, model = WaitingRequests(), deque[Any]()
    for _ in range(data.draw(st.integers(0, 25))):
        step = data.draw(st.sampled_from(STEPS))
        new: Any = Plain()
        chosen: list[Any] = data.draw(st.lists(st.sampled_from(list(model)), unique=True)) if model else []
        if step in ("append", "appendleft"):
            getattr(queue, step)(new)
            getattr(model, step)(new)
        elif step == "popleft" and model:
            assert queue.first is model[0] and queue.popleft() is model.popleft()
        elif step == "arrange":
            for request in chosen:
                queue.move_to_end(request)
            model = deque([*(r for r in model if r not in chosen), *chosen])
        elif chosen:
            del queue[chosen[0]]
            model.remove(chosen[0])
            assert chosen[0] not in queue
        assert list(queue) == list(model) and len(queue) == len(model) and bool(queue) == bool(model)
        assert all(request in queue for request in model)


def test_nobody_waits_after_clear() -> None:
    waiting = WaitingRequests()
    each: Any = [Plain(), Plain()]
    waiting.extend(each)
    assert list(waiting) == each
    waiting.clear()
    assert not waiting and each[0] not in waiting
