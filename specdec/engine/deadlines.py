"""Deadlines: when requests with a time limit are to end."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence

from specdec.requests.request import Request, Update


class Deadlines:
    """When requests with `SamplingParams.max_time` end.

    moments: (time.perf_counter seconds, request id), soonest first.
    """

    def __init__(self) -> None:
        self.moments: list[tuple[float, int]] = []

    def add(self, request: Request) -> None:
        """Note a request that is queued; nothing where it has no limit."""
        if request.params.max_time is not None:
            insort(self.moments, (request.times.submitted + request.params.max_time, request.id))

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
        ended = {update.request_id for update in others if update.last}
        return [requests[i].timed_out(now) for _, i in alive if i not in ended and not requests[i].leaves]
