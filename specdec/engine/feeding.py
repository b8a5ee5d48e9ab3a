"""Feeding: an iterator of any length -> requests of one open call, read only so far ahead as keeps the batch full."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

from transformers import GenerationConfig

from specdec.engine.streams import Stream, completed
from specdec.errors import InvalidInputError, SpecdecError
from specdec.requests.request import Completion, Ended
from specdec.requests.sampling import SamplingParams
from specdec.values import Fields, is_whole, short

T = TypeVar("T")


class Fed(NamedTuple):
    """How one request ended.

    item: the index of its item. place: its place in the call; -1 for an item that was refused before it got a place.
    found: its completion, or why it has none.
    """

    item: int
    place: int
    found: Completion | SpecdecError


class Feeding(Iterator[Fed], Generic[T]):
    """The ends of the requests that are made of an iterator's items, in order of their ends.

    `group` items are read at a time, and again once at most twice as many requests are left. So one check of the model
    serves a group, and a round in which every row ends still finds as many requests waiting.

    The iterator is read by the thread that reads this object, between rounds. Its exceptions are raised unchanged once
    the items before it have ended (an interrupt: at once).
    """

    def __init__(self, open_stream: Callable[[list[T]], Stream], items: Iterable[T], group: int) -> None:
        """open_stream: makes an unread stream of the requests of some items. If it raises InvalidInputError for several
        items, each is tried separately, and only the items that fail separately are reported as refused."""
        self._open = open_stream
        self._items = enumerate(items)
        self._group = group
        self._stream: Stream | None = None
        self._owners: dict[int, int] = {}
        self._error: Exception | None = None
        self._is_ended = False
        self._ends = self._run()

    def __next__(self) -> Fed:
        return next(self._ends)

    def end(self, error: Exception | None = None) -> None:
        """Read no more items; raise this once the requests that run have ended."""
        self._is_ended = True
        self._error = error

    def close(self) -> None:
        """Abort the remaining requests. Idempotent."""
        self._ends.close()

    def _run(self) -> Generator[Fed]:
        try:
            while not self._is_ended or self._owners:
                if not self._is_ended and len(self._owners) <= 2 * self._group:
                    yield from self._read()
                elif (ended := self._next_end()) is not None:
                    yield ended
            if self._error is not None:
                raise self._error
        finally:
            if self._stream is not None:
                self._stream.close()

    def _read(self) -> Iterator[Fed]:
        """Queue the next group. Yields refused items, and stops if their reader ends the iteration."""
        group = []
        error = None
        try:
            for one in islice(self._items, self._group):
                group.append(one)
        except Exception as raised:
            # User code may raise anything. The items read before it still run, and `end` re-raises it after them.
            error = raised
        yield from self._queue(group)
        if not self._is_ended and (error is not None or len(group) < self._group):
            self.end(error)

    def _queue(self, group: Sequence[tuple[int, T]]) -> Iterator[Fed]:
        """Queue items: all in one, or where one of them is refused, each by itself. Yields the refused."""
        if self._is_ended or not group:  # the reader may end the iteration when it receives a refused item
            return
        try:
            new = self._open([item for _, item in group])
            firsts = [request.sample_index == 0 for request in new.unread]
            if self._stream is None:
                self._stream = new
                places = range(len(firsts))
            else:
                places = self._stream.take_over(new)
        except InvalidInputError as error:
            if len(group) == 1:
                yield Fed(group[0][0], -1, error)
            else:
                for one in group:
                    yield from self._queue([one])
            return
        numbers = iter(group)
        item = -1
        for place, is_first in zip(places, firsts, strict=True):
            item = next(numbers)[0] if is_first else item
            self._owners[place] = item

    def _next_end(self) -> Fed | None:
        """Of the next update, if it is a request's last."""
        found = None if self._stream is None else self._stream.next_update()
        if found is None:
            raise SpecdecError("requests of this call are no longer in the engine: its model was used in a fork?")
        place, update = found
        result = update.completion or update.error
        return None if result is None else Fed(self._owners.pop(place), place, result)


def generated(stream: Callable[..., Stream], prompts: Any, params: Any, options: Fields, group: int) -> Iterator[Ended]:
    """(place, completion) of each as it finishes, of a list of prompts or of an iterator: see `generate_iter`.

    Raises:
        InvalidInputError: a list of params with an iterator; a bad prompt of it, with its index. Others as `generate`.
    """
    # Read item by item is an iterator or another iterable, but no prompt, list, set or array.
    whole = isinstance(prompts, Sequence | Mapping | Set) or hasattr(prompts, "shape")
    if whole or not isinstance(prompts, Iterable):
        yield from completed(stream(prompts, params, **options))
        return
    if isinstance(params, Sequence):
        raise InvalidInputError("params of an iterator's prompts are one for all, or it yields (prompt, params)")

    def opened(items: list[Any]) -> Stream:
        pairs = [item if _is_pair(item) else (_whole(item), None) for item in items]
        own = [each is not None for _, each in pairs]
        given = [each or params for _, each in pairs] if any(own) else params
        return stream([prompt for prompt, _ in pairs], given, **options)

    failed: list[SpecdecError] = []
    with closing(Feeding(opened, prompts, group)) as feeding:
        for item, place, found in feeding:
            if isinstance(found, Completion):
                yield place, found
            elif place < 0:
                feeding.end(type(found)(f"prompt {item}: {found}"))
            else:
                failed = [*failed[:1], found]
    if failed:
        raise failed[0]


def _is_pair(item: Any) -> bool:
    """Whether an item is (prompt, params)."""
    kinds = (SamplingParams, GenerationConfig, type(None))
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], kinds)


def _whole(prompt: Any) -> Any:
    """A prompt of an iterator. Raises InvalidInputError: it is a token id or a chat message, a part of a prompt."""
    if is_whole(prompt) or (isinstance(prompt, Mapping) and "input_ids" not in prompt):
        raise InvalidInputError(f"an iterator yields whole prompts, and {short(prompt)} is a part of one: give a list")
    return prompt
