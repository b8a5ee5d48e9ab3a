"""One asynchronous stream, and what its leader does when all fails, without a model: the parts by hand."""

from __future__ import annotations

import asyncio
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.engine.streams import StreamUpdate
from specdec.errors import ClosedModelError, RequestFailedError, SpecdecError
from specdec.extensions.service.asynchronous import AsyncStream, merged
from specdec.extensions.service.leading import Leader
from specdec.requests.logprobs import TokenLogprobs
from specdec.requests.request import Update
from tests.specdec.extensions.completions import completion

ONE, TWO = TokenLogprobs(1, -0.5, 0), TokenLogprobs(2, -1.5, 3)


def stream_of(count: int) -> tuple[AsyncStream, list[tuple[Any, ...]]]:
    """A stream of so many completions, queued at places from 10 on, and what it cancels there."""
    cancelled = list[tuple[Any, ...]]()
    shared = SimpleNamespace(cancel=lambda call, places, closed: cancelled.append((sorted(places), closed)))
    leader = SimpleNamespace(check_process=lambda: None, kept=set(), shared=shared, call=None)
    made = AsyncStream(leader, lambda: pytest.fail("there is nothing to make"))
    if count:
        made.queued(range(10, 10 + count))
    return made, cancelled


def ended(index: int, text: str = "", error: SpecdecError | None = None) -> tuple[int, Update]:
    return index, Update(index, [1], text, None if error else completion(text), error)


def test_two_updates_of_a_completion_are_one() -> None:
    first = StreamUpdate(3, [1], "a", None, (ONE,))
    last = StreamUpdate(3, [2], "b", completion("ab"), (TWO,))
    assert merged(first, last) == StreamUpdate(3, [1, 2], "ab", last.completion, (ONE, TWO))
    assert merged(first, StreamUpdate(3, [2], "", None, None)).logprobs == (ONE,)
    assert merged(StreamUpdate(3, [1], "", None, None), StreamUpdate(3, [2], "", None, None)).logprobs is None


def test_completions_are_in_the_order_of_their_call() -> None:
    async def read() -> Any:
        stream, _ = stream_of(3)
        for index in (2, 0, 1):
            stream.put(*ended(index, "abc"[index]))
        return [each.text for each in await stream.completions()]

    assert asyncio.run(read()) == ["a", "b", "c"]


def test_an_error_has_the_other_completions_with_it() -> None:
    async def read() -> None:
        stream, _ = stream_of(3)
        for each in (ended(2, "c"), ended(0, error=RequestFailedError("planted")), ended(1, "b")):
            stream.put(*each)
        await stream.completions()

    with pytest.raises(RequestFailedError, match="planted") as caught:
        asyncio.run(read())
    assert {i: each.text for i, each in caught.value.completions.items()} == {
        1: "b",
        2: "c",
    } and caught.value.index == 0


def test_what_ended_a_call_first_is_raised() -> None:
    async def read() -> None:
        stream, _ = stream_of(1)
        stream.fail(ClosedModelError("first"))
        stream.fail(SpecdecError("second"))
        await anext(stream)

    with pytest.raises(ClosedModelError, match="first"):
        asyncio.run(read())


def test_which_completions_are_cancelled() -> None:
    """One of them, those that are left, and, once they are queued, what was cancelled before."""
    stream, cancelled = stream_of(3)
    stream.cancel(1)
    stream.put(*ended(0))
    stream.cancel()
    assert cancelled == [([11], False), ([11, 12], False)]
    stream, cancelled = stream_of(0)
    stream.cancel(1)
    assert cancelled == []
    stream.queued(range(4, 6))
    assert cancelled == [([5], False)]


class Loop:
    """An event loop in which all is done at once."""

    def call_soon_threadsafe(self, call: Any, own: Any) -> None:
        call(own)


def leader() -> tuple[Leader, AsyncStream, AsyncStream, list[Any]]:
    """With a stream whose requests run, one that waits to be queued, and the calls that were given up."""
    abandoned = list[Any]()
    made = Leader(SimpleNamespace(abandon=abandoned.append, cancel=lambda *_: None))  # type: ignore[arg-type]
    streams = []
    for _ in range(2):
        stream, _ = stream_of(1)
        stream.loop = Loop()  # type: ignore[assignment]
        streams.append(stream)
    running, waiting = streams
    made.owners[0] = (weakref.ref(running), 0)
    made.new.append(waiting)
    return made, running, waiting, abandoned


def test_a_failure_ends_all_calls_and_the_next_ones_have_a_call_of_their_own() -> None:
    made, running, waiting, abandoned = leader()
    before, error = made.call, MemoryError("no memory")
    made.fail(error)
    assert abandoned == [before] and made.call is not before and not made.owners and not made.new
    for stream in (running, waiting):
        assert stream.changed.is_set(), "its reader is told"
        assert isinstance(stream.failure, SpecdecError) and "MemoryError" in str(stream.failure)
        assert stream.failure.__cause__ is error


def test_a_closed_model_is_no_failure() -> None:
    made, running, waiting, _ = leader()
    made.fail(ClosedModelError("closed"))
    for stream in (running, waiting):
        assert isinstance(stream.failure, ClosedModelError) and stream.failure.__cause__ is None
