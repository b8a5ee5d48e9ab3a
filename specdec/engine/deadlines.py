"""Deadlines: when requests with a time limit are to end."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from math import inf

from specdec.requests.request import Request, Update


class Deadlines:
    """When requests with `SamplingParams.max_time` end.

    moments: (time.perf_counter seconds, request id), soonest first.
    """

    def __init__(self) -> None:
        self.moments: list[tuple[float, int]] = []

    def add(self, request: Request) -> None:
        """Note a request that is queued; nothing where it has no limit."""
        if request.params.max_time not in (None, inf):
            insort(self.moments, (request.times.submitted + request.params.max_time, request.id))

    def discard(self, request: Request) -> None:
        """Forget a request that has ended."""
        if self.moments and request.params.max_time not in (None, inf):
            own = request.times.submitted + request.params.max_time, request.id
            self.moments = [moment for moment in self.moments if moment != own]

    def updates(self, now: float, requests: Mapping[int, Request], others: Sequence[Update]) -> list[Update]:
        """End those of these requests, by id, whose time is over, waiting or running.

        They are named until they are gone: a round that is run again after an interrupt names them again. A request
        that leaves for another engine goes on there.

        There must be moments. others: updates of the same round; requests that they end are left out.
        """
        if self.moments[0][0] > now:
            return []
        due = bisect_right(self.moments, (now, self.moments[-1][1]))
        alive = [moment for moment in self.moments[:due] if moment[1] in requests]
        self.moments = [*alive, *self.moments[due:]]
        found = {update.request_id: update for update in others}
        over = [requests[i] for _, i in alive if not (i in found and found[i].last) and not requests[i].leaves]
        return [r.timed_out(now, found[r.id].progress if r.id in found else r.progress) for r in over]
