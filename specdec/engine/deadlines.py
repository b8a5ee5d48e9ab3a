"""Deadlines: when requests with a time limit are to end."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence

from specdec.requests.request import Request, Update


class Deadlines:
    """The moments (time.perf_counter seconds) at which requests with `SamplingParams.max_time` end, soonest first."""

    def __init__(self) -> None:
        self._moments: list[tuple[float, int]] = []

    def add(self, request: Request) -> None:
        """Note a request that is queued; nothing where it has no limit."""
        if request.params.max_time is not None:
            insort(self._moments, (request.times.submitted + request.params.max_time, request.id))

    def updates(self, now: float, requests: Mapping[int, Request], others: Sequence[Update]) -> list[Update]:
        """End those of these requests, by id, whose time is over, waiting or running.

        They are named until they are gone: a round that is run again after an interrupt names them again. A request
        that leaves for another engine goes on there.

        others: updates of the same round; requests that they end are left out.
        """
        if not self._moments or self._moments[0][0] > now:
            return []
        due = bisect_right(self._moments, (now, self._moments[-1][1]))
        alive = [moment for moment in self._moments[:due] if moment[1] in requests]
        self._moments = [*alive, *self._moments[due:]]
        ended = {update.request_id for update in others if update.last}
        return [requests[i].timed_out(now) for _, i in alive if i not in ended and not requests[i].leaves]
