"""Stream: an iterator over the updates of one call's requests."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from specdec.engine.sharing import SharedEngine
from specdec.errors import ENDED, SpecdecError
from specdec.requests.logprobs import TokenLogprobs
from specdec.requests.request import Call, Completion, Ended, Update
from specdec.requests.submission import Check, Submission


@dataclass(frozen=True)
class StreamUpdate:
    """New tokens and text of one completion, from one round.

    Attributes:
        index: its place in what `generate` returns: the prompt's, or with SamplingParams.n, where every prompt has n
            completions in a row, n·prompt + sample.
        token_ids: new token ids.
        text: new text; joined, the texts are the completion's.
        completion: set when it is finished.
        logprobs: log-probabilities of the new tokens, if the request set them.
    """

    index: int
    token_ids: list[int]
    text: str
    completion: Completion | None
    logprobs: tuple[TokenLogprobs, ...] | None = None


class Stream(Iterator[StreamUpdate]):
    """An iterator over the updates of one call. The first `next` queues its requests.

    May be read and closed on any thread; a with-block closes it at its end. A failed request does not end the others of
    its call: its error is raised after their last update.
    """

    def __init__(
        self,
        shared: SharedEngine,
        requests: Sequence[Submission] | None,
        call: Call | None = None,
        check: Check = None,
    ) -> None:
        """call: a call whose requests are already queued; then `requests` is None. check: see `SharedEngine.submit`."""
        self._check = check
        self._shared = shared
        self._requests = requests
        self._call = call
        self._errors: list[SpecdecError] = []
        self._cancelled = deque[tuple[int, ...]]()

    @property
    def num_requests(self) -> int:
        """Completions of the call, those that have ended among them; 0 once it is closed."""
        call = self._call
        unread = self._requests
        return len(unread or ()) if call is None else call.num_requests

    @property
    def unread(self) -> Sequence[Submission]:
        """Its requests, until its first `next`."""
        return self._requests or ()

    def __repr__(self) -> str:
        call = self._call
        left = self.num_requests if call is None else len(call.places)
        return f"Stream({left} of {self.num_requests} completions to come)"

    def __next__(self) -> StreamUpdate:
        """Raises RequestFailedError or RoundFailedError, after the last update, when requests failed."""
        try:
            call = self._call or self._queued()
            while call is not None and (found := self._shared.next(call)) is not None:
                place, update = found
                if update.error is None:
                    return StreamUpdate(place, update.token_ids, update.text, update.completion, update.logprobs)
                self._errors.append(placed(update.error, place))
            raise_first(self._errors)
            raise StopIteration
        except BaseException:  # the end, an error, or an interrupt: rows and pages must not wait for a reader
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next_update(self) -> tuple[int, Update] | None:
        """The next update with its place in the call, of a failed request too; None where all have ended."""
        call = self._call or self._queued()  # another thread may close the stream meanwhile
        return None if call is None else self._shared.next(call)

    def cancel(self, *indices: int) -> None:
        """End the completions at these `indices` of the call, or all: each is reported with the tokens that it
        has, finish reason "cancelled". On any thread, and never waits; nothing where they have ended."""
        self._cancelled.append(indices)
        self._pass_on_cancelled()

    def _pass_on_cancelled(self) -> None:
        """Also called once the call is queued: another thread may have cancelled while it was not."""
        call = self._call
        while call is not None and self._cancelled:
            with suppress(IndexError):  # the other thread was faster
                self._shared.cancel(call, self._cancelled.popleft())

    def completions(self) -> list[Completion]:
        """Read to the end: the completions in order. `cancel`, on another thread, ends them early. Raises as `next`."""
        return collected(completed(self))

    def hand_over(self) -> tuple[Sequence[Submission], Check]:
        """Close an unread stream and return its requests and their check."""
        requests = self._requests or ()
        self._requests = None
        return requests, self._check

    def take_over(self, other: Stream) -> range:
        """Queue the requests of an unread stream as part of this call; returns their places in it.

        Raises as the first `next` of the other would.
        """
        requests, check = other.hand_over()
        own = self._queued()
        before = 0 if own is None else own.num_requests
        self._call = self._shared.submit(requests, check, own)
        return range(before, before + len(requests))

    def _queued(self) -> Call | None:
        """The call, queued now if the stream is unread; None after `close`."""
        if self._requests is not None:
            requests = self._requests
            self._requests = None
            self._call = self._shared.submit(requests, self._check)
            self._pass_on_cancelled()
        return self._call

    def close(self) -> None:
        """End the call: unfinished requests are aborted without another update, and reading on stops. To keep what they
        have, see `cancel`. Idempotent, never waits, on any thread.

        Their rows and pages are free after the round that runs. The model serves other calls as before.

        >>> stream = model.stream([[5, 6], [7]], max_new_tokens=9)
        >>> first = next(stream)
        >>> stream.close()
        >>> next(stream, None), model.usage().requests
        (None, 0)
        """
        call = self._call
        self._call = None
        self._requests = None
        if call is not None:
            self._shared.abandon(call)

    def __del__(self) -> None:
        try:
            if not sys.is_finalizing():  # during finalization, globals of any module may be None already
                self.close()
        except AttributeError:  # __init__ did not come to its end, or `sys` is None itself
            return


def placed(error: SpecdecError, place: int) -> SpecdecError:
    """A failed request's error, with the index of its completion in the call."""
    if isinstance(error, ENDED):
        error.index = place
    return error


def collected(ended: Iterable[Ended]) -> list[Completion]:
    """(index, Completion) of each: the completions in order. An error of some has the others."""
    done = {}
    try:
        for index, completion in ended:
            done[index] = completion
    except ENDED as error:
        error.completions = done
        raise
    return [done[i] for i in sorted(done)]


def raise_first(errors: list[SpecdecError]) -> None:
    """Empty the list of a call's failed requests, and raise the first of their errors, with a note of how many others
    there were."""
    if errors:
        first, *more = errors
        errors.clear()
        if more:
            first.add_note(f"{len(more)} more requests of this call failed")
        raise first


def completed(stream: Stream) -> Iterator[Ended]:
    """(index, Completion) of each as it finishes; closes the stream at its end."""
    with stream:
        for update in stream:
            if update.completion is not None:
                yield update.index, update.completion
