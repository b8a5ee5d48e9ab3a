"""Requests that end early, by a time limit or a cancellation, or with a failed round, or that a round begins anew."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from math import inf

from attention.errors import named_error
from specdec.errors import RoundFailedError
from specdec.requests.request import FinishReason, Request, Update


class Deadlines:
    """When requests with `SamplingParams.max_time` end, and which are cancelled.

    moments: (time.perf_counter seconds, request id), soonest first. cancelled: ids. dropped: those among them whose
    callers went away.
    """

    def __init__(self) -> None:
        self.moments: list[tuple[float, int]] = []
        self._of: dict[int, float] = {}
        self.cancelled = set[int]()
        self.dropped = set[int]()

    def cancel(self, request_ids: Sequence[int], dropped: bool = False) -> None:
        """End these with the next round, also one that runs now; may be called on any thread."""
        if dropped:
            self.dropped.update(request_ids)
        self.cancelled.update(request_ids)

    def add(self, request: Request) -> None:
        """Record a request, or its changed submission time; does nothing if it has no time limit."""
        if request.params.max_time in (None, inf):
            return
        self.discard(request.id)
        self._of[request.id] = moment = request.times.submitted + request.params.max_time
        insort(self.moments, (moment, request.id))

    def discard(self, request_id: int) -> None:
        """Forget a request that has ended. Its entry is found by bisection."""
        self.cancelled.discard(request_id)
        self.dropped.discard(request_id)
        moment = self._of.pop(request_id, None)
        if moment is not None:
            del self.moments[bisect_left(self.moments, (moment, request_id))]

    def updates(self, now: float, requests: Mapping[int, Request], others: Sequence[Update]) -> list[Update]:
        """Last updates of the waiting or running `requests` (by id) that have timed out or are cancelled.

        Each is returned until it is gone from `requests`, so a round that is repeated after an interrupt returns it
        again. A request that leaves for another engine continues there.

        others: updates of the same round; requests that they end are left out.
        """
        due = bisect_right(self.moments, (now, inf))
        alive = [moment for moment in self.moments[:due] if moment[1] in requests]
        self.moments = alive + self.moments[due:]
        ends: dict[int, FinishReason] = {i: "timeout" for _, i in alive}
        self.cancelled.intersection_update(requests)
        self.dropped.intersection_update(requests)
        ends |= dict.fromkeys(sorted(self.cancelled), "cancelled")
        found = {update.request_id: update for update in others}
        over = [requests[i] for i in ends if not (i in found and found[i].last) and not requests[i].leaves]
        return [r.end_early(ends[r.id], now, found[r.id].progress if r.id in found else r.progress) for r in over]


def round_failed(error: Exception, count: int) -> RoundFailedError:
    """A new error object for each request, because callers in several threads raise them."""
    failed = RoundFailedError(
        f"a round failed with {named_error(error)}; the {count} requests in it were ended, others go on"
    )
    failed.__cause__ = error
    return failed


def rewound(requests: Iterable[Request]) -> tuple[list[Request], int]:
    """Reset requests to their reported tokens, waiting. Their rows are not closed: the row table is discarded.

    Returns:
        The requests in order of their turns, and how many of them had a row.
    """
    waiting = sorted(requests, key=lambda request: request.turn)
    ran = [request for request in waiting if request.row >= 0]
    for request in waiting:
        request.rewind()
    for request in ran:
        request.preemptions += 1
    return waiting, len(ran)
